"""The scheduler: state and events in, instructions out. No clock, no input, no output.

The coordinator feeds ``Scheduler.step`` with what happened since the last step and obeys the
``Decisions`` that come back, in this order: record in the ledger, commit, then send, start and
kill. Everything that can race is decided here, so races are table tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from muster.farm.backlog import Backlog, Pace
from muster.farm.canonical import payload_and_key
from muster.farm.decisions import (
    Decisions,
    Division,
    Policy,
    cause_of,
    death_as_finished,
    fingerprint,
)
from muster.farm.dispatch import Dispatcher
from muster.farm.events import (
    Capacity,
    Divided,
    Drain,
    Event,
    Fetched,
    Progress,
    Reopen,
    Results,
    Returned,
    Slots,
    StopTask,
    WorkerDied,
    WorkerLeaving,
    WorkerReady,
)
from muster.farm.halting import Halts, let_go
from muster.farm.quarantine import Quarantine
from muster.farm.roster import (
    Breaker,
    Roster,
    Slot,
    Worker,
    due_s,
    to_revoke,
)
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec, TargetSpec, Task

#: An `AttemptRecord` of all of its fields, without a look at each.
_RECORD = cast("Callable[[tuple[Any, ...]], AttemptRecord]", partial(tuple.__new__, AttemptRecord))


class Scheduler:
    """Hands claimed tasks to workers; owns every retry. Deterministic for a given seed."""

    def __init__(
        self,
        policy: Policy,
        slots: Sequence[SlotSpec],
        targets: Mapping[int, TargetSpec],
        *,
        expected: int = 1 << 62,
        first_worker_id: int = 1,
    ) -> None:
        """``expected``: about how many tasks will come; no more workers than that are started."""
        self.policy = policy
        self.targets = targets
        self.roster = Roster(slots, first_worker_id)
        self.draining = False
        self.paused = ""
        self.ok_count = 0
        self._breaker = Breaker(policy.same_failure_limit)
        self.pace = Pace(policy.lead_s, policy.max_lead, targets)
        self.backlog = Backlog(policy, targets, self.roster, self.pace, expected)
        self._dispatcher = Dispatcher(policy, targets, self.roster, self.pace, self.backlog)
        self._jitter = random.Random(0)
        self._quarantine = Quarantine(policy, self.roster, self.backlog)
        self.halts = Halts(policy, targets, self.roster)
        self._now = 0.0

    # ------------------------------------------------------------------ the outside

    @property
    def is_finished(self) -> bool:
        """Nothing runs and nothing more will be handed out."""
        if any(worker.in_flight for worker in self.roster.workers.values()):
            return False
        if self.draining or self.paused or not self.roster.usable():
            return True
        return self.backlog.exhausted and not self.backlog

    def open_tasks(self) -> list[Task]:
        """Claimed tasks that have not ended: to be given back when the run stops early."""
        held = self.backlog.tasks()
        for worker in self.roster.workers.values():
            held.extend(worker.in_flight.values())
        return list({task.task_id: task for task in held}.values())

    def next_deadline(self) -> float | None:
        """When something is due without any event: a retry, a restart, a time limit."""
        times = [] if self.backlog.due_s is None else [self.backlog.due_s]
        times.extend(slot.start_after for slot in self.roster.waiting(self._now))
        if self.halts:
            all_due = map(self.halts.due_s, self.halts.holders())
            times.extend(due for due in all_due if due is not None)
        if self.policy.timeout_s is not None:
            times.extend(
                due_s(worker, self.targets, self.policy.timeout_s)
                for worker in self.roster.workers.values()
                if worker.in_flight and not worker.killing
            )
        return min(times, default=None)

    def step(self, events: Iterable[Event], now: float) -> Decisions:
        out = Decisions()
        self._now = now
        for event in events:
            match event:
                case Results():
                    self._on_results(event, now, out)
                case Fetched():
                    self.backlog.fetched(event)
                case WorkerReady():
                    self.roster.ready(event.worker_id)
                case Returned():
                    self._on_returned(event)
                case Progress():
                    self._on_progress(event, now)
                case Divided():
                    self._on_divided(event, out)
                case WorkerDied():
                    self._on_death(event, now, out)
                case WorkerLeaving(worker_id) if worker_id in self.roster.workers:
                    self.roster.workers[worker_id].stopping = True
                case Capacity():
                    self.roster.allow(event.device_key, event.workers)
                case Slots():
                    let_go(self.roster, event, self.backlog, out)
                case StopTask():
                    self.halts.stop(event, self.backlog, now, out)
                case Reopen():
                    self._on_reopen(event, out)
                case Drain():
                    self.draining = True
        self.backlog.add_due(now)
        self.halts.end_waiting(self.backlog, now, out)
        self.halts.kill_overdue(now, out)
        if self.draining or self.paused:
            out.revokes.extend(to_revoke(self.roster.workers.values()))
        else:
            self._dispatcher.serve(now, out)
        self._retire_idle(out)
        return out

    # ------------------------------------------------------------------ what happened

    def _on_results(self, event: Results, now: float, out: Decisions) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is None:
            out.late += [(event.worker_id, finished) for finished in event.finished]
            return
        worker_id, held, take, ok = worker.worker_id, worker.in_flight, self.roster.take, Outcome.OK
        done: list[tuple[Task, AttemptRecord]] = []
        for finished in event.finished:
            task_id, token = finished.task_id, finished.token
            task = held.get(task_id)
            if task is None or task.token != token:
                out.late.append((worker_id, finished))
                continue
            take(worker, task_id)
            record = _RECORD((task_id, token, worker_id, finished))
            if finished.outcome is ok:
                done.append((task, record))
                continue
            self._on_done(worker, done, now, out)
            done = []
            self._on_failure(worker, task, record, now, out)
        self._on_done(worker, done, now, out)

    def _on_done(
        self,
        worker: Worker,
        done: Sequence[tuple[Task, AttemptRecord]],
        now: float,
        out: Decisions,
    ) -> None:
        """What follows from tasks that a worker has done one after the other: mostly for all of
        them at once, since short ones come by hundreds.
        """
        if not done:
            return
        self._has_let_go(worker)
        worker.begins(now)
        self.ok_count += len(done)
        out.done += [record for _, record in done]
        self.pace.learn([(task, record.finished.seconds) for task, record in done])
        if self.halts:
            for task, _ in done:
                self.halts.forget(task.task_id)  # it was done before it could be stopped
        self._quarantine.done(worker.slot.spec.device_key, [task for task, _ in done], out)
        is_poisoned = any(record.finished.poisoned for _, record in done)
        self._goes_on(worker, done[-1][0], out, is_poisoned=is_poisoned)

    def _on_failure(
        self, worker: Worker, task: Task, record: AttemptRecord, now: float, out: Decisions
    ) -> None:
        self._has_let_go(worker)
        worker.begins(now)
        outcome, is_poisoned = record.finished.outcome, record.finished.poisoned
        is_in_doubt = is_poisoned and worker.call_size > 1
        if is_in_doubt and not (outcome.is_blameless or outcome is Outcome.DEVICE_FAULT):
            self._halve_call(task, record.finished, worker, out)
        else:
            self._fail(task, record, worker, now, out)
        self._goes_on(worker, task, out, is_poisoned=is_poisoned)

    def _goes_on(self, worker: Worker, task: Task, out: Decisions, *, is_poisoned: bool) -> None:
        """``task`` is the last that the worker has ended."""
        worker.has_shared = False
        worker.has_worked = True
        if is_poisoned:
            worker.poisoned = True  # it ends itself, without beginning anything else
            out.stop(worker)

    def _has_let_go(self, worker: Worker) -> None:
        """The worker has a task less, perhaps its last."""
        if not worker.in_flight:
            worker.together = False
            self._reserved_done(worker)

    def _reserved_done(self, worker: Worker) -> None:
        key = worker.slot.spec.device_key
        reserved = self.backlog.reserved.get(key)
        # Its device may have been given back and be reserved for another task by now.
        if reserved is not None and reserved.task_id == worker.solo_id:
            del self.backlog.reserved[key]
        worker.solo_id = None

    def _on_returned(self, event: Returned) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is None:
            return
        worker.revoking = False
        back = [worker.in_flight[i] for i in event.task_ids if i in worker.in_flight]
        for task in reversed(back):
            self.roster.take(worker, task.task_id)
            self._has_let_go(worker)
            self.backlog.add(task, front=True)

    def _on_progress(self, event: Progress, now: float) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is not None and next(iter(worker.in_flight), None) == event.task_id:
            worker.sign_s = now
            worker.left = event.numbers.get("left", worker.left)
            if event.numbers.get("records", 0) > event.numbers.get("rejected", 0):
                self._quarantine.progressed(worker.slot.spec.device_key)

    def _on_divided(self, event: Divided, out: Decisions) -> None:
        """Part of a running task becomes tasks of their own, fetched like any others."""
        worker = self.roster.workers.get(event.worker_id)
        task = worker.in_flight.get(event.task_id) if worker else None
        if worker is None or task is None or task.token != event.token:
            return  # its result would be late as well: the whole task runs elsewhere
        worker.is_asked = False
        worker.has_declined = not event.given
        if event.given:
            make = payload_and_key(self.targets[task.target_id].name)
            smaller = task._replace(payload=make(dict(event.kept))[0])
            worker.in_flight[task.task_id] = smaller
            given = [make(dict(params)) for params in event.given]
            out.divided.append(Division(smaller, given))
            self.backlog.expect(len(event.given))

    def _on_death(self, event: WorkerDied, now: float, out: Decisions) -> None:
        worker, tasks = self.roster.remove(event.worker_id)
        if worker is None:
            return
        slot = worker.slot
        if not worker.ready and not worker.stopping:
            self._start_failed(slot, event, now, out)
        self._reserved_done(worker)
        if tasks:
            finished = death_as_finished(event, worker.killing, max(0.0, now - worker.head_since))
            self._lose_tasks(worker, tasks, finished, now, out)
        if event.stuck:
            slot.is_stuck = True
            self._quarantine.put([slot], event.stuck, out)

    def _lose_tasks(
        self, worker: Worker, tasks: list[Task], finished: Finished, now: float, out: Decisions
    ) -> None:
        """Queue the tasks of a dead worker again; only the one that was running is to blame."""
        if worker.call_size > 1 and not finished.outcome.is_blameless:
            for task in reversed(tasks):
                self._halve_call(task, finished, worker, out)
            return
        head = tasks[0]
        # It was killed for a task that has ended meanwhile, or left by itself: no task is to blame.
        is_innocent = worker.poisoned or worker.overdue not in (None, head)
        for task in reversed(tasks if is_innocent else tasks[1:]):
            fresh = task._replace(token=task.token + 1)
            out.retokened.append(fresh)
            self.backlog.add(fresh, front=True)
        if not is_innocent:
            named = finished._replace(task_id=head.task_id, token=head.token)
            record = AttemptRecord(head.task_id, head.token, worker.worker_id, named)
            self._fail(head, record, worker, now, out)

    def _halve_call(self, task: Task, finished: Finished, worker: Worker, out: Decisions) -> None:
        """Try a task of a lost joint call again in a call of half the size.

        Nobody knows yet which task is to blame; after enough halvings it is alone in its call.
        """
        named = finished._replace(task_id=task.task_id, token=task.token)
        record = AttemptRecord(task.task_id, task.token, worker.worker_id, named)
        limit = max(1, worker.call_size // 2)
        again = task._replace(token=task.token + 1, batch_limit=limit)
        out.tried.append((record, again))
        self.backlog.add(again, front=True)

    def _start_failed(self, slot: Slot, event: WorkerDied, now: float, out: Decisions) -> None:
        if event.outcome in (Outcome.PREEMPTED, Outcome.JOB_TIMEOUT):
            return  # it had no time to start
        slot.start_failures += 1
        slot.start_after = now + self.policy.retry.pause_s(slot.start_failures, 1.0)
        if slot.start_failures >= self.policy.start_failure_limit:
            reason = f"its worker did not start {slot.start_failures} times: {cause_of(event)}"
            self._quarantine.put([slot], reason, out)

    # ------------------------------------------------------------------ failures

    def _fail(
        self, task: Task, record: AttemptRecord, worker: Worker, now: float, out: Decisions
    ) -> None:
        slot, outcome = worker.slot, record.finished.outcome
        if task in self.halts and not self.halts.has_yet_to_save(task, outcome):
            self.halts.ended(task, record, out)
            return
        if outcome is Outcome.STOPPED:  # and reopened meanwhile
            again = task._replace(token=task.token + 1)
            out.tried.append((record, again))
            self.backlog.add(again, front=True)
            return
        if outcome.is_blameless:
            self._try_elsewhere(task, record, out)
            return
        if outcome is Outcome.MEMORY_LIMIT and worker.has_worked:
            # What earlier tasks left there counted too. As the first of its worker it will tell.
            again = task._replace(token=task.token + 1, fresh=True)
            out.tried.append((record, again))
            self.backlog.add(again)
            return
        if outcome is Outcome.DEVICE_OOM and not task.solo and self.roster.shares(slot):
            again = task._replace(token=task.token + 1, solo=True)
            out.tried.append((record, again))
            self.backlog.add(again)
            return
        mark = fingerprint(record.finished)
        names_device = outcome is Outcome.DEVICE_FAULT
        if self._quarantine.failed(slot, record, worker.call, mark, out):
            self._run_elsewhere(task, slot, record, out)
            return
        if names_device and task.tries and worker.call_size > 1:
            # One task of the call may blame any device.
            self._halve_call(task, record.finished, worker, out)
            return
        tries = task.tries + 1
        if tries <= self.policy.retry.limit(outcome):
            # Only a task that ran alone: a joint call would be sent there task by task.
            is_moved = outcome.ends_worker or (names_device and worker.call_size == 1)
            avoid = slot.spec.device_key if is_moved else ""
            again = task._replace(token=task.token + 1, tries=tries, avoid=avoid)
            out.tried.append((record, again))
            due = now + self.policy.retry.pause_s(tries, self._jitter.random())
            self.backlog.delay(again, due)
            return
        self._quarantine.lost(slot.spec.device_key, task)
        out.failed.append(record)
        if not self.policy.keep_going and self.ok_count == 0 and not self.paused:
            same = self._breaker.failed(mark)
            if same:
                self.paused = (
                    f"the first {same} tasks that ended all failed in the same way: "
                    f"{record.finished.message or outcome}"
                )
                out.notes.append(("paused", self.paused))

    def _try_elsewhere(self, task: Task, record: AttemptRecord, out: Decisions) -> None:
        """Queue a task again whose worker lost its place: no try is counted, and no pause made."""
        losses = task.losses + 1
        if losses > self.policy.retry.limit(record.finished.outcome):
            out.failed.append(record)
            return
        again = task._replace(token=task.token + 1, losses=losses)
        out.tried.append((record, again))
        self.backlog.add(again, front=True)

    def _run_elsewhere(self, task: Task, slot: Slot, record: AttemptRecord, out: Decisions) -> None:
        """Run the tasks that a faulty device has failed again on others."""
        again = task._replace(token=task.token + 1)
        out.tried.append((record, again))
        self.backlog.add(again)
        for lost in self._quarantine.take_lost(slot.spec.device_key):
            reopened = lost._replace(token=lost.token + 1)
            out.reopened.append(reopened)
            self.backlog.add(reopened)

    def _on_reopen(self, event: Reopen, out: Decisions) -> None:
        """One that has not ended yet does so all the same, and is then tried again."""
        if not self.halts.reopen(event.task_id):
            out.promoted.append(event.task_id)
            self.backlog.exhausted = False

    def _retire_idle(self, out: Decisions) -> None:
        if not self.is_finished:
            return
        for worker in self.roster.workers.values():
            if not worker.in_flight:
                out.stop(worker)
