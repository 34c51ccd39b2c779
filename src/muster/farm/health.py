"""When to stop believing a device, and when to stop the sweep. Pure counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.farm.model import Task


@dataclass
class DeviceHealth:
    """The tasks a device has failed since it was last seen to work; one success clears it."""

    tasks: list[Task] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    has_worked: bool = False

    @property
    def count(self) -> int:
        return len(self.tasks)

    def succeeded(self) -> None:
        self.has_worked = True
        if self.tasks:
            self.clear()

    def clear(self) -> None:
        self.tasks.clear()
        self.marks.clear()

    def failed(self, task: Task, mark: str) -> None:
        if self.has_worked:
            return  # it works in general: the task is to blame
        self.tasks.append(task)
        self.marks.add(mark)


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
