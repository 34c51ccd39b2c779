"""When to stop believing a device: its failures so far, and what they say beside those of others.

Pure. A device that is broken fails a task in milliseconds where a healthy one takes minutes, so one
that is believed too long fails all the tasks of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.base.device_faults import says_unfit
from muster.farm.decisions import Policy
from muster.farm.task import Finished, Outcome, Task

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
