"""Hands waiting tasks to workers: who gets which, who starts, who gives some back. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from muster.farm.backlog import Backlog
from muster.farm.decisions import Decisions, Policy, Send
from muster.farm.roster import (
    Pace,
    Roster,
    Worker,
    divisible,
    hire,
    take_group,
    to_revoke,
    whom_to_ask,
)
from muster.farm.task import TargetSpec, Task


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
                taken, self._backlog.queue = take_group(self._backlog.queue, first, limit, workers)
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
        worker.call = frozenset(task.task_id for task in tasks if together)
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
                workers[0].solo_key = key
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

    def _share(self, hungry: int, now: float, out: Decisions) -> None:
        """Ask a running task to give part of its remaining work to idle workers."""
        if self._backlog.is_fetching:
            return
        worker = whom_to_ask(self._roster.workers.values(), self._targets, now)
        if worker is not None:
            worker.is_asked = True
            out.shares.append((worker.worker_id, next(iter(worker.in_flight)), hungry))

    def _start_workers(self, now: float, out: Decisions) -> None:
        roster, backlog = self._roster, self._backlog
        open_work = backlog.num_open()
        if len(roster.workers) < len(roster.slots):
            open_work += len(divisible(roster.workers.values(), self._targets, now))
        out.starts.extend(hire(roster, now, backlog.reserved, backlog.wary, open_work))
