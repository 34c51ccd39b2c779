"""How long tasks take, and what follows: how many a worker is given ahead, and in which order the
last tasks of a run begin (longest first). Pure.

A run is over with its last task, so a long one had better not begin last. All others keep the order
of the plan, in which every setting has its first seed before any has its second.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from muster.farm.canonical import decode
from muster.farm.events import Fetched
from muster.farm.task import TargetSpec, Task

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


#: From this length on a task hides its own commit, and handing out ahead would cost balance.
_LONG_S = 1.0
_WEIGHT = 0.1
#: Of shorter tasks the order makes no difference that anybody sees.
_WORTH_ORDER_S = 0.05


class Pace:
    """An exponential mean of task lengths per target, and the lead that follows from it; and what
    single tasks took, where they are long.
    """

    def __init__(self, lead_s: float, max_lead: int, targets: Mapping[int, TargetSpec]) -> None:
        self._lead_s = lead_s
        self._max_lead = max_lead
        self._mean_s: dict[int, float] = {}
        self._lengths = Lengths()
        # Tasks of one call stand together, and the chunks of a map are written in their order.
        self._has_order = any(one.is_batched or one.is_divisible for one in targets.values())
        self._is_last = False  # what waits is in the order that ends soonest

    def learn(self, task: Task, seconds: float) -> None:
        number = task.target_id
        mean = self._mean_s.get(number)
        self._mean_s[number] = seconds if mean is None else mean + _WEIGHT * (seconds - mean)
        if seconds >= _WORTH_ORDER_S:
            self.remember([(number, task.payload, seconds)])

    def remember(self, ended: Iterable[tuple[int, bytes, float]]) -> None:
        """What tasks took: the number of the target, the parameters, seconds."""
        for number, payload, seconds in ended:
            if seconds >= _WORTH_ORDER_S and not self._has_order:
                self._lengths.learn(number, payload, seconds)

    def queue(self, waiting: deque[Task], event: Fetched, workers: int) -> deque[Task]:
        """What waits, with what was fetched; the last tasks in the order that ends soonest."""
        waiting.extend(event.tasks)
        self._is_last = event.exhausted and not self._has_order
        if not self._is_last:
            return waiting
        return deque(longest_first(waiting, self._lengths.expected_s, workers))

    def lead(self, target_id: int) -> int:
        """Tasks kept in a worker: one when unknown or long, enough to hide a commit when short.

        The last tasks are given one by one, or one worker would have the two longest of them.
        """
        mean = self._mean_s.get(target_id)
        if mean is None or mean >= (_WORTH_ORDER_S if self._is_last else _LONG_S):
            return 1
        return min(self._max_lead, max(2, math.ceil(self._lead_s / max(mean, 1e-6))))

    def longest_lead(self) -> int:
        """The largest lead of any target seen so far."""
        return max((self.lead(target_id) for target_id in self._mean_s), default=1)
