"""When to stop believing a device, and when to stop the sweep. Pure counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.farm.model import Task

#: Far more than it takes to find a device at fault; bounds the memory when tasks are.
_MAX_KEPT = 1000


@dataclass
class DeviceHealth:
    """The failures of a device since it was last seen to work.

    ``tasks`` are those that failed there for good; they get another chance elsewhere when the
    device is found to be at fault. ``marks`` are the causes ever seen on it.
    """

    count: int = 0
    tasks: list[Task] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    has_worked: bool = False

    def succeeded(self) -> None:
        self.has_worked = True
        self.count = 0
        self.tasks.clear()

    def failed(self, mark: str, *, is_severe: bool) -> None:
        """``is_severe``: the worker was lost with it, which an error in the task rarely does."""
        if len(self.marks) < _MAX_KEPT:
            self.marks.add(mark)
        if is_severe or not self.has_worked:  # once it has worked, plain errors are the tasks'
            self.count += 1

    def lost(self, task: Task) -> None:
        """A task has failed there for good."""
        if self.count and len(self.tasks) < _MAX_KEPT:
            self.tasks.append(task)


class Breaker:
    """Counts failures that are the same from the very first one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mark = ""
        self._count = 0

    def failed(self, mark: str) -> int:
        """How many when the limit is reached, else 0."""
        self._count = self._count + 1 if mark == self._mark else 1
        self._mark = mark
        return self._count if self._count >= self._limit else 0
