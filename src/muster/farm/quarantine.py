"""When to stop believing a device, and the devices that get no more tasks: which are put there, and
which come back. Pure.

A device that is broken fails a task in milliseconds where a healthy one takes minutes, so one that
is believed too long fails all the tasks of a run. What its failures say is judged beside those of
the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muster.base.device_faults import says_unfit
from muster.farm.backlog import Backlog
from muster.farm.decisions import Decisions, Policy
from muster.farm.roster import Roster, Slot
from muster.farm.task import AttemptRecord, Finished, Outcome, Task

#: Far more than it takes to find a device at fault; it bounds the memory where tasks are at fault.
_MAX_KEPT = 1000
_MAX_ACCUSERS = 100


@dataclass
class DeviceHealth:
    """The failures of a device since it was last seen to work.

    ``tasks`` are those that failed there for good; they get another chance elsewhere when the
    device is found to be at fault. ``marks`` are the causes ever seen on it. ``alike``: failures
    in a row of the same cause, ``mark``. ``accusers``: the calls whose failure speaks against the
    device; ``naming``: those of them whose error names the device. No task is in two of these
    calls, so that a task which fails on any device counts once, with all that shared its calls.
    ``refuted``: how many tasks that broke a context here another device has done without that.
    ``breaks``: contexts that broke and workers that crashed here since anything was done.
    """

    accusers: list[frozenset[int]] = field(default_factory=list)
    naming: list[frozenset[int]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    refuted: int = 0
    breaks: int = 0
    has_worked: bool = False
    alike: int = 0
    mark: str = ""

    def succeeded(self) -> None:
        self.has_worked = True
        self.alike = self.refuted = self.breaks = 0
        self.accusers.clear()
        self.naming.clear()
        self.tasks.clear()

    def failed(self, mark: str, finished: Finished, worker_id: int, call: frozenset[int]) -> None:
        """Count a failure against the device. ``call``: the tasks that the worker was at."""
        if finished.outcome is Outcome.MEMORY_LIMIT:
            return  # no device has to do with it
        self.breaks += finished.poisoned or finished.outcome is Outcome.CRASH
        if finished.outcome is Outcome.BROKEN_CONTEXT:
            return
        call = accusers(finished, worker_id, call)
        names_device = finished.outcome is Outcome.DEVICE_FAULT
        # The failure ended the worker as well, which an error in the task's own code rarely does.
        is_severe = names_device or finished.outcome is Outcome.CRASH or finished.poisoned
        if len(self.marks) < _MAX_KEPT:
            self.marks.add(mark)
        self.alike = self.alike + 1 if mark == self.mark else 1
        self.mark = mark
        if is_severe or not self.has_worked:  # once it has worked, plain errors are the tasks'
            _accuse(self.accusers, call)
        if names_device:
            _accuse(self.naming, call)

    def lost(self, task: Task) -> None:
        """Remember a task that has failed here for good."""
        if len(self.tasks) < _MAX_KEPT:
            self.tasks.append(task)


def accusers(finished: Finished, worker_id: int, call: frozenset[int]) -> frozenset[int]:
    """The tasks that may themselves have caused a failure that looks like the device's.

    It is the failed task, or any task of its joint ``call``. Where the worker has tested the device
    itself, no task can have caused it: a number of the worker's own is returned instead, so that
    failures in several workers all count.
    """
    if says_unfit(finished.message):
        return frozenset({-worker_id})
    is_of_call = finished.outcome is Outcome.DEVICE_FAULT and finished.task_id in call
    return call if is_of_call else frozenset({finished.task_id})


def _accuse(known: list[frozenset[int]], call: frozenset[int]) -> None:
    """Add a call, or keep only the tasks that it shares with an earlier one: they explain both."""
    for number, earlier in enumerate(known):
        if earlier & call:
            known[number] = earlier & call
            return
    if len(known) < _MAX_ACCUSERS:
        known.append(call)


def done_on(
    device: str,
    task: Task,
    known: Mapping[str, DeviceHealth],
    broken: dict[int, set[str]],
    policy: Policy,
) -> dict[str, str]:
    """The devices that it puts to blame, and why, that ``device`` has done a task after failures.

    What broke a context on one other device only was that device, and no record of the task.
    ``broken``: by task, the devices on which it did, perhaps through one of its records.
    """
    on = broken.pop(task.task_id, set())
    if len(on) != 1 or device in on:
        return {}
    [key] = on
    known[key].refuted += 1
    if (count := known[key].refuted) < policy.device_failure_limit:
        return {}
    return {key: f"its context broke under {count} tasks that another GPU has done"}


@dataclass(frozen=True)
class Blame:
    """Why a device gets no more tasks.

    ``until``: the fingerprint of the failure that it is blamed for. Once another device shows the
    same failure, the tasks were at fault after all. It is "" where nothing can clear the device.
    """

    reason: str
    until: str = ""


def blame(
    finished: Finished,
    mark: str,
    health: DeviceHealth,
    others: Callable[[], Iterator[DeviceHealth]],
    policy: Policy,
) -> Blame | None:
    """Decide whether a device, and not its tasks, is at fault now that one more has failed there.

    ``others``: the devices that still get tasks; there may be thousands of them. A device is blamed
    when enough tasks in a row fail on it, and either their errors say that the device cannot be
    used or no other device shows the last of them. One that has worked is blamed when it fails task
    after task with an error that no other device shows.
    """
    may_break = policy.keep_going or health.breaks < policy.retry.breaks_in_a_row
    # A chunk of a map: each crash narrows down the record that is to blame for it.
    has_many = policy.retry.limit(finished.outcome) > policy.retry.breaks_in_a_row
    is_crash = finished.outcome is Outcome.CRASH and has_many
    if (
        finished.outcome is Outcome.BROKEN_CONTEXT
        or is_crash
        or (finished.poisoned and next(others(), None) is None)
    ):
        # A record may have broken it: ``done_on`` judges, when another has done it. But where one
        # context or worker after another breaks, records would be rejected until none is left.
        if not may_break:
            what = "workers in a row crashed" if is_crash else "GPU contexts in a row broke"
            said = f"{health.breaks} {what} on it"
            return Blame(
                f"{said} without a finished task between them; the last: {finished.message}"
            )
        if finished.outcome is Outcome.BROKEN_CONTEXT:
            return None
    says_so = finished.outcome is Outcome.DEVICE_FAULT
    is_alone = says_so or any(mark not in other.marks for other in others())
    count = len(health.naming if says_so else health.accusers)
    if is_alone and count >= policy.device_failure_limit:
        return Blame(f"it failed {count} tasks in a row, the last: {finished.message}")
    if finished.outcome is not Outcome.EXCEPTION or health.alike < policy.alike_failure_limit:
        return None
    if any(mark in o.marks for o in others()) or not any(o.has_worked for o in others()):
        return None
    reason = f"it failed {health.alike} tasks in a row in a way that no other GPU did"
    return Blame(f"{reason}; the last: {finished.message}", until=mark)


class Quarantine:
    """Counts what fails and what is done on each device, and judges it by that."""

    def __init__(self, policy: Policy, roster: Roster, backlog: Backlog) -> None:
        self._policy, self._roster, self._backlog = policy, roster, backlog
        self._health: dict[str, DeviceHealth] = defaultdict(DeviceHealth)
        self._broken: dict[int, set[str]] = {}  # by task: devices whose context broke under it
        self._blamed: dict[str, Blame] = {}  # for a failure that no other device has shown

    def done(self, key: str, tasks: Sequence[Task], out: Decisions) -> None:
        """A device has done these tasks, which may put another one to blame."""
        self._health[key].succeeded()
        for task in tasks:
            if task.tries:  # else none has broken anything
                found = done_on(key, task, self._health, self._broken, self._policy)
                self._put_devices(found, out)

    def progressed(self, key: str) -> None:
        """Records were handled on a device since its last context broke."""
        self._health[key].breaks = 0

    def failed(
        self, slot: Slot, record: AttemptRecord, call: frozenset[int], mark: str, out: Decisions
    ) -> bool:
        """Count a failure; returns whether the device is to blame, which then gets nothing more.

        ``call``: the tasks that the worker was at; ``mark``: the fingerprint of the failure.
        """
        health = self._health[slot.spec.device_key]
        health.failed(mark, record.finished, record.worker_id, call)
        if record.finished.outcome is Outcome.BROKEN_CONTEXT:
            self._broken.setdefault(record.task_id, set()).add(slot.spec.device_key)
        if self._is_at_fault(slot, record.finished, mark, out):
            return True
        alike = [key for key, known in self._blamed.items() if known.until == mark]
        self._readmit(alike, "another GPU fails in the same way", out)
        return False

    def lost(self, key: str, task: Task) -> None:
        """A task has failed on a device for good."""
        self._health[key].lost(task)

    def take_lost(self, key: str) -> list[Task]:
        """Those that have; they are asked for once."""
        tasks, self._health[key].tasks = self._health[key].tasks, []
        return tasks

    def put(self, slots: Sequence[Slot], reason: str, out: Decisions) -> None:
        """Give these slots, all of one device, nothing more."""
        for slot in slots:
            self._roster.quarantine(slot, reason)
            if (worker := self._roster.worker_of(slot)) is not None:
                out.stop(worker)
        self._backlog.give_up(slots[0].spec.device_key)
        out.notes.append(("quarantined", f"{slots[0].spec.label}: {reason}"))
        if not self._roster.usable():
            self._readmit(list(self._blamed), "no other GPU is left", out)

    def _is_at_fault(self, slot: Slot, finished: Finished, mark: str, out: Decisions) -> bool:
        if slot.quarantined:
            return True
        is_no_device = finished.outcome is Outcome.MEMORY_LIMIT or not slot.spec.devices
        if is_no_device and finished.outcome is not Outcome.DEVICE_FAULT:
            return False
        key = slot.spec.device_key
        found = blame(
            finished, mark, self._health[key],
            lambda: map(self._health.__getitem__, self._roster.usable_without(key)), self._policy,
        )  # fmt: skip
        if found is None:
            return False
        if found.until:
            self._blamed[key] = found
        self._put_devices({key: found.reason}, out)
        return True

    def _put_devices(self, reasons: Mapping[str, str], out: Decisions) -> None:
        for key, reason in reasons.items():
            if shares := [s for s in self._roster.shares_of(key) if not s.quarantined]:
                self.put(shares, reason, out)

    def _readmit(self, keys: Iterable[str], why: str, out: Decisions) -> None:
        """Let devices have tasks again that were blamed for a failure only they had shown."""
        for key in keys:
            reason = self._blamed.pop(key).reason
            shares = [s for s in self._roster.shares_of(key) if s.quarantined == reason]
            self._roster.readmit(shares)
            self._health[key].alike = 0
            if shares:
                out.notes.append(("readmitted", f"{shares[0].spec.label}: {why}"))
