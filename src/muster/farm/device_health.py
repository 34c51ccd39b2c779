"""When to stop believing a device: its failures so far, and what they say beside those of others.

Pure. A device that is broken fails a task in milliseconds where a healthy one takes minutes, so one
that is believed too long fails all the tasks of a run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from muster.farm.decisions import Policy
from muster.farm.task import Finished, Outcome, Task

#: Far more than it takes to find a device at fault; bounds the memory when tasks are.
_MAX_KEPT = 1000


@dataclass
class DeviceHealth:
    """The failures of a device since it was last seen to work.

    ``tasks`` are those that failed there for good; they get another chance elsewhere when the
    device is found to be at fault. ``marks`` are the causes ever seen on it. ``count``: failures
    that speak against the device. ``alike``: failures in a row of the same cause, ``mark``.
    """

    count: int = 0
    tasks: list[Task] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    has_worked: bool = False
    alike: int = 0
    mark: str = ""
    lost_worker: int = 0  # the last that was lost with a failure

    def succeeded(self) -> None:
        self.has_worked = True
        self.count = self.alike = 0
        self.tasks.clear()

    def failed(self, mark: str, worker_id: int, *, is_severe: bool) -> None:
        """``is_severe``: the worker was lost with it, which an error in the task rarely does."""
        if len(self.marks) < _MAX_KEPT:
            self.marks.add(mark)
        self.alike = self.alike + 1 if mark == self.mark else 1
        self.mark = mark
        if is_severe and worker_id == self.lost_worker:
            return  # another task of the same joint call
        if is_severe:
            self.lost_worker = worker_id
        if is_severe or not self.has_worked:  # once it has worked, plain errors are the tasks'
            self.count += 1

    def lost(self, task: Task) -> None:
        """A task has failed there for good."""
        if len(self.tasks) < _MAX_KEPT:
            self.tasks.append(task)


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
    if is_alone and health.count >= policy.device_failure_limit:
        return Blame(f"it failed {health.count} tasks in a row, the last: {finished.message}")
    if finished.outcome is not Outcome.EXCEPTION or health.alike < policy.alike_failure_limit:
        return None
    if any(mark in other.marks for other in others) or not any(o.has_worked for o in others):
        return None
    reason = f"it failed {health.alike} tasks in a row, and no other GPU failed so"
    return Blame(f"{reason}; the last: {finished.message}", until=mark)
