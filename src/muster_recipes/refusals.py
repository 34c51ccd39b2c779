"""Refuses settings that make no sense, in the same words for every recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from muster import UsageError


def flag_of(name: str) -> str:
    """``num_seeds`` as it is typed: ``--num-seeds``."""
    return "--" + name.replace("_", "-")


def require_one_or_more(config: Any, *names: str) -> None:
    """Raise UsageError for a field below 1; one that is None was not given."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise UsageError(f"{flag_of(name)} {value} is too small.", hint="write 1 or more.")


def require_above_zero(config: Any, *names: str) -> None:
    """Raise UsageError for a field that is not a positive finite number."""
    for name in names:
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise UsageError(f"{flag_of(name)} {value} must be above 0 and finite.")


def require_different_counts(config: Any, *names: str) -> None:
    """Raise UsageError for a list that is empty or holds a number below 1 or a number twice."""
    for name in names:
        values = getattr(config, name)
        if not values or min(values) < 1 or len(set(values)) != len(values):
            text = " ".join(map(str, values))
            raise UsageError(f"{flag_of(name)} {text}: give different whole numbers from 1.")


def require_default(
    config: Any, names: Collection[str], beside: str, hint: str = "leave it out."
) -> None:
    """Raise UsageError for a field that has no effect, ``beside`` what, and is not its default.

    A recipe that has runs with such a field refuses it in ``check_new``, of new runs only: the
    others could not be gone on with, nor reported.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            shown = "" if value is True else f" {value}"
            raise UsageError(f"{flag_of(field.name)}{shown} has no effect {beside}.", hint=hint)


def require_seeds(config: Any) -> None:
    """Raise UsageError for a seed that ``config.seeds`` names twice."""
    if len(set(config.seeds)) != len(config.seeds):
        raise UsageError(f"--seeds {' '.join(map(str, config.seeds))} names a seed twice.")
