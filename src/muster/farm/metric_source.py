"""``--metrics-from``: where to find the numbers of a command that logs none itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import PurePath
from typing import NamedTuple

from muster.base.errors import MissingPackageError, UsageError

STDOUT, TENSORBOARD = "stdout", "tensorboard"


class MetricSource(NamedTuple):
    """``kind``: STDOUT with a pattern, or TENSORBOARD with a folder below the task's."""

    kind: str
    place: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.place)


def parse_source(text: str) -> MetricSource:
    """``stdout:REGEX`` or ``tensorboard:DIR``.

    Raises UsageError for anything else, and MissingPackageError without tensorboard's package.

    >>> parse_source(r"stdout:loss (?P<loss>[0-9.]+)").kind
    'stdout'
    """
    kind, colon, place = text.partition(":")
    if kind not in (STDOUT, TENSORBOARD) or not colon or not place:
        raise UsageError(
            f"--metrics-from {text}: this is not a source of numbers.",
            hint=r"write stdout:REGEX with named groups, such as 'stdout:loss=(?P<loss>\S+)', or "
            "tensorboard:DIR with a folder below $MUSTER_TASK_DIR.",
        )
    if kind == STDOUT:
        try:
            groups = set(re.compile(place).groupindex)
        except re.error as error:
            raise UsageError(f"--metrics-from {text}: the pattern is invalid: {error}.") from None
        if not groups - {"step"}:
            raise UsageError(
                f"--metrics-from {text}: the pattern names no metric.",
                hint=r"name the part that is the number: (?P<loss>\S+).",
            )
    elif PurePath(place).is_absolute() or ".." in PurePath(place).parts:
        raise UsageError(
            f"--metrics-from {text}: {place} is not below the folder of each task.",
            hint="have the program write below $MUSTER_TASK_DIR, and name the folder there: "
            "tensorboard:tb.",
        )
    elif importlib.util.find_spec("tensorboard") is None:
        raise MissingPackageError("--metrics-from tensorboard:DIR", "tensorboard", "tensorboard")
    return MetricSource(kind, place)
