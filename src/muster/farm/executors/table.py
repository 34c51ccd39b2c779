"""Executors: a table of name → "module:attribute", imported on use; and those of others.

``file.py:Class`` names one of the user's, and packages offer theirs by entry points of the group
``muster.executors``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import cast

from muster.base.target import load, parse_target
from muster.farm.executors.base import Assignment, Executor

_GROUP = "muster.executors"
EXECUTORS: dict[str, str] = {
    "local": "muster.farm.executors.local:LocalExecutor",
    "inline": "muster.farm.executors.inline:InlineExecutor",
    "slurm": "muster.farm.executors.slurm:SlurmExecutor",
    "ray": "muster.farm.executors.ray:RayExecutor",
}
#: Executors whose workers run on machines that an engine hands out; they take no device here.
CLUSTERS = ("slurm", "ray")


def is_executor(name: str) -> bool:
    """Whether ``name`` is in the table, in a file, or offered by an installed package."""
    return name in EXECUTORS or ":" in name or name in _installed()


def make_executor(name: str, assignment: Assignment) -> Executor:
    """The executor called ``name``, for which ``is_executor`` holds.

    Raises TargetError for one of a file or package that cannot be loaded.
    """
    if name in EXECUTORS:
        module, _, attribute = EXECUTORS[name].partition(":")
        return cast(Executor, getattr(importlib.import_module(module), attribute)(assignment))
    if ":" in name:
        return cast(Executor, load(parse_target(name))(assignment))
    return cast(Executor, _installed()[name].load()(assignment))


def _installed() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=_GROUP)}
