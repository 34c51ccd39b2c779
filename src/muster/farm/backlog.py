"""Claimed tasks that no worker has, and when more of them are to be fetched. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from muster.farm.decisions import Policy
from muster.farm.events import Fetched
from muster.farm.order import Pace
from muster.farm.roster import Roster
from muster.farm.task import TargetSpec, Task


class Backlog:
    """Where tasks wait for a worker.

    ``queue``: for any; ``solo``: for a device that they have to themselves; ``wary``: for another
    device than that on which they crashed; ``fresh``: for a worker that has done nothing yet.
    ``reserved``: by device, the task that has it to itself,
    also while a worker runs it. ``exhausted``: nothing is left to be fetched.
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
        roster = self._roster
        if not self._policy.asks_ahead:
            busy = sum(bool(worker.in_flight) for worker in roster.workers.values())
            others = len(self.solo) + len(self.wary) + len(self.fresh) + len(self._delayed)
            return max(0, len(roster.usable()) - busy - others - len(self.reserved))
        lead = self._pace.longest_lead()
        batch = max((target.max_batch for target in self._targets.values()), default=0)
        return min(8192, max(16, 2 * max(lead, batch) * max(1, len(roster.slots))))
