"""From a run to one tracker: nothing twice, nothing lost, and only what is new.

The order makes it so. The ends are looked up before the points, so that an end is told after all
points of its task; the position is saved after the tracker has accepted; and a step that a metric
has had already is skipped, as a repeated attempt sends it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from muster.api.trackers.position import Position
from muster.api.trackers.tracker import Ended, Point, Tracked, Tracker, TrackerRun


class Source(Protocol):
    """What a run says of itself; marks are JSON, and None stands for the beginning."""

    def read(self, mark: Any) -> tuple[Any, Mapping[int, Sequence[Point]]]:
        """Some points after ``mark`` by their task, and the mark behind them; the same mark where
        nothing is left."""

    def last_steps(self, task: int, mark: Any) -> Mapping[str, int]:
        """The last step of each metric of a task in what stands before ``mark``."""

    def tracked(self, task: int) -> Tracked: ...

    def ends(
        self, known: Collection[tuple[int, int]], *, is_over: bool
    ) -> list[tuple[tuple[int, int], Ended]]:
        """What has ended, but for the ``known``: task and attempt, and how. Not all at once.

        ``is_over``: nobody works on the run any more."""

    def num_after(self, mark: Any) -> int:
        """How many points stand after ``mark``."""


def feed(source: Source, tracker: Tracker, position: Position, wait: Callable[[], bool]) -> None:
    """Send what there is and what comes, until ``wait``, which pauses, says that the run is over
    and all of it was sent."""
    runs = _Runs(source, tracker, position)
    is_over = False
    while True:
        ends = source.ends(position.ended, is_over=is_over)
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
        if ends:
            continue  # there may be more of them
        if is_over:
            runs.stop()
            return
        is_over = wait()


class _Runs:
    """The runs of the tracker that are open: those that were written last."""

    def __init__(self, source: Source, tracker: Tracker, position: Position) -> None:
        self._source = source
        self._tracker = tracker
        self._position = position
        self._open: OrderedDict[int, tuple[TrackerRun, dict[str, int]]] = OrderedDict()

    def log(self, batches: Mapping[int, Sequence[Point]]) -> None:
        """Return when all of it is accepted."""
        for task, points in batches.items():
            run, last = self._get(task)
            if fresh := _fresh(points, last):
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

    def _get(self, task: int) -> tuple[TrackerRun, dict[str, int]]:
        if task not in self._open:
            while len(self._open) >= self._tracker.most_open:
                run, _ = self._open.popitem(last=False)[1]
                run.settle()
                run.leave()
            run = self._tracker.open(self._source.tracked(task))
            last = dict(self._source.last_steps(task, self._position.mark))
            for name, step in run.last_steps.items():
                last[name] = max(step, last.get(name, step))
            self._open[task] = run, last
        self._open.move_to_end(task)
        return self._open[task]


def _fresh(points: Sequence[Point], last: dict[str, int]) -> list[Point]:
    """Those beyond the last step of their metric, sorted by step; ``last`` is brought up to date.

    >>> last = {"loss": 1}
    >>> points = [Point("loss", 1, 0.0, 9.0), Point("loss", 2, 0.0, 8.0)]
    >>> [point.step for point in _fresh(points, last)], last
    ([2], {'loss': 2})
    """
    fresh = []
    for point in points:
        if point.name not in last or point.step > last[point.name]:
            last[point.name] = point.step
            fresh.append(point)
    return sorted(fresh, key=lambda point: point.step)
