"""From the name of a task to the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.rank.named_task import find_class, make
from muster.train.task import Task


def find_task_class(target: str) -> type[Task]:
    """The class that ``target`` names; TargetError when it is no whole Task."""
    hint = "write class MyTask(muster.Task) with model, dataset, loss and score."
    return find_class(target, Task, hint)  # type: ignore[type-abstract]


def make_task(target: str, config: str | None, values: Mapping[str, Any]) -> Task:
    """A task with its own settings; see ``gang.named_task.make``."""
    return make(find_task_class(target), target, config, values)
