"""Numbers of settings that cannot be meant."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from muster.base.errors import UsageError


def check_ranges(settings: Any, *, positive: Iterable[str], not_negative: Iterable[str]) -> None:
    """UsageError, named as the flag is, for a field out of its range or not finite.

    None is a setting that was not given.
    """
    for name in positive:
        value = getattr(settings, name)
        if value is not None and (value <= 0 or not math.isfinite(value)):
            raise UsageError(f"--{flag_of(name)} must be greater than 0, not {value}.")
    for name in not_negative:
        value = getattr(settings, name)
        if value is not None and (value < 0 or not math.isfinite(value)):
            raise UsageError(f"--{flag_of(name)} must be 0 or more, not {value}.")


def flag_of(name: str) -> str:
    """How a field is written on the command line."""
    return name.replace("_", "-")
