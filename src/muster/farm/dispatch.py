"""Hands waiting tasks to workers: who gets which, who starts, who gives some back. Pure.

Where a worker has nothing to do and no task waits, a divisible task is asked to give away a part,
so that a run does not end with one busy worker.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from muster.farm.backlog import Backlog, Pace
from muster.farm.decisions import Decisions, Policy, Send
from muster.farm.events import Event, Results
from muster.farm.roster import Roster, Slot, Worker, runs_divisible, to_revoke
from muster.farm.task import TargetSpec, Task

#: Results that are worth a commit, however much their workers have left to do.
_FEW = 16


class Dispatcher:
    """The last part of a turn, when everything that happened is known."""

    def __init__(
        self,
        policy: Policy,
        targets: Mapping[int, TargetSpec],
        roster: Roster,
        pace: Pace,
        backlog: Backlog,
    ) -> None:
        self._policy, self._targets, self._roster = policy, targets, roster
        self._pace, self._backlog = pace, backlog

    def serve(self, now: float, out: Decisions) -> None:
        """Have every worker that can take one given a task, and fetch more where few are left."""
        for worker in self._roster.surplus():
            out.stop(worker)
        self._start_workers(now, out)
        self._serve_solo(now, out)
        self._serve_wary(now, out)
        self._serve_fresh(now, out)
        hungry = 0
        for worker in self._roster.available(self._pace.longest_lead() // 2):
            if worker.slot.spec.device_key in self._backlog.reserved:
                continue
            if not self._backlog.queue:
                hungry += not worker.in_flight
                continue
            self._feed(worker, now, out)
        if hungry and not self._backlog.queue:
            began = now - self._policy.lead_s
            out.revokes.extend(to_revoke(self._roster.workers.values(), began))
            self._share(hungry, now, out)
        out.fetch = self._backlog.to_fetch()

    def _feed(self, worker: Worker, now: float, out: Decisions) -> None:
        first = self._backlog.queue[0]
        target = self._targets[first.target_id]
        held = len(worker.in_flight)
        if target.is_batched:
            if held == 0:
                limit = target.batch_on(worker.slot.spec.kind)
                workers = len(self._roster.usable())
                taken, self._backlog.queue = _take_group(self._backlog.queue, first, limit, workers)
                self._send(worker, taken, True, now, out)
            return
        depth = self._pace.lead(first.target_id)
        if not self._has_room(worker, first):
            return
        tasks: list[Task] = []
        while self._backlog.queue and len(tasks) < depth - held:
            if self._backlog.queue[0].target_id != first.target_id:
                break
            tasks.append(self._backlog.queue.popleft())
        self._send(worker, tasks, False, now, out)

    def _has_room(self, worker: Worker, task: Task) -> bool:
        """Whether the worker may get this task on top of what it holds."""
        held = len(worker.in_flight)
        if held == 0:
            return True
        if worker.together or self._targets[task.target_id].is_batched:
            return False
        return held <= self._pace.lead(task.target_id) // 2

    def _send(
        self, worker: Worker, tasks: list[Task], together: bool, now: float, out: Decisions
    ) -> None:
        if not worker.in_flight:
            worker.begins(now)
        worker.together = together
        worker.call = frozenset(task.task_id for task in tasks) if together else frozenset()
        self._roster.give(worker, tasks)
        out.sends.append(Send(worker.worker_id, tasks, together))

    def _serve_solo(self, now: float, out: Decisions) -> None:
        """Reserve a device for each task that must be alone, empty it, then send the task."""
        backlog = self._backlog
        for slot in self._roster.usable() if backlog.solo else ():
            if backlog.solo and slot.spec.device_key not in backlog.reserved:
                backlog.reserved[slot.spec.device_key] = backlog.solo.popleft()
        for key, task in backlog.reserved.items():
            workers = self._roster.workers_on(key)
            for extra in workers[1:]:
                if not extra.in_flight:
                    out.stop(extra)
            if len(workers) == 1 and workers[0].is_idle:
                workers[0].solo_id = task.task_id
                self._send(workers[0], [task], self._targets[task.target_id].is_batched, now, out)

    def _serve_wary(self, now: float, out: Decisions) -> None:
        """A task that crashed goes to another device first, if there is one left."""
        backlog = self._backlog
        if not backlog.wary:
            return
        most = self._pace.longest_lead() // 2
        # Looked for once in a turn, and gone through in a circle, the idle first.
        able = deque(self._roster.available(most))
        for _ in range(len(backlog.wary)):
            task = backlog.wary.popleft()
            if not any(self._roster.usable_without(task.avoid)):
                backlog.queue.appendleft(task)
                continue
            away = (task.avoid, *backlog.reserved)
            is_batched = self._targets[task.target_id].is_batched
            for _ in range(len(able)):
                worker = able[0]
                able.rotate(-1)
                if worker.slot.spec.device_key not in away and self._has_room(worker, task):
                    self._send(worker, [task], is_batched, now, out)
                    break
            else:
                backlog.wary.append(task)

    def _serve_fresh(self, now: float, out: Decisions) -> None:
        """A task that was stopped for memory which others may have left goes to a worker that has
        done nothing yet: mostly the next one in the slot of the one that was killed.
        """
        backlog = self._backlog
        if not backlog.fresh:
            return
        for worker in self._roster.available(0):
            is_reserved = worker.slot.spec.device_key in backlog.reserved
            if backlog.fresh and not (worker.has_worked or is_reserved):
                task = backlog.fresh.popleft()
                self._send(worker, [task], self._targets[task.target_id].is_batched, now, out)
        if not backlog.fresh or any(self._roster.startable(now)):
            return
        workers = self._roster.workers.values()
        if workers and all(worker.ready and not worker.stopping for worker in workers):
            # No place is left for a new one: the next that has done its work makes room.
            out.stop(min(workers, key=lambda worker: len(worker.in_flight)))

    def _share(self, hungry: int, now: float, out: Decisions) -> None:
        """Ask a running task to give part of its remaining work to idle workers."""
        if self._backlog.is_fetching:
            return
        worker = _whom_to_ask(self._roster.workers.values(), self._targets, now)
        if worker is not None:
            worker.is_asked = True
            out.shares.append((worker.worker_id, next(iter(worker.in_flight)), hungry))

    def _start_workers(self, now: float, out: Decisions) -> None:
        roster, backlog = self._roster, self._backlog
        open_work = backlog.num_open()
        if len(roster.workers) < len(roster.slots):
            open_work += len(_divisible(roster.workers.values(), self._targets, now))
        starts = _hire(roster, now, backlog.reserved, backlog.wary, open_work, len(backlog.fresh))
        out.starts.extend(starts)


def may_wait(events: Iterable[Event], roster: Roster, pace: Pace) -> bool:
    """Whether these are few results, of workers that all have enough left to do.

    Those of commands come one by one, and to commit each costs a tenth of a command.
    """
    num_ended = Counter[int]()
    for event in events:
        if not isinstance(event, Results):
            return False
        num_ended[event.worker_id] += len(event.finished)
    enough = max(2, pace.longest_lead() // 3)
    return num_ended.total() < _FEW and all(
        worker_id in roster.workers and len(roster.workers[worker_id].in_flight) - num >= enough
        for worker_id, num in num_ended.items()
    )


def _take_group(
    queue: deque[Task], first: Task, max_batch: int, num_workers: int
) -> tuple[list[Task], deque[Task]]:
    """Tasks of the same shape as ``first``, and the queue without them.

    No more than an even share for all workers, so that none is idle while one has them all.
    """
    limit = first.batch_limit or max_batch
    same = [
        task
        for task in queue
        if task.group == first.group
        and task.target_id == first.target_id
        and task.batch_limit == first.batch_limit
    ]
    if not first.batch_limit:
        limit = min(limit, math.ceil(len(same) / max(1, num_workers)))
    taken = same[: max(1, limit)]
    ids = {task.task_id for task in taken}
    return taken, deque(task for task in queue if task.task_id not in ids)


#: A task that has run for less is not asked: it may be over any moment.
SHARE_AFTER_S = 0.5


def _divisible(
    workers: Iterable[Worker], targets: Mapping[int, TargetSpec], now: float
) -> list[Worker]:
    """Workers whose running task could be divided, as far as is known."""
    return [
        worker
        for worker in workers
        if runs_divisible(worker, targets)
        and worker.ready
        and not (worker.has_declined or worker.killing or worker.poisoned)
        and now - worker.head_since > SHARE_AFTER_S
    ]


def _whom_to_ask(
    workers: Iterable[Worker], targets: Mapping[int, TargetSpec], now: float
) -> Worker | None:
    """The worker with the most work left; None while another has not answered yet."""
    known = list(workers)
    if any(worker.is_asked for worker in known):
        return None
    able = _divisible(known, targets, now)
    return max(able, key=lambda worker: worker.left) if able else None


def _hire(
    roster: Roster,
    now: float,
    reserved: Collection[str],
    wary: Collection[Task],
    open_work: int,
    num_fresh: int,
) -> Iterator[tuple[int, int]]:
    """Start what the open work can use, as slot and worker: three tasks never start eight workers.

    ``reserved``: devices that a task has to itself; ``wary``: tasks that avoid a device;
    ``num_fresh``: tasks that want a worker which has done nothing yet.
    """
    if len(roster.workers) == len(roster.slots):
        return  # asked in every turn, of thousands of slots
    for key in reserved:
        if not roster.workers_on(key):
            there = (slot for slot in roster.startable(now) if slot.spec.device_key == key)
            yield from _hire_in(roster, next(there, None))
    slots = [slot for slot in roster.startable(now) if slot.spec.device_key not in reserved]
    if not slots:
        return
    idle = [
        worker
        for worker in roster.workers.values()
        if worker.is_free and worker.slot.spec.device_key not in reserved
    ]
    free = [worker.slot.spec.device_key for worker in idle]
    num_fresh -= sum(not worker.has_worked for worker in idle)
    for task in wary:
        if all(key == task.avoid for key in free):
            able = next((slot for slot in slots if slot.spec.device_key != task.avoid), None)
            for started in _hire_in(roster, able):
                assert able is not None
                free.append(able.spec.device_key)
                yield started
    for slot in slots:
        if len(free) >= open_work and num_fresh <= 0:
            return
        for started in _hire_in(roster, slot):
            free.append(slot.spec.device_key)
            num_fresh -= 1
            yield started


def _hire_in(roster: Roster, slot: Slot | None) -> Iterator[tuple[int, int]]:
    """A worker in ``slot``; none where the slot or its device is full by now."""
    if slot is not None and roster.has_room(slot):
        yield slot.spec.slot_id, roster.hire(slot).worker_id
