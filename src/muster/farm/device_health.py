"""When to stop believing a device: its failures so far, and what they say beside those of others.

Pure. A device that is broken fails a task in milliseconds where a healthy one takes minutes, so one
that is believed too long fails all the tasks of a run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from muster.base.device_faults import says_unfit
from muster.farm.decisions import Policy
from muster.farm.task import Finished, Outcome, Task

#: Far more than it takes to find a device at fault; bounds the memory when tasks are.
_MAX_KEPT = 1000
_MAX_ACCUSERS = 100


@dataclass
class DeviceHealth:
    """The failures of a device since it was last seen to work.

    ``tasks`` are those that failed there for good; they get another chance elsewhere when the
    device is found to be at fault. ``marks`` are the causes ever seen on it. ``alike``: failures
    in a row of the same cause, ``mark``. ``accusers``: the calls whose failure speaks against the
    device; ``naming`` those of them with an error that names it. No task is in two: one that
    accuses whatever device it is given counts once, with all that shared its calls.
    """

    accusers: list[frozenset[int]] = field(default_factory=list)
    naming: list[frozenset[int]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    has_worked: bool = False
    alike: int = 0
    mark: str = ""

    def succeeded(self) -> None:
        self.has_worked = True
        self.alike = 0
        self.accusers.clear()
        self.naming.clear()
        self.tasks.clear()

    def failed(
        self, mark: str, call: frozenset[int], *, is_severe: bool, names_device: bool
    ) -> None:
        """``call``: those that accuse it (``accusers``). ``is_severe``: the worker was lost with
        it, which an error in the task rarely does.
        """
        if len(self.marks) < _MAX_KEPT:
            self.marks.add(mark)
        self.alike = self.alike + 1 if mark == self.mark else 1
        self.mark = mark
        if is_severe or not self.has_worked:  # once it has worked, plain errors are the tasks'
            _accuse(self.accusers, call)
        if names_device:
            _accuse(self.naming, call)

    def lost(self, task: Task) -> None:
        """A task has failed there for good."""
        if len(self.tasks) < _MAX_KEPT:
            self.tasks.append(task)


def accusers(finished: Finished, worker_id: int, call: frozenset[int]) -> frozenset[int]:
    """Who may have made up what is said against a device: the task, or one of its joint ``call``;
    no task where the worker has looked itself, and each such failure counts.
    """
    if says_unfit(finished.message):
        return frozenset({-worker_id})
    is_of_call = finished.outcome is Outcome.DEVICE_FAULT and finished.task_id in call
    return call if is_of_call else frozenset({finished.task_id})


def _accuse(known: list[frozenset[int]], call: frozenset[int]) -> None:
    """One task common to two calls may explain both: only what they share is kept."""
    for number, earlier in enumerate(known):
        if earlier & call:
            known[number] = earlier & call
            return
    if len(known) < _MAX_ACCUSERS:
        known.append(call)


@dataclass(frozen=True)
class Blame:
    """Why a device gets no more tasks. ``until``: the failure that, once another device has it as
    well, was the tasks' fault after all; "" where nothing can clear it.
    """

    reason: str
    until: str = ""


def blame(
    finished: Finished,
    mark: str,
    health: DeviceHealth,
    others: Collection[DeviceHealth],
    policy: Policy,
) -> Blame | None:
    """Whether a device is at fault, and not its tasks, now that one more has failed there.

    ``others``: the devices that still get tasks. Some errors say themselves that the device cannot
    be used. Else only one that fails everything, while another has not failed so, is to blame; and
    one that did work and now fails task after task with an error that no other has.
    """
    says_so = finished.outcome is Outcome.DEVICE_FAULT
    is_alone = says_so or any(mark not in other.marks for other in others)
    count = len(health.naming if says_so else health.accusers)
    if is_alone and count >= policy.device_failure_limit:
        return Blame(f"it failed {count} tasks in a row, the last: {finished.message}")
    if finished.outcome is not Outcome.EXCEPTION or health.alike < policy.alike_failure_limit:
        return None
    if any(mark in other.marks for other in others) or not any(o.has_worked for o in others):
        return None
    reason = f"it failed {health.alike} tasks in a row, and no other GPU failed so"
    return Blame(f"{reason}; the last: {finished.message}", until=mark)
