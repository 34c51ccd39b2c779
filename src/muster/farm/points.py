"""Points, which are numbers that a task has logged, and the bytes that hold many of them.

A body is a line of JSON with the names of the metrics, then 26 bytes for each point, little-endian:
the number of its name (u16), step (i64), time in seconds since 1970 (f64) and value (f64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import orjson

from muster.farm import wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
    NaN and infinities are kept as they were logged.
    """

    names: tuple[str, ...]
    which: NDArray[np.uint16]
    step: NDArray[np.int64]
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]

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


def encode(points: Iterable[tuple[str, int, float, float]]) -> bytes:
    """The body of these points, each a name, a step, a time and a value.

    It holds at most 65,536 names; more raise struct.error.
    """
    numbers: dict[str, int] = {}
    packed = b"".join(
        POINT.pack(numbers.setdefault(name, len(numbers)), step, time_s, value)
        for name, step, time_s, value in points
    )
    return join(numbers, packed)


def names_in(body: bytes) -> list[str]:
    """The names of a body, without its points."""
    found: list[str] = orjson.loads(body[: body.index(b"\n")])
    return found


def decode(body: bytes) -> Points:
    """The points of a body, in the order in which they were logged."""
    import numpy as np

    start = body.index(b"\n") + 1
    names: Sequence[str] = orjson.loads(body[:start])
    table = np.frombuffer(body, dtype=_FIELDS, offset=start)
    return Points(tuple(names), table["name"], table["step"], table["time"], table["value"])
