"""``--metrics-from``: the numbers of a command that logs none itself, from what it prints or from
TensorBoard's event files.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from muster.base.errors import MissingPackageError, UsageError

STDOUT, TENSORBOARD = "stdout", "tensorboard"
Add = Callable[[int, Mapping[str, float]], None]


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


class Printed:
    """Numbers in a log from ``start`` on: the named groups of a pattern.

    A group ``step`` is the step, otherwise the number of matches before.
    """

    def __init__(self, log: Path, start: int, pattern: re.Pattern[str], add: Add) -> None:
        self._log = log
        self._offset = start
        self._pattern = pattern
        self._add = add
        self._rest = b""
        self._num_matches = 0

    def look(self, *, is_over: bool) -> None:
        """Read what is new; a last line without an end counts when ``is_over``."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + data)  # bars are redrawn after \r
        if is_over:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            for match in self._pattern.finditer(line.decode("utf-8", "replace")):
                self._take(match.groupdict())

    def _take(self, groups: dict[str, str | None]) -> None:
        number = self._num_matches
        self._num_matches += 1
        text = groups.pop("step", None)
        numbers = {}
        for name, value in groups.items():
            with suppress(ValueError):
                if value is not None:
                    numbers[name] = float(value)
        with suppress(ValueError, OverflowError):
            step = number if text is None else int(float(text))
            if numbers:
                self._add(step, numbers)


class EventFiles:
    """Scalars in TensorBoard's event files below a folder, also in ones that appear later."""

    def __init__(self, folder: Path, add: Add) -> None:
        self._folder = folder
        self._add = add
        self._loaders: dict[Path, Any] = {}

    def look(self, *, is_over: bool) -> None:
        """Read what is new."""
        from tensorboard.backend.event_processing import (
            event_file_loader as files,
        )
        from tensorboard.util.tensor_util import make_ndarray

        for path in sorted(self._folder.rglob("*tfevents*")):
            loader = self._loaders.get(path)
            if loader is None:
                loader = self._loaders[path] = files.EventFileLoader(str(path))
            for event in loader.Load():
                for value in event.summary.value:
                    number = make_ndarray(value.tensor) if value.HasField("tensor") else None
                    if number is not None and number.shape == () and number.dtype.kind in "fiub":
                        self._add(int(event.step), {value.tag: float(number)})
