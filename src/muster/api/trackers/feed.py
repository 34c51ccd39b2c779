"""From a run to one tracker: nothing twice, nothing lost, and only what is new.

The order makes it so. The ends are looked up before the points, so that an end is told after all
points of its task; the position is saved after the tracker has accepted; and a step that a metric
has had in an earlier attempt is skipped, as a repeated one sends it again. Within an attempt a
metric may have a step as often as it likes: a step is an epoch, and there are folds.

How far each tracker has got is in the run folder. A line is added when a tracker has accepted a
batch, in one write: a kill leaves the line or does not, and in the second case the tracker is asked
what it has.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from muster.api.trackers.tracker import Ended, Point, Tracked, Tracker, TrackerRun
from muster.base.atomic_files import replacing
from muster.base.errors import SetupError
from muster.base.journal import read_journal

#: The exit code of a process that has sent everything, which no accident gives.
DONE = 100


class Source(Protocol):
    """What a run says of itself; marks are JSON, and None stands for the beginning."""

    def looking(self) -> AbstractContextManager[None]:
        """Inside, the run may be what it was at the beginning."""

    def read(self, mark: Any) -> tuple[Any, Mapping[int, Sequence[Point]]]:
        """Some points after ``mark`` by their task, and the mark behind them; the same mark where
        nothing is left."""

    def before(self, task: int, mark: Any) -> Iterable[Point]:
        """The points of a task before ``mark``, or of each metric the last one."""

    def tracked(self, task: int) -> Tracked: ...

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        """What has ended, except for the ``known``: task and attempt, and how. Not all at once.

        ``is_over``: nobody works on the run any more."""

    def num_after(self, mark: Any) -> int:
        """How many points stand after ``mark``."""


def feed(
    source: Source, tracker: Tracker, position: Position, wait: Callable[[float], bool]
) -> None:
    """Send what there is and what comes, until ``wait`` says that the run is over and everything
    was sent. ``wait`` pauses; it is told how many seconds it took to look for ends."""
    runs = _Runs(source, tracker, position)
    is_over = False
    while True:
        begun_s = time.monotonic()
        with source.looking():
            ends = source.ends(position.ended, is_over=is_over)
            took_s = time.monotonic() - begun_s
            while True:
                mark, batches = source.read(position.mark)
                if mark == position.mark:
                    break
                runs.log(batches)
                position.mark = mark
                position.save()
            for key, ended in ends:
                runs.finish(key[0], ended)
                position.end(key)
                position.save()
            if is_over and not ends:
                runs.stop()
                return
        if not ends:  # else there may be more of them
            is_over = wait(took_s)


class _Runs:
    """The runs of the tracker that are open: those that were written last."""

    def __init__(self, source: Source, tracker: Tracker, position: Position) -> None:
        self._source = source
        self._tracker = tracker
        self._position = position
        self._open: OrderedDict[int, tuple[TrackerRun, dict[str, _SentSteps]]] = OrderedDict()

    def log(self, batches: Mapping[int, Sequence[Point]]) -> None:
        """Return when all of it is accepted."""
        for task, points in batches.items():
            had = self._open[task][1] if task in self._open else self._had(task)
            if not _fresh(points, {name: replace(mine) for name, mine in had.items()}):
                continue  # late points of a task that has ended must not begin it again
            run, had = self._get(task)
            if fresh := _fresh(points, had):
                run.log(fresh)
            self._position.begin(task)
        for task in batches.keys() & self._open.keys():
            self._open[task][0].settle()

    def finish(self, task: int, ended: Ended) -> None:
        self._get(task)[0].finish(ended)
        del self._open[task]
        self._position.rest(task)

    def stop(self) -> None:
        """The run is over: what has not ended goes on another day."""
        for task in sorted(self._position.begun):
            self.finish(task, Ended(state="stopped"))
        self._position.save()
        while self._open:
            self._open.popitem()[1][0].leave()

    def _had(self, task: int) -> dict[str, _SentSteps]:
        had: dict[str, _SentSteps] = {}
        _fresh(self._source.before(task, self._position.mark), had)
        return had

    def _get(self, task: int) -> tuple[TrackerRun, dict[str, _SentSteps]]:
        if task not in self._open:
            while len(self._open) >= self._tracker.most_open:
                run, _ = self._open.popitem(last=False)[1]
                run.settle()
                run.leave()
            run = self._tracker.open(self._source.tracked(task))
            had = self._had(task)
            for name, step in run.last_steps.items():
                mine = had.setdefault(name, _SentSteps())
                if step > mine.highest:
                    mine.sent = step
            self._open[task] = run, had
        self._open.move_to_end(task)
        return self._open[task]


_LEAST = -1 << 64  # below all steps


@dataclass
class _SentSteps:
    """What there was of a metric.

    ``earlier``: the highest step of the attempts before ``attempt``. ``sent``: the highest step
    that the tracker has of points that are still to come, as a process that has died sent them
    without saying so.
    """

    attempt: int = 0
    highest: int = _LEAST
    earlier: int = _LEAST
    sent: int = _LEAST


def _fresh(points: Iterable[Point], had: dict[str, _SentSteps]) -> list[Point]:
    """Those that the tracker has to get, sorted by step; ``had`` is brought up to date.

    >>> had = {}
    >>> first = [Point("loss", step, 0.0, 9.0, attempt=1) for step in (0, 1, 0, 1)]
    >>> again = [Point("loss", step, 0.0, 8.0, attempt=2) for step in (0, 1, 2)]
    >>> [point.step for point in _fresh(first, had)], [point.step for point in _fresh(again, had)]
    ([0, 0, 1, 1], [2])
    """
    fresh = []
    for point in points:
        mine = had.setdefault(point.name, _SentSteps(attempt=point.attempt))
        if point.attempt > mine.attempt:
            mine.attempt, mine.earlier = point.attempt, mine.highest
        if point.step <= (mine.earlier if point.attempt == mine.attempt else mine.highest):
            continue
        # The dead process has sent them sorted, so all up to its last one, unless steps repeat:
        # then rather twice than never.
        if not mine.highest < point.step <= mine.sent:
            mine.sent = _LEAST
            fresh.append(point)
        mine.highest = max(mine.highest, point.step)
    return sorted(fresh, key=lambda point: point.step)


class Position:
    """A context that holds the tracker's place: two processes would send everything twice.

    ``mark``: what the source said after the last batch that was accepted, None before any;
    ``ended``: of what the end was told, as the source names it; ``begun``: of which tasks the
    tracker has a run that has not ended. All begin anew for another ``run_id``, that of a copied
    folder.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.mark: Any = None
        self.ended: set[tuple[int, int]] = set()
        self.begun: set[int] = set()
        self._path = path
        self._run_id = run_id
        self._line = _Line()
        self._saved: Any = None

    def __enter__(self) -> Self:
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise PositionTaken(
                f"Another process is sending this run to {self._path.stem}."
            ) from None
        self.mark, self.ended, self.begun = read_position(self._path, self._run_id)
        self._saved = self.mark
        # Written anew: a long run leaves many lines, of which the last one and the ends matter.
        self._line = _Line(ended=sorted(self.ended), begun=sorted(self.begun))
        with replacing(self._path) as beside:
            beside.write_bytes(self._take_line())
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        os.close(self._lock)

    def begin(self, task: int) -> None:
        if task not in self.begun:
            self.begun.add(task)
            self._line.begun.append(task)

    def rest(self, task: int) -> None:
        """It has ended, or goes on another day."""
        self.begun.discard(task)
        self._line.rested.append(task)

    def end(self, key: tuple[int, int]) -> None:
        self.ended.add(key)
        self._line.ended.append(key)

    def save(self) -> None:
        if self.mark != self._saved or self._line != _Line():
            # One write for all of it: the mark and the ends that belong to it are both there or
            # neither. The first line break ends what a writer that was killed has left torn.
            os.write(self._file, b"\n" + self._take_line())

    def _take_line(self) -> bytes:
        line, self._line, self._saved = self._line, _Line(), self.mark
        return json.dumps({"run": self._run_id, "mark": self.mark, **asdict(line)}).encode() + b"\n"


@dataclass
class _Line:
    """What has changed since the last line."""

    ended: list[tuple[int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    rested: list[int] = field(default_factory=list)


class PositionTaken(SetupError):
    """Another process has the tracker's place."""


def read_position(path: Path, run_id: str) -> tuple[Any, set[tuple[int, int]], set[int]]:
    """The mark, the ends and what has begun, as far as they are of ``run_id``. Changes nothing."""
    mark: Any = None
    ended: set[tuple[int, int]] = set()
    begun: set[int] = set()
    for line in read_journal(path):
        if line.get("run") == run_id:
            mark = line.get("mark")
            ended |= {(int(task), int(token)) for task, token in line.get("ended", ())}
            begun = (begun | set(line.get("begun", ()))) - set(line.get("rested", ()))
    return mark, ended, begun
