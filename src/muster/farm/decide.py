"""The scheduler: state and events in, instructions out. No clock, no input, no output.

The coordinator feeds ``Scheduler.step`` with what happened since the last step and obeys the
``Decisions`` that come back, in this order: record in the ledger, commit, then send, start and
kill. Everything that can race is decided here, so races are table tests.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from muster.farm.canonical import payload_and_key
from muster.farm.decisions import (
    Decisions,
    Division,
    Policy,
    Send,
    cause_of,
    death_as_finished,
    fingerprint,
)
from muster.farm.device_health import Blame, DeviceHealth, blame, done_on
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
from muster.farm.halting import Halts, Waiting, let_go
from muster.farm.roster import (
    Breaker,
    Pace,
    Roster,
    Slot,
    Worker,
    divisible,
    due_s,
    hire,
    take_group,
    to_revoke,
    whom_to_ask,
)
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec, TargetSpec, Task


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
        self._expected = expected
        self.targets = targets
        self.roster = Roster(slots, first_worker_id)
        self.queue: deque[Task] = deque()
        self.solo: deque[Task] = deque()  # must have a device to themselves
        self.wary: deque[Task] = deque()  # crashed on a device: tried on another one first
        self.delayed: list[tuple[float, int, Task]] = []
        self.exhausted = False
        self.draining = False
        self.paused = ""
        self.ok_count = 0
        self._breaker = Breaker(policy.same_failure_limit)
        self._health: dict[str, DeviceHealth] = defaultdict(DeviceHealth)  # by device
        self._broken: dict[int, set[str]] = {}  # by task: devices whose context broke under it
        self.pace = Pace(policy.lead_s, policy.max_lead, targets)
        self._fetching = False
        self._jitter = random.Random(0)
        self._reserved: dict[str, Task] = {}
        self._set_aside: dict[str, Blame] = {}  # by device: blamed for a failure that no other had
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
        waiting = self.queue or self.solo or self.wary or self.delayed or self._reserved
        return self.exhausted and not waiting

    def _waiting(self) -> Waiting:
        return Waiting((self.queue, self.solo, self.wary), self.delayed, self._reserved)

    def open_tasks(self) -> list[Task]:
        """Claimed tasks that have not ended: to be given back when the run stops early."""
        held = [*self.queue, *self.solo, *self.wary, *(task for _, _, task in self.delayed)]
        held.extend(self._reserved.values())
        for worker in self.roster.workers.values():
            held.extend(worker.in_flight.values())
        return list({task.task_id: task for task in held}.values())

    def next_deadline(self) -> float | None:
        """When something is due without any event: a retry, a restart, a time limit."""
        times = [self.delayed[0][0]] if self.delayed else []
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
                    self._fetching = False
                    self._expected = max(0, self._expected - len(event.tasks))
                    self.queue = self.pace.queue(self.queue, event, len(self.roster.usable()))
                    self.exhausted = event.exhausted
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
                    let_go(self.roster, event, self._reserved, self.solo, out)
                case StopTask():
                    self.halts.stop(event, self._waiting(), now, out)
                case Reopen():
                    self._on_reopen(event, out)
                case Drain():
                    self.draining = True
        while self.delayed and self.delayed[0][0] <= now:
            self._enqueue(heapq.heappop(self.delayed)[2])
        self.halts.end_waiting(self._waiting(), now, out)
        self.halts.kill_overdue(now, out)
        if self.draining or self.paused:
            out.revokes.extend(to_revoke(self.roster.workers.values()))
        else:
            self._serve(now, out)
        self._retire_idle(out)
        return out

    # ------------------------------------------------------------------ what happened

    def _on_results(self, event: Results, now: float, out: Decisions) -> None:
        worker = self.roster.workers.get(event.worker_id)
        for finished in event.finished:
            task = worker.in_flight.get(finished.task_id) if worker else None
            if worker is None or task is None or task.token != finished.token:
                out.late.append((event.worker_id, finished))
                continue
            self._take_from(worker, task)
            worker.begins(now)
            record = AttemptRecord(task.task_id, task.token, worker.worker_id, finished)
            outcome = finished.outcome
            is_in_doubt = finished.poisoned and worker.call_size > 1
            if outcome is Outcome.OK:
                self.halts.forget(task.task_id)  # it was done before it could be stopped
                out.done.append(record)
                self.ok_count += 1
                self.pace.learn(task, finished.seconds)
                key = worker.slot.spec.device_key
                found = done_on(key, task, self._health, self._broken, self.policy)
                self._strike_off(found, out)
            elif is_in_doubt and not (outcome.is_blameless or outcome is Outcome.DEVICE_FAULT):
                self._halve_call(task, finished, worker, out)
            else:
                self._fail(task, record, worker, now, out)
            worker.has_shared = False
            worker.has_worked = self.targets[task.target_id].kind == "function"
            if finished.poisoned:
                worker.poisoned = True  # it ends itself, without beginning anything else
                self._stop(worker, out)

    def _on_returned(self, event: Returned) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is None:
            return
        worker.revoking = False
        back = [worker.in_flight[i] for i in event.task_ids if i in worker.in_flight]
        for task in reversed(back):
            self._take_from(worker, task)
            self._enqueue(task, front=True)

    def _on_progress(self, event: Progress, now: float) -> None:
        worker = self.roster.workers.get(event.worker_id)
        if worker is not None and next(iter(worker.in_flight), None) == event.task_id:
            worker.sign_s = now
            worker.left = event.numbers.get("left", worker.left)
            if event.numbers.get("records", 0) > event.numbers.get("rejected", 0):
                self._health[worker.slot.spec.device_key].breaks = 0

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
            self._expected += len(event.given)
            self.exhausted = False

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
            self._quarantine([slot], event.stuck, out)

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
            self._enqueue(fresh, front=True)
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
        self._enqueue(again, front=True)

    def _start_failed(self, slot: Slot, event: WorkerDied, now: float, out: Decisions) -> None:
        if event.outcome in (Outcome.PREEMPTED, Outcome.JOB_TIMEOUT):
            return  # it had no time to start
        slot.start_failures += 1
        slot.start_after = now + self.policy.retry.pause_s(slot.start_failures, 1.0)
        if slot.start_failures >= self.policy.start_failure_limit:
            reason = f"its worker did not start {slot.start_failures} times: {cause_of(event)}"
            self._quarantine([slot], reason, out)

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
            self._enqueue(again, front=True)
            return
        if outcome.is_blameless or (outcome is Outcome.MEMORY_LIMIT and worker.has_worked):
            self._try_elsewhere(task, record, out)
            return
        if outcome is Outcome.DEVICE_OOM and not task.solo and self.roster.shares(slot):
            again = task._replace(token=task.token + 1, solo=True)
            out.tried.append((record, again))
            self._enqueue(again)
            return
        mark = fingerprint(record.finished)
        health = self._health[slot.spec.device_key]
        names_device = outcome is Outcome.DEVICE_FAULT
        health.failed(mark, record.finished, record.worker_id, worker.call)
        if outcome is Outcome.BROKEN_CONTEXT:
            self._broken.setdefault(task.task_id, set()).add(slot.spec.device_key)
        if self._is_device_fault(slot, record.finished, mark, out):
            self._run_elsewhere(task, slot, record, out)
            return
        alike = [key for key, known in self._set_aside.items() if known.until == mark]
        self._readmit(alike, "another GPU fails in the same way", out)
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
            heapq.heappush(self.delayed, (due, again.task_id, again))
            return
        health.lost(task)
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
        if losses > self.policy.retry.limit(record.finished.outcome, is_first=False):
            out.failed.append(record)
            return
        again = task._replace(token=task.token + 1, losses=losses)
        out.tried.append((record, again))
        self._enqueue(again, front=True)

    def _is_device_fault(self, slot: Slot, finished: Finished, mark: str, out: Decisions) -> bool:
        """Whether the slot's device is to blame; from then on it gets nothing more."""
        if slot.quarantined:
            return True
        is_no_device = finished.outcome is Outcome.MEMORY_LIMIT or not slot.spec.devices
        if is_no_device and finished.outcome is not Outcome.DEVICE_FAULT:
            return False
        key = slot.spec.device_key
        found = blame(
            finished, mark, self._health[key],
            lambda: map(self._health.__getitem__, self.roster.usable_without(key)), self.policy,
        )  # fmt: skip
        if found is None:
            return False
        if found.until:
            self._set_aside[key] = found
        self._strike_off({key: found.reason}, out)
        return True

    def _strike_off(self, reasons: Mapping[str, str], out: Decisions) -> None:
        for key, reason in reasons.items():
            if shares := [s for s in self.roster.shares_of(key) if not s.quarantined]:
                self._quarantine(shares, reason, out)

    def _run_elsewhere(self, task: Task, slot: Slot, record: AttemptRecord, out: Decisions) -> None:
        """Run the tasks that a faulty device has failed again on others."""
        again = task._replace(token=task.token + 1)
        out.tried.append((record, again))
        self._enqueue(again)
        health = self._health[slot.spec.device_key]
        for lost in health.tasks:
            reopened = lost._replace(token=lost.token + 1)
            out.reopened.append(reopened)
            self._enqueue(reopened)
        health.tasks.clear()

    def _readmit(self, keys: Iterable[str], why: str, out: Decisions) -> None:
        """Let devices have tasks again that were set aside for a failure only they had shown."""
        for key in keys:
            reason = self._set_aside.pop(key).reason
            shares = [s for s in self.roster.shares_of(key) if s.quarantined == reason]
            self.roster.readmit(shares)
            self._health[key].alike = 0
            if shares:
                out.notes.append(("readmitted", f"{shares[0].spec.label}: {why}"))

    def _quarantine(self, slots: Sequence[Slot], reason: str, out: Decisions) -> None:
        for slot in slots:
            self.roster.quarantine(slot, reason)
            if (worker := self.roster.worker_of(slot)) is not None:
                self._stop(worker, out)
        task = self._reserved.pop(slots[0].spec.device_key, None)
        if task is not None and not self.roster.has(task.task_id):
            self.solo.appendleft(task)
        out.notes.append(("quarantined", f"{slots[0].spec.label}: {reason}"))
        if not self.roster.usable():
            self._readmit(list(self._set_aside), "no other GPU is left", out)

    def _on_reopen(self, event: Reopen, out: Decisions) -> None:
        """One that has not ended yet does so all the same, and is then tried again."""
        if not self.halts.reopen(event.task_id):
            out.promoted.append(event.task_id)
            self.exhausted = False

    # ------------------------------------------------------------------ handing out

    def _serve(self, now: float, out: Decisions) -> None:
        for worker in self.roster.surplus():
            self._stop(worker, out)
        self._start_workers(now, out)
        self._serve_solo(now, out)
        self._serve_wary(now, out)
        hungry = 0
        for worker in self.roster.available(self.pace.longest_lead() // 2):
            if worker.slot.spec.device_key in self._reserved:
                continue
            if not self.queue:
                hungry += not worker.in_flight
                continue
            self._feed(worker, now, out)
        if hungry and not self.queue:
            began = now - self.policy.lead_s
            out.revokes.extend(to_revoke(self.roster.workers.values(), began))
            self._share(hungry, now, out)
        want = self._window()
        is_short = len(self.queue) < (want // 2 if self.policy.asks_ahead else want)
        if not self.exhausted and not self._fetching and is_short:
            self._fetching = True
            out.fetch = want - len(self.queue)

    def _feed(self, worker: Worker, now: float, out: Decisions) -> None:
        first = self.queue[0]
        target = self.targets[first.target_id]
        held = len(worker.in_flight)
        if target.is_batched:
            if held == 0:
                limit = target.batch_on(worker.slot.spec.kind)
                workers = len(self.roster.usable())
                taken, self.queue = take_group(self.queue, first, limit, workers)
                self._send(worker, taken, True, now, out)
            return
        depth = self.pace.lead(first.target_id)
        if not self._has_room(worker, first):
            return
        tasks: list[Task] = []
        while self.queue and len(tasks) < depth - held:
            if self.queue[0].target_id != first.target_id:
                break
            tasks.append(self.queue.popleft())
        self._send(worker, tasks, False, now, out)

    def _has_room(self, worker: Worker, task: Task) -> bool:
        """Whether the worker may get this task on top of what it holds."""
        held = len(worker.in_flight)
        if held == 0:
            return True
        if worker.together or self.targets[task.target_id].is_batched:
            return False
        return held <= self.pace.lead(task.target_id) // 2

    def _send(
        self, worker: Worker, tasks: list[Task], together: bool, now: float, out: Decisions
    ) -> None:
        if not worker.in_flight:
            worker.begins(now)
        worker.together = together
        worker.call = frozenset(task.task_id for task in tasks if together)
        self.roster.give(worker, tasks)
        out.sends.append(Send(worker.worker_id, tasks, together))

    def _serve_solo(self, now: float, out: Decisions) -> None:
        """Reserve a device for each task that must be alone, empty it, then send the task."""
        for slot in self.roster.usable() if self.solo else ():
            if self.solo and slot.spec.device_key not in self._reserved:
                self._reserved[slot.spec.device_key] = self.solo.popleft()
        for key, task in self._reserved.items():
            workers = self.roster.workers_on(key)
            for extra in workers[1:]:
                if not extra.in_flight:
                    self._stop(extra, out)
            if len(workers) == 1 and workers[0].is_idle:
                workers[0].solo_key = key
                self._send(workers[0], [task], self.targets[task.target_id].is_batched, now, out)

    def _serve_wary(self, now: float, out: Decisions) -> None:
        """A task that crashed goes to another device first, if there is one left."""
        if not self.wary:
            return
        most = self.pace.longest_lead() // 2
        # Looked for once in a turn, and gone through in a circle, the idle first.
        able = deque(self.roster.available(most))
        for _ in range(len(self.wary)):
            task = self.wary.popleft()
            if not any(self.roster.usable_without(task.avoid)):
                self.queue.appendleft(task)
                continue
            away = (task.avoid, *self._reserved)
            for _ in range(len(able)):
                worker = able[0]
                able.rotate(-1)
                if worker.slot.spec.device_key not in away and self._has_room(worker, task):
                    self._send(worker, [task], self.targets[task.target_id].is_batched, now, out)
                    break
            else:
                self.wary.append(task)

    def _take_from(self, worker: Worker, task: Task) -> None:
        self.roster.take(worker, task)
        if not worker.in_flight:
            worker.together = False
            self._reserved_done(worker)

    def _reserved_done(self, worker: Worker) -> None:
        if worker.solo_key:
            self._reserved.pop(worker.solo_key, None)
            worker.solo_key = ""

    def _share(self, hungry: int, now: float, out: Decisions) -> None:
        """Ask a running task to give part of its remaining work to idle workers."""
        if self._fetching:
            return
        worker = whom_to_ask(self.roster.workers.values(), self.targets, now)
        if worker is not None:
            worker.is_asked = True
            out.shares.append((worker.worker_id, next(iter(worker.in_flight)), hungry))

    def _start_workers(self, now: float, out: Decisions) -> None:
        open_work = len(self.queue) + len(self.solo) + len(self.wary)
        if not self.exhausted:
            open_work += self._expected
        if len(self.roster.workers) < len(self.roster.slots):
            open_work += len(divisible(self.roster.workers.values(), self.targets, now))
        out.starts.extend(hire(self.roster, now, self._reserved, self.wary, open_work))

    def _stop(self, worker: Worker, out: Decisions) -> None:
        """Let a worker end once it has finished what it holds."""
        if not worker.stopping:
            worker.stopping = True
            out.stops.append(worker.worker_id)

    def _retire_idle(self, out: Decisions) -> None:
        if not self.is_finished:
            return
        for worker in self.roster.workers.values():
            if not worker.in_flight:
                self._stop(worker, out)

    # ------------------------------------------------------------------ small answers

    def _enqueue(self, task: Task, *, front: bool = False) -> None:
        if task.solo:
            self.solo.append(task)
        elif task.avoid and any(self.roster.usable_without(task.avoid)):
            self.wary.append(task)
        elif front:
            self.queue.appendleft(task)
        else:
            self.queue.append(task)

    def num_wanted(self) -> int:
        """How many tasks it would be good to have now."""
        return max(0, self._window() - len(self.queue))

    def _window(self) -> int:
        """How many tasks should wait here."""
        if not self.policy.asks_ahead:
            busy = sum(bool(worker.in_flight) for worker in self.roster.workers.values())
            waiting = len(self.solo) + len(self.wary) + len(self.delayed) + len(self._reserved)
            return max(0, len(self.roster.usable()) - busy - waiting)
        lead = self.pace.longest_lead()
        batch = max((target.max_batch for target in self.targets.values()), default=0)
        return min(8192, max(16, 2 * max(lead, batch) * max(1, len(self.roster.slots))))
