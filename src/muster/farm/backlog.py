"""Claimed tasks that no worker has, and when more of them are to be fetched; how long tasks take,
and what follows: how many a worker is given ahead, and in which order the last tasks of a run begin
(longest first). Pure.

A run is over with its last task, so a long one had better not begin last. All others keep the order
of the plan, in which every setting has its first seed before any has its second.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from muster.farm.canonical import decode
from muster.farm.decisions import Policy
from muster.farm.events import Fetched
from muster.farm.roster import Roster
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

    def learn(self, ended: Iterable[tuple[Task, float]]) -> None:
        """How many seconds tasks have just taken, in their order."""
        means = self._mean_s
        for task, seconds in ended:
            number = task.target_id
            mean = means.get(number, seconds)
            means[number] = mean + _WEIGHT * (seconds - mean)
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


class Backlog:
    """Where tasks wait for a worker.

    ``queue``: for any; ``solo``: for a device that they have to themselves; ``wary``: for another
    device than that on which they crashed; ``fresh``: for a worker that has done nothing yet.
    ``reserved``: by device, the task that has it to itself, also while a worker runs it.
    ``exhausted``: nothing is left to be fetched.
    """

    def __init__(
        self,
        policy: Policy,
        targets: Mapping[int, TargetSpec],
        roster: Roster,
        pace: Pace,
        expected: int,
    ) -> None:
        self.queue: deque[Task] = deque()
        self.solo: deque[Task] = deque()
        self.wary: deque[Task] = deque()
        self.fresh: deque[Task] = deque()
        self.reserved: dict[str, Task] = {}
        self.exhausted = False
        self._delayed: list[tuple[float, int, Task]] = []  # a heap: when it is due, its id
        self._policy, self._targets, self._roster, self._pace = policy, targets, roster, pace
        self._expected = expected
        self._is_fetching = False

    def __bool__(self) -> bool:
        waiting = self.queue or self.solo or self.wary or self.fresh
        return bool(waiting or self._delayed or self.reserved)

    def tasks(self) -> list[Task]:
        """All of them, also those with a device to themselves that a worker runs."""
        delayed = (task for _, _, task in self._delayed)
        waiting = (*self.queue, *self.solo, *self.wary, *self.fresh)
        return [*waiting, *delayed, *self.reserved.values()]

    # ------------------------------------------------------------------ in and out

    def add(self, task: Task, *, front: bool = False) -> None:
        if task.solo:
            self.solo.append(task)
        elif task.fresh:
            self.fresh.append(task)
        elif task.avoid and any(self._roster.usable_without(task.avoid)):
            self.wary.append(task)
        elif front:
            self.queue.appendleft(task)
        else:
            self.queue.append(task)

    def delay(self, task: Task, due_s: float) -> None:
        """Keep it for its next try, until ``due_s`` on the scheduler's clock."""
        heapq.heappush(self._delayed, (due_s, task.task_id, task))

    def add_due(self, now: float) -> None:
        """Add those whose pause is over."""
        while self._delayed and self._delayed[0][0] <= now:
            self.add(heapq.heappop(self._delayed)[2])

    @property
    def due_s(self) -> float | None:
        """When the next pause is over."""
        return self._delayed[0][0] if self._delayed else None

    def take(self, task_id: int) -> Task | None:
        """Take it out, wherever it waits; None where it does not."""
        for waiting in (self.queue, self.solo, self.wary, self.fresh):
            for task in waiting:
                if task.task_id == task_id:
                    waiting.remove(task)
                    return task
        for entry in self._delayed:
            if entry[1] == task_id:
                self._delayed.remove(entry)
                heapq.heapify(self._delayed)
                return entry[2]
        for key, task in self.reserved.items():
            if task.task_id == task_id:
                return self.reserved.pop(key)
        return None

    def take_untried(self) -> list[Task]:
        """Take out of the queue what is as it was claimed."""
        untried = [one for one in self.queue if not (one.tries or one.losses or one.batch_limit)]
        ids = {one.task_id for one in untried}
        self.queue = deque(one for one in self.queue if one.task_id not in ids)
        return untried

    def give_up(self, device_key: str) -> None:
        """Let the task for which a device is reserved have another one."""
        task = self.reserved.pop(device_key, None)
        if task is not None and not self._roster.has(task.task_id):
            self.solo.appendleft(task)

    # ------------------------------------------------------------------ fetching

    def fetched(self, event: Fetched) -> None:
        self._is_fetching = False
        self._expected = max(0, self._expected - len(event.tasks))
        self.queue = self._pace.queue(self.queue, event, len(self._roster.usable()))
        self.exhausted = event.exhausted

    def expect(self, count: int) -> None:
        """There are ``count`` tasks more to be fetched than was known."""
        self._expected += count
        self.exhausted = False

    @property
    def is_fetching(self) -> bool:
        return self._is_fetching

    def to_fetch(self) -> int:
        """How many tasks are asked for now."""
        want = self._window()
        is_short = len(self.queue) < (want // 2 if self._policy.asks_ahead else want)
        if self.exhausted or self._is_fetching or not is_short:
            return 0
        self._is_fetching = True
        return want - len(self.queue)

    def num_wanted(self) -> int:
        """How many tasks it would be good to have now."""
        return max(0, self._window() - len(self.queue))

    def num_open(self) -> int:
        """About how many tasks are still to be handed out, without those that pause."""
        waiting = len(self.queue) + len(self.solo) + len(self.wary) + len(self.fresh)
        return waiting if self.exhausted else waiting + self._expected

    def _window(self) -> int:
        """How many tasks should wait here."""
        if not self._policy.asks_ahead:
            return self._num_free()
        lead = self._pace.longest_lead()
        batch = max((target.max_batch for target in self._targets.values()), default=0)
        return min(8192, max(16, 2 * max(lead, batch) * max(1, len(self._roster.slots))))

    def _num_free(self) -> int:
        """Slots that idle, less those that tasks in hand will take: one that pauses keeps a slot,
        and one that crashed takes none of the device that it avoids."""
        free = Counter(
            slot.spec.device_key
            for slot in self._roster.usable()
            if slot.spec.device_key not in self.reserved and not self._roster.is_busy(slot)
        )
        pausing = [task for _, _, task in self._delayed]
        num_waiting = len(self.solo) + len(self.fresh) + len(self.wary) + len(pausing)
        avoided = Counter(task.avoid for task in (*self.wary, *pausing) if task.avoid)
        left = free.total() - num_waiting
        for key, num in avoided.items():
            if any(self._roster.usable_without(key)):
                left = max(left, free[key] - (num_waiting - num))
        return max(0, left)
