"""What a tracker is given, and what it is asked: the seam between a run and W&B, MLflow, ….

All of this happens in a process of its own, see `muster.api.trackers.process`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

#: How what is tracked has ended; "stopped": it goes on when the run is resumed.
Ending = Literal["done", "failed", "stopped"]
#: Where the tracker's user names no project or experiment.
PROJECT = "muster"


class Point(NamedTuple):
    """One number that was logged; ``time_s`` is in seconds since 1970. ``attempt`` grows with every
    attempt, which may log the steps of the one before again."""

    name: str
    step: int
    time_s: float
    value: float
    attempt: int = 0


def rows_of(points: Iterable[Point]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and values by name: points of one step that follow each other are one row. Where
    a metric has the step again, another row begins.

    >>> points = [Point("a", 1, 0.0, 5.0), Point("b", 1, 0.0, 6.0), Point("a", 1, 0.0, 7.0)]
    >>> list(rows_of(points))
    [(1, 0.0, {'a': 5.0, 'b': 6.0}), (1, 0.0, {'a': 7.0})]
    """
    row: dict[str, float] = {}
    step, time_s = 0, 0.0
    for point in points:
        if row and (point.step != step or point.name in row):
            yield step, time_s, row
            row = {}
        if not row:
            step, time_s = point.step, point.time_s
        row[point.name] = point.value
    if row:
        yield step, time_s, row


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What becomes one run of a tracker: a task of a sweep, or a whole map or training.

    ``id`` is the same in every session, and another one in a copy of the run folder. ``folder``:
    the part of a file name that belongs to it, empty for a whole run. ``tags`` are facts such as
    the version of muster.
    """

    id: str
    name: str
    group: str
    folder: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it has ended, with what it has returned, at ``time_s`` (0: not known)."""

    state: Ending
    result: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = 0.0


class TrackerRun(Protocol):
    """One run in a tracker, open to be written.

    ``last_steps``: of every metric that the tracker had when the run was opened the last step, as
    far as the tracker can tell. Any method may raise what the tracker's library raises: then the
    process ends, and the next one begins where the last accepted batch ended.
    """

    last_steps: Mapping[str, int]

    def log(self, points: Sequence[Point]) -> None:
        """Hand points over; they are sorted by step."""

    def settle(self) -> None:
        """Return when the tracker has accepted all that was logged."""

    def finish(self, ended: Ended) -> None:
        """Say how it has ended; it may be opened again and go on."""

    def leave(self) -> None:
        """Put it aside: others are written now."""


class Tracker(Protocol):
    """A tracker's library. ``most_open``: how many runs of it may be open at a time."""

    most_open: int

    def open(self, tracked: Tracked) -> TrackerRun: ...


class Place(NamedTuple):
    """Where trackers keep what stays on this machine: in the run folder."""

    trackers: Path
    tensorboard: Path
