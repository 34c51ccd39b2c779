"""What an executor of one's own needs; see docs/executors.md.

class MyExecutor:
    def __init__(self, assignment: Assignment) -> None: ...
"""

from __future__ import annotations

from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import Assignment, Executor
from muster.farm.executors.table import make_executor
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task

__all__ = [
    "Assignment",
    "Divided",
    "Event",
    "Executor",
    "Finished",
    "Logged",
    "Outcome",
    "Progress",
    "Results",
    "Returned",
    "SlotSpec",
    "TargetBroken",
    "TargetSpec",
    "Task",
    "WorkerDied",
    "WorkerReady",
    "make_executor",
]
