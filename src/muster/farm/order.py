"""In which order the last tasks of a run begin: longest first, by what similar tasks took. Pure.

A run is over with its last task, so a long one had better not begin last. All others keep the order
of the plan, in which every setting has its first seed before any has its second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from muster.farm.canonical import decode
from muster.farm.task import Task

#: More values than this are not told apart, so that memory stays as it is; and none of a parameter
#: that has more than this, such as a seed, of which each value is seen once.
_MOST_VALUES, _MOST_OF_ONE = 10_000, 1000
_LONGEST_TEXT = 64
_SHORTEST_S = 1e-3
#: Lengths differ a little for no reason; what gains less leaves the order as it is.
_WORTH_IT = 0.98


class _Mean:
    def __init__(self) -> None:
        self.mean, self.num = 0.0, 0

    def add(self, value: float) -> None:
        self.num += 1
        self.mean += (value - self.mean) / self.num


class Lengths:
    """What tasks took, by the values of their parameters: each makes its tasks longer by a factor.

    So a setting is known by its other seeds, and one that has not run yet by the settings that have
    a value in common with it.
    """

    def __init__(self) -> None:
        self._all: dict[int, _Mean] = {}  # of logarithms, by target
        self._by_value: dict[tuple[int, str], dict[object, _Mean] | None] = {}  # None: too many
        self._num_values = 0
        self._least, self._most = math.inf, -math.inf

    def learn(self, target_id: int, payload: bytes, seconds: float) -> None:
        log_s = math.log(max(seconds, _SHORTEST_S))
        self._least, self._most = min(self._least, log_s), max(self._most, log_s)
        self._all.setdefault(target_id, _Mean()).add(log_s)
        for name, value in _values_in(payload):
            known = self._by_value.setdefault((target_id, name), {})
            if known is None:
                continue
            if value not in known:
                if self._num_values == _MOST_VALUES:
                    continue
                self._num_values += 1
                known[value] = _Mean()
            known[value].add(log_s)
            if len(known) > _MOST_OF_ONE:
                self._num_values -= len(known)
                self._by_value[target_id, name] = None

    def expected_s(self, task: Task) -> float | None:
        """How long it will take, within what tasks took so far; None before any has ended."""
        whole = self._all.get(task.target_id)
        if whole is None:
            return None
        log_s = whole.mean
        for name, value in _values_in(task.payload):
            known = self._by_value.get((task.target_id, name)) or {}
            if value in known:
                log_s += known[value].mean - whole.mean
        return math.exp(min(max(log_s, self._least), self._most))


def _values_in(payload: bytes) -> Iterator[tuple[str, object]]:
    try:
        params = decode(payload)
    except (ValueError, LookupError, TypeError):
        return
    if not isinstance(params, dict):
        return
    for name, value in params.items():
        if isinstance(value, int | float) or (
            isinstance(value, str) and len(value) <= _LONGEST_TEXT
        ):
            yield name, value


def longest_first(
    tasks: Sequence[Task], expected_s: Callable[[Task], float | None], workers: int
) -> list[Task]:
    """The most urgent first, and of equally urgent ones the longest, where the whole is then over
    sooner with so many workers; else as they were.
    """
    given = sorted(tasks, key=lambda task: -task.priority)
    seconds = {task.task_id: expected_s(task) for task in given}
    known = {number: value for number, value in seconds.items() if value is not None}
    if len(known) < len(tasks):
        return given
    longest = sorted(given, key=lambda task: (-task.priority, -known[task.task_id]))
    before, after = (
        makespan([known[task.task_id] for task in order], workers) for order in (given, longest)
    )
    return longest if after < _WORTH_IT * before else given


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of them ends, if each begins where a worker is free first."""
    free = [0.0] * max(1, workers)
    for length in seconds:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
