"""Finding a row that kills its workers: what an attempt notes, and how the next one goes on.

It uses no files and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from muster.base.shown_text import count
from muster.pipeline.batch import Failure


class Kind(IntEnum):
    """What an attempt was doing. The numbers are on disk: never change them."""

    NOTHING = 0
    BATCH = 1
    SINGLE = 2
    STARTING = 3
    # As BATCH and SINGLE, and the context of the GPU broke:
    BROKEN_BATCH = 4
    BROKEN_SINGLE = 5

    @property
    def is_broken(self) -> bool:
        return self in (Kind.BROKEN_BATCH, Kind.BROKEN_SINGLE)


class InProgress(NamedTuple):
    """What an attempt notes before it works on rows ``start`` to ``stop``.

    ``tries``: the failed attempts of the task by then. With the kind SINGLE it was working on the
    row ``start`` alone. ``failures``: how often that row, or the set-up, had killed its worker
    before. ``doubted``: the first of the rows before ``start`` that killed their workers and are
    not in the journal; -1: there is none.
    """

    start: int
    stop: int
    tries: int
    kind: Kind
    failures: int
    doubted: int = -1

    def broken(self) -> InProgress:
        """The same note once the context is broken."""
        kinds = {Kind.BATCH: Kind.BROKEN_BATCH, Kind.SINGLE: Kind.BROKEN_SINGLE}
        return self._replace(kind=kinds.get(self.kind, self.kind))


@dataclass(frozen=True)
class Recovery:
    """How an attempt goes on after one that died by the task's own fault (a try, to the farm).

    Rows ``start`` to ``stop``, which the dead worker had, are tried one by one. A row at which
    workers die more often than the retries allow is ``rejected`` instead, and the rest goes on.
    So are the rows from ``doubted`` on before ``row``: none of them is stored until a worker has
    lived through another row, because it may be the device that kills them all.
    ``num_deaths``: of how many workers each of them was the end. ``has_broken``: the last of those
    workers broke the context of its GPU.
    """

    start: int = 0
    stop: int = 0
    row: int = -1
    failures: int = 0
    rejected: int = -1
    doubted: int = -1
    num_starts: int = 0
    num_deaths: int = 0
    has_broken: bool = False

    def is_suspect(self, row: int) -> bool:
        return self.start <= row < self.stop

    def has_verdict(self, row: int) -> bool:
        return row == self.rejected or 0 <= self.doubted <= row < self.row

    @property
    def verdict(self) -> Failure:
        times = count(self.num_deaths, "time")
        said = f"the worker process died or hung {times}"
        if self.has_broken:
            said = f"the GPU context of the worker process broke {times}"
        where = "its log has the last lines: muster errors RUN"
        return Failure("worker", f"{said} while it worked on this record; {where}")

    def note(self, start: int, stop: int, tries: int, doubted: int = -1) -> InProgress:
        """The note to write before rows ``start`` to ``stop`` are worked on."""
        if self.is_suspect(start):
            failures = self.failures if start == self.row else 0
            return InProgress(start, self.stop, tries, Kind.SINGLE, failures, doubted)
        return InProgress(start, stop, tries, Kind.BATCH, 0, doubted)

    def starting(self, tries: int) -> InProgress:
        return InProgress(0, 0, tries, Kind.STARTING, self.num_starts)


def recovery(note: InProgress | None, tries: int, retries: int) -> Recovery:
    """How to go on after an attempt with this note; as from the start if no row was at fault."""
    if note is None or tries <= note.tries or note.kind is Kind.NOTHING:
        return Recovery()
    if note.kind is Kind.STARTING:
        return Recovery(num_starts=note.failures + 1)
    is_single = note.kind in (Kind.SINGLE, Kind.BROKEN_SINGLE)
    failures = note.failures + 1 if is_single else 0
    return Recovery(
        start=note.start if note.doubted < 0 else note.doubted,
        stop=note.stop,
        row=note.start,
        failures=failures,
        rejected=note.start if failures > retries else -1,
        doubted=note.doubted,
        num_deaths=retries + 1,
        has_broken=note.kind.is_broken,
    )
