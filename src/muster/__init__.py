"""Muster: run a PyTorch workload on every GPU you have, always resumable, always measured.

The names below are imported on first use, so that ``import muster`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.api.fit import fit as fit
    from muster.api.launch import sweep as sweep
    from muster.api.map import map as map
    from muster.api.recipe import AgentRecipe as AgentRecipe
    from muster.api.recipe import MapRecipe as MapRecipe
    from muster.api.recipe import Recipe as Recipe
    from muster.api.recipe import RecipeTask as RecipeTask
    from muster.api.recipe import TrainRecipe as TrainRecipe
    from muster.api.runs import Run as Run
    from muster.base.errors import MissingPackageError as MissingPackageError
    from muster.base.errors import MusterError as MusterError
    from muster.base.errors import PlanMismatchError as PlanMismatchError
    from muster.base.errors import SetupError as SetupError
    from muster.base.errors import TargetError as TargetError
    from muster.base.errors import UnknownNameError as UnknownNameError
    from muster.base.errors import UsageError as UsageError
    from muster.base.metric_log import log as log
    from muster.base.target import load_target as load_target
    from muster.farm.batched import batched as batched
    from muster.farm.executors.cluster import ClusterRequest as ClusterRequest
    from muster.farm.worker.context import Context as Context
    from muster.pipeline.stages import Reject as Reject
    from muster.pipeline.stages import seed_of as seed_of
    from muster.search.space import Space as Space
    from muster.train.config import TrainConfig as TrainConfig
    from muster.train.task import Loss as Loss
    from muster.train.task import Task as Task

__version__ = "0.1.0"

_PUBLIC = {
    "AgentRecipe": "muster.api.recipe",
    "ClusterRequest": "muster.farm.executors.cluster",
    "Context": "muster.farm.worker.context",
    "Loss": "muster.train.task",
    "MapRecipe": "muster.api.recipe",
    "MissingPackageError": "muster.base.errors",
    "MusterError": "muster.base.errors",
    "PlanMismatchError": "muster.base.errors",
    "Recipe": "muster.api.recipe",
    "RecipeTask": "muster.api.recipe",
    "Reject": "muster.pipeline.stages",
    "Run": "muster.api.runs",
    "SetupError": "muster.base.errors",
    "Space": "muster.search.space",
    "TargetError": "muster.base.errors",
    "Task": "muster.train.task",
    "TrainConfig": "muster.train.config",
    "TrainRecipe": "muster.api.recipe",
    "UnknownNameError": "muster.base.errors",
    "UsageError": "muster.base.errors",
    "batched": "muster.farm.batched",
    "fit": "muster.api.fit",
    "load_target": "muster.base.target",
    "log": "muster.base.metric_log",
    "map": "muster.api.map",
    "seed_of": "muster.pipeline.stages",
    "sweep": "muster.api.launch",
}

__all__ = [
    "AgentRecipe",
    "ClusterRequest",
    "Context",
    "Loss",
    "MapRecipe",
    "MissingPackageError",
    "MusterError",
    "PlanMismatchError",
    "Recipe",
    "RecipeTask",
    "Reject",
    "Run",
    "SetupError",
    "Space",
    "TargetError",
    "Task",
    "TrainConfig",
    "TrainRecipe",
    "UnknownNameError",
    "UsageError",
    "batched",
    "fit",
    "load_target",
    "log",
    "map",
    "seed_of",
    "sweep",
]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'muster' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
