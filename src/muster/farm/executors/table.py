"""Executors: a table of name → "module:attribute", imported on use."""

from __future__ import annotations

import importlib
from typing import cast

from muster.farm.executors.base import Assignment, Executor

EXECUTORS: dict[str, str] = {
    "local": "muster.farm.executors.local:LocalExecutor",
    "inline": "muster.farm.executors.inline:InlineExecutor",
    "slurm": "muster.farm.executors.slurm:SlurmExecutor",
    "ray": "muster.farm.executors.ray:RayExecutor",
}
#: Whose workers are on machines that an engine hands out: no device of this machine is taken.
CLUSTERS = ("slurm", "ray")


def make_executor(name: str, assignment: Assignment) -> Executor:
    """The executor called ``name``, which must be in the table."""
    module, _, attribute = EXECUTORS[name].partition(":")
    return cast(Executor, getattr(importlib.import_module(module), attribute)(assignment))
