"""Muster: run a PyTorch workload on every GPU you have, always resumable, always measured.

The names below are imported on first use, so that ``import muster`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.api.recipe import Recipe as Recipe
    from muster.api.recipe import RecipeTask as RecipeTask
    from muster.api.runs import Run as Run
    from muster.api.sweep import sweep as sweep
    from muster.base.errors import MusterError as MusterError
    from muster.base.errors import UsageError as UsageError
    from muster.farm.batched import batched as batched
    from muster.farm.worker.context import Context as Context

__version__ = "0.1.0"

_PUBLIC = {
    "Context": "muster.farm.worker.context",
    "MusterError": "muster.base.errors",
    "Recipe": "muster.api.recipe",
    "RecipeTask": "muster.api.recipe",
    "Run": "muster.api.runs",
    "UsageError": "muster.base.errors",
    "batched": "muster.farm.batched",
    "sweep": "muster.api.sweep",
}

__all__ = [
    "Context",
    "MusterError",
    "Recipe",
    "RecipeTask",
    "Run",
    "UsageError",
    "batched",
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
