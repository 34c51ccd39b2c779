"""Which row killed the worker. Pure: what was noted before the end, and what to do about it.

An attempt notes the rows it is about to work on. When it dies by the task's own fault (the farm
counts that as a try), the next attempt takes just those rows one by one; the row at which a worker
dies once more than the retries allow is condemned: it becomes a reject and the rest goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from muster.pipeline.batch import Failure


class Kind(IntEnum):
    """What an attempt was at. Stored: never renumber."""

    NOTHING = 0
    BATCH = 1
    SINGLE = 2
    STARTING = 3


class Doubt(NamedTuple):
    """Rows ``start`` to ``stop`` were suspect when the task had ``tries``; of a SINGLE one the
    row ``start`` was being worked on. ``blame``: how often it, or the set-up, had failed before.
    """

    start: int
    stop: int
    tries: int
    kind: Kind
    blame: int


@dataclass(frozen=True)
class Suspicion:
    """Rows from ``start`` to ``stop`` go one by one; ``condemned`` is not tried again."""

    start: int = 0
    stop: int = 0
    blamed: int = -1
    blame: int = 0
    condemned: int = -1
    num_starts: int = 0

    def is_suspect(self, row: int) -> bool:
        return self.start <= row < self.stop

    @property
    def verdict(self) -> Failure:
        return Failure(
            "worker",
            f"the worker process died or hung {self.blame} times while it worked on this record; "
            "its log has the last words: muster errors RUN",
        )

    def note(self, start: int, stop: int, tries: int) -> Doubt:
        """What to write down before rows ``start`` to ``stop`` are worked on."""
        if self.is_suspect(start):
            blame = self.blame if start == self.blamed else 0
            return Doubt(start, self.stop, tries, Kind.SINGLE, blame)
        return Doubt(start, stop, tries, Kind.BATCH, 0)

    def starting(self, tries: int) -> Doubt:
        return Doubt(0, 0, tries, Kind.STARTING, self.num_starts)


def suspect(doubt: Doubt | None, tries: int, retries: int) -> Suspicion:
    """What an earlier attempt's note means now; it means nothing if that one was not to blame."""
    if doubt is None or tries <= doubt.tries or doubt.kind is Kind.NOTHING:
        return Suspicion()
    if doubt.kind is Kind.STARTING:
        return Suspicion(num_starts=doubt.blame + 1)
    if doubt.kind is Kind.BATCH:
        return Suspicion(start=doubt.start, stop=doubt.stop)
    blame = doubt.blame + 1
    return Suspicion(
        start=doubt.start,
        stop=doubt.stop,
        blamed=doubt.start,
        blame=blame,
        condemned=doubt.start if blame > retries else -1,
    )
