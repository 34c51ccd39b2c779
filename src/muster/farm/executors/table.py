"""Executors: a table of name → "module:attribute", imported on use; and those of others.

``file.py:Class`` names one of the user's, and packages offer theirs by entry points of the group
``muster.executors``.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, cast

from muster.base.errors import MusterError, TargetError, UnknownNameError, cause_of
from muster.base.modules import CLASS, load_plugin, plugins
from muster.base.target import load_value, parse_target
from muster.farm.executors.cluster import CLUSTERS as CLUSTERS

if TYPE_CHECKING:
    from muster.farm.executors.base import Assignment, Executor

EXECUTORS: dict[str, str] = {
    "local": "muster.farm.executors.local:LocalExecutor",
    "inline": "muster.farm.executors.inline:InlineExecutor",
    "slurm": "muster.farm.executors.slurm:SlurmExecutor",
    "ray": "muster.farm.executors.ray:RayExecutor",
}
_METHODS = ("start", "send", "share", "stop_task", "revoke", "confirm", "end", "poll", "close")


def is_executor(name: str) -> bool:
    """Whether ``name`` is in the table, in a file, or offered by an installed package."""
    return name in EXECUTORS or ":" in name or name in plugins("executor")


def check_executor(name: str) -> None:
    """UnknownNameError or TargetError for a name that means no executor, or a class that is none.

    Only what muster does not bring itself is imported.
    """
    if not is_executor(name):
        raise UnknownNameError("executor", name, {*EXECUTORS, *plugins("executor")})
    if name not in EXECUTORS:
        _class_of(name)


def make_executor(name: str, assignment: Assignment) -> Executor:
    """The executor called ``name``, for which ``check_executor`` holds.

    Raises TargetError for one of a file or package that cannot be loaded or made.
    """
    if name in EXECUTORS:
        module, _, attribute = EXECUTORS[name].partition(":")
        return cast("Executor", getattr(importlib.import_module(module), attribute)(assignment))
    kind = _class_of(name)
    try:
        return cast("Executor", kind(assignment))
    except MusterError:
        raise
    except Exception as error:
        raise TargetError(
            f"The executor {name} cannot be made: {cause_of(error, kind.__init__)}.",
            hint="correct it and start the same command again.",
        ) from error


def _class_of(name: str) -> type[Any]:
    """The user's class; TargetError where it is none, or does not answer what is asked of it."""
    found: Any = (
        load_value(parse_target(name), kind=CLASS) if ":" in name else load_plugin("executor", name)
    )
    if not isinstance(found, type):
        raise TargetError(
            f"The executor {name} is not a class but of type {type(found).__name__}.",
            hint="write class MyExecutor with the methods of muster.executors.Executor.",
        )
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing and not hasattr(found, "__getattr__"):  # one that hands on what it does not do
        raise TargetError(
            f"The executor {name} has no method {', '.join(missing)}.",
            hint="docs/executors.md describes each one.",
        )
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise TargetError(
            f"The executor {name} cannot be made with an Assignment alone: {error}.",
            hint="write def __init__(self, assignment: muster.executors.Assignment) -> None.",
        ) from None
    except ValueError:
        pass  # nothing is known of what its constructor takes
    return found
