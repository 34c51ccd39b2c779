"""Reads numbers from what a program prints, or from event files of TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Add = Callable[[int, Mapping[str, float]], None]


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
