"""From the name of a task to the task."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from muster.base.errors import TargetError
from muster.base.records import from_record
from muster.base.target import load, parse_target
from muster.train.task import Task


def find_task_class(target: str) -> type[Task]:
    """The class that ``file.py:Class`` or ``package.module:Class`` names.

    Raises TargetError when it is not a subclass of Task or leaves out what a task must say.
    """
    found: Any = load(parse_target(target))
    if not isinstance(found, type) or not issubclass(found, Task):
        raise TargetError(
            f"{target} is not a task: it does not derive from muster.Task.",
            hint="write class MyTask(muster.Task) with model, dataset, loss and score.",
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise TargetError(
            f"{target} does not say its {', '.join(missing)}.",
            hint=f"add the method{'s' * (len(missing) > 1)} to the class.",
        )
    return found


def make_task(target: str, config: str | None, values: Mapping[str, Any]) -> Task:
    """A task with its own settings.

    ``config``: the class of a recipe's settings, ``module:Class``, which is the only argument of
    its task. Without it the task is a dataclass, or takes nothing.
    """
    kind = find_task_class(target)
    make: Any = kind
    if config is not None:
        module, _, name = config.partition(":")
        settings = from_record(getattr(importlib.import_module(module), name), values)
        task: Task = make(settings)
        return task
    if dataclasses.is_dataclass(kind):
        made: Task = from_record(kind, values)
        return made
    try:
        plain: Task = make(**values)
        return plain
    except TypeError as error:
        raise TargetError(
            f"{target} cannot be made without arguments: {error}.",
            hint="make it a dataclass, so that its fields become flags, with a default each.",
        ) from None
