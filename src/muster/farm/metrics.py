"""Points, which are numbers that a task has logged: the bytes of many, and which of them hold.

A body is a line of JSON with the names of the metrics, then 26 bytes for each point, little-endian:
the number of its name (u16), step (i64), time in seconds since 1970 (f64) and value (f64). Where
the program of a task was started again within an attempt, the first point says how often.

A task may have had several attempts, and each may have logged the same steps again. What holds:
metric by metric, a later attempt or start replaces everything of earlier ones from the first step
that it logs. One that goes on from a checkpoint therefore continues the curve, and one that starts
afresh replaces it.

``--metrics-from`` has the numbers of a command that logs none itself, from what it prints or from
TensorBoard's event files.
"""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from muster.base.errors import MissingPackageError, UsageError
from muster.base.metric_log import PROCESS
from muster.farm import wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from muster.farm.ledger.read import LedgerReader

#: One point: number of the name, step, time, value.
POINT = struct.Struct("<Hqdd")
_FIELDS = [("name", "<u2"), ("step", "<i8"), ("time", "<f8"), ("value", "<f8")]


class Point(NamedTuple):
    """One number that was logged; ``time_s`` is in seconds since 1970."""

    name: str
    step: int
    time_s: float
    value: float


class Points(NamedTuple):
    """Points as columns, in the order in which they were logged.

    ``which`` holds the index of each point's name in ``names``; all columns are equally long.
    NaN and infinities are kept as they were logged. ``start``: how often the program had been
    started again within the attempt.
    """

    names: tuple[str, ...]
    which: NDArray[np.uint16]
    step: NDArray[np.int64]
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]
    start: int = 0

    def __len__(self) -> int:  # of points, not of columns
        return len(self.which)

    def rows(self) -> list[Point]:
        """The same as a list of points."""
        columns = (self.which, self.step, self.time_s, self.value)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Point(self.names[which], *rest) for which, *rest in rows]


def join(names: Iterable[str], packed: bytes) -> bytes:
    """The body of these names and of points that ``POINT`` has packed."""
    return orjson.dumps([wire.clean(name) for name in names]) + b"\n" + packed


def encode(points: Iterable[tuple[str, int, float, float]], start: int = 0) -> bytes:
    """The body of these points, each a name, a step, a time and a value.

    It holds at most 65,536 names; more raise struct.error.
    """
    numbers: dict[str, int] = {}
    if start:
        points = [(PROCESS, 0, 0.0, start), *points]
    packed = b"".join(
        POINT.pack(numbers.setdefault(name, len(numbers)), step, time_s, value)
        for name, step, time_s, value in points
    )
    return join(numbers, packed)


def names_in(body: bytes) -> list[str]:
    """The names of a body, without its points."""
    found: list[str] = orjson.loads(body[: body.index(b"\n")])
    return [name for name in found if name != PROCESS]


def decode(body: bytes) -> Points:
    """The points of a body, in the order in which they were logged."""
    import numpy as np

    start = body.index(b"\n") + 1
    names: Sequence[str] = orjson.loads(body[:start])
    table = np.frombuffer(body, dtype=_FIELDS, offset=start)
    if names[:1] == [PROCESS] and len(table):
        rest, started = table[1:], int(table["value"][0])
        which = rest["name"] - np.uint16(1)
        return Points(tuple(names[1:]), which, rest["step"], rest["time"], rest["value"], started)
    return Points(tuple(names), table["name"], table["step"], table["time"], table["value"])


class Frame(NamedTuple):
    """What one attempt of a task has sent at once.

    ``frame_id`` grows with every frame of the run; ``token`` with every attempt of the task.
    """

    frame_id: int
    task_id: int
    token: int
    points: Points


class Curve(NamedTuple):
    """The points of one metric of one task that hold, as columns of equal length.

    They are in the order in which they were logged; ``token`` names the attempt of each.
    """

    step: NDArray[np.int64]
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]
    token: NDArray[np.int64]


def frames_above(reader: LedgerReader, last_id: int = 0) -> Iterator[Frame]:
    """What was recorded after frame ``last_id``, in the order of recording.

    Whoever follows a run asks again with the highest ``frame_id`` it has seen: it gets every frame
    exactly once. A frame may repeat steps of an earlier attempt; ``effective`` says what holds.
    """
    for row in reader.metrics(above=last_id):
        yield Frame(row.frame_id, row.task_id, row.token, decode(row.body))


def curves_of(reader: LedgerReader, task_id: int) -> dict[str, Curve]:
    """What holds of one task: a curve for each metric, in the order of their first points."""
    return effective((row.token, decode(row.body)) for row in reader.metrics(task_id=task_id))


def effective(frames: Iterable[tuple[int, Points]]) -> dict[str, Curve]:
    """The points that hold of one task whose frames these are: token and points, in any order
    of tokens, but those of one token in the order in which they were sent.
    """
    import numpy as np

    parts: dict[str, dict[tuple[int, int], list[Curve]]] = {}
    for token, points in frames:
        for number, name in enumerate(points.names):
            mine = points.which == number
            step = points.step[mine]
            columns = (step, points.time_s[mine], points.value[mine])
            part = Curve(*columns, np.full(len(step), token, np.int64))
            parts.setdefault(name, {}).setdefault((token, points.start), []).append(part)
    return {name: cut(by_start) for name, by_start in parts.items()}


def cut(by_start: Mapping[tuple[int, int], list[Curve]]) -> Curve:
    """What holds of one metric, by attempt and start: from the last to the first, of each what lies
    below all steps of later ones. Cut again with what came since, it is as if cut once.
    """
    import numpy as np

    kept: list[Curve] = []
    bound: int | None = None
    for start in sorted(by_start, reverse=True):
        whole = _joined(by_start[start])
        if not len(whole.step):
            continue
        holds = np.ones(len(whole.step), bool) if bound is None else whole.step < bound
        kept.append(Curve._make(column[holds] for column in whole))
        first = int(whole.step.min())
        bound = first if bound is None else min(bound, first)
    return _joined(kept[::-1])


def _joined(parts: list[Curve]) -> Curve:
    import numpy as np

    return Curve._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


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
        self._folders: dict[str, set[Path]] = {}

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
                        self._folders.setdefault(value.tag, set()).add(path.parent)
                        self._add(int(event.step), {value.tag: float(number)})

    @property
    def ambiguous(self) -> list[str]:
        """Tags that come from several folders, such as train and validation: which of them was
        read last means nothing."""
        return [tag for tag, folders in self._folders.items() if len(folders) > 1]
