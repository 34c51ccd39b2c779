"""Tasks that are told to end early: who is told, what has ended, whose worker is killed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from muster.farm.backlog import Backlog
from muster.farm.decisions import Decisions, Policy, Stopped
from muster.farm.events import Slots, StopTask
from muster.farm.roster import Roster, Worker, due_s, to_revoke
from muster.farm.task import AttemptRecord, Outcome, TargetSpec, Task


def let_go(roster: Roster, event: Slots, backlog: Backlog, out: Decisions) -> None:
    """Let the workers of slots that are given back end after the task in hand, or at once: after
    its checkpoint. At once are also those that were given back before and have not ended.

    A task that has saved then ends as stopped, which nobody has told it on its own account: so it
    is tried again, from there. A joint call goes on to its end.
    """
    before = {slot.spec.label for slot in roster.slots if not slot.is_given_back}
    back = roster.have(event.wanted)
    for verb, labels in (
        ("gives back", [slot.spec.label for slot in back]),
        ("takes", [spec.label for spec in event.wanted if spec.label not in before]),
    ):
        if labels:
            out.notes.append(("devices", f"{verb} {', '.join(labels)}"))
    for slot in [s for s in roster.slots if s.is_given_back] if event.at_once else back:
        backlog.give_up(slot.spec.device_key)
        worker = roster.worker_of(slot)
        if worker is None or worker.killing:
            continue
        out.revokes.extend(to_revoke([worker]))
        if event.at_once and worker.in_flight and not (worker.together or worker.is_hurried):
            worker.is_hurried = True
            out.halts.append((worker.worker_id, next(iter(worker.in_flight)), True))
        out.stop(worker)


class Halts:
    """The tasks that were told to end and have not ended yet."""

    def __init__(self, policy: Policy, targets: Mapping[int, TargetSpec], roster: Roster) -> None:
        self._policy = policy
        self._targets = targets
        self._roster = roster
        self._told: dict[int, StopTask] = {}

    def __bool__(self) -> bool:
        return bool(self._told)

    def __contains__(self, task: Task) -> bool:
        return task.task_id in self._told

    def stop(self, event: StopTask, backlog: Backlog, now: float, out: Decisions) -> None:
        """Tell a running task to end; one that waits ends at once, and one that has ended stays."""
        before = self._told.get(event.task_id)
        if before is not None and before.cancels:
            return
        if not (self._tell(event, now, out) or event.saves):
            task = None if self._roster.has(event.task_id) else backlog.take(event.task_id)
            ended = out.cancelled if event.cancels else out.stopped
            ended += [] if task is None else [Stopped(task, None)]

    def end_waiting(self, backlog: Backlog, now: float, out: Decisions) -> None:
        """End those that were told to end and wait again, because they have lost their worker."""
        for event in [e for e in self._told.values() if not self._roster.has(e.task_id)]:
            del self._told[event.task_id]
            self.stop(event, backlog, now, out)

    @property
    def cancelling(self) -> list[int]:
        """The tasks that were told to end because they are cancelled."""
        return sorted(event.task_id for event in self._told.values() if event.cancels)

    def _tell(self, event: StopTask, now: float, out: Decisions) -> bool:
        """Tell the worker that has the task; returns whether there is one."""
        worker = self._roster.holder(event.task_id)
        if worker is None or worker.together:
            return False
        self._told[event.task_id] = event
        worker.halted_s = now
        out.halts.append((worker.worker_id, event.task_id, event.pauses))
        if event.task_id != next(iter(worker.in_flight)) and not worker.revoking:
            worker.revoking = True  # handed out ahead: it need not begin
            out.revokes.append(worker.worker_id)
        return True

    def holders(self) -> Collection[Worker]:
        """The workers that have those tasks."""
        found = map(self._roster.holder, self._told)
        return {worker.worker_id: worker for worker in found if worker is not None}.values()

    def forget(self, task_id: int) -> bool:
        """It was done before; returns whether it had been told to end."""
        return self._told.pop(task_id, None) is not None

    def reopen(self, task_id: int) -> bool:
        """It may go on unless it is cancelled; returns whether it has yet to end."""
        event = self._told.get(task_id)
        if event is not None and not event.cancels:
            del self._told[task_id]
        return event is not None

    def has_yet_to_save(self, task: Task, outcome: Outcome) -> bool:
        """Whether something else has ended it before it could; then it is told no more."""
        is_cut_short = self._told[task.task_id].saves and outcome is not Outcome.STOPPED
        return is_cut_short and self.forget(task.task_id)

    def ended(self, task: Task, record: AttemptRecord, out: Decisions) -> None:
        """Only an error of the task's own counts as one; whatever else ended it did as asked.
        One that is cancelled is so, however it ended."""
        if self._told.pop(task.task_id).cancels:
            out.cancelled.append(Stopped(task, record))
        elif record.finished.outcome in (Outcome.EXCEPTION, Outcome.BAD_RESULT):
            out.failed.append(record)
        else:
            out.stopped.append(Stopped(task, record))

    def due_s(self, worker: Worker) -> float | None:
        """When the worker is killed unless the task that it was told to end has ended."""
        head = next(iter(worker.in_flight.values()), None)
        event = None if head is None or worker.killing else self._told.get(head.task_id)
        if head is None or event is None:
            return None
        policy, grace_s = self._policy, self._policy.stop_grace_s
        if event.pauses:
            grace_s = policy.pause_grace_s
        elif self._targets[head.target_id].kind == "command":
            grace_s = policy.command_grace_s
        return max(worker.halted_s, worker.head_since) + grace_s

    def kill_overdue(self, now: float, out: Decisions) -> None:
        """Kill whoever is over the time limit, or was told to end and has not."""
        limit_s = self._policy.timeout_s
        if limit_s is None and not self:
            return
        workers = self.holders() if limit_s is None else self._roster.workers.values()
        for worker in workers:
            has_limit = limit_s is not None and worker.in_flight and not worker.killing
            if has_limit and now >= due_s(worker, self._targets, limit_s):
                worker.killing = Outcome.TIMEOUT
                worker.overdue = next(iter(worker.in_flight.values()))
                out.kills.append((worker.worker_id, f"over the time limit {limit_s}"))
            due = self.due_s(worker)
            if due is not None and now >= due:
                worker.killing = Outcome.STOPPED
                worker.overdue = next(iter(worker.in_flight.values()))
                out.kills.append((worker.worker_id, "its task was told to end and has not ended"))
