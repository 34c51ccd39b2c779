"""Stages for tests of ``muster map``."""

from __future__ import annotations

import datetime
import decimal
from typing import Any


def same(record: dict[str, Any]) -> dict[str, Any]:
    return record


def copied(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every other record twice, and without a column here and there."""
    if record["n"] % 3 == 0:
        return []
    if record["n"] % 3 == 1:
        return [{**record}, {**record}]
    return [{name: value for name, value in record.items() if name != "binary"}]


def changed_once(record: dict[str, Any]) -> dict[str, Any]:
    """Changes every column, in the seventh row only."""
    if record["n"] != 7:
        return record
    return {name: value if name == "n" else None for name, value in record.items()} | {
        "pairs": [["k", 5]],
        "int8": 1000,
        "when": "then",
    }


def sometimes(record: dict[str, Any]) -> dict[str, Any]:
    """Changes a column in the seventh row only."""
    return {**record, "float": 0.25} if record["n"] == 7 else record


def altered(record: dict[str, Any]) -> dict[str, Any]:
    """Changes a list in place, and one column to values of each kind that Python has."""
    record["list"].append(1.5)
    return {
        **record,
        "int8": record["int8"] * 1000,
        "bytes": b"\x00\xff",
        "when": datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        "clock": datetime.datetime(2020, 1, 2),
        "day": datetime.date(2020, 1, 2),
        "time": datetime.time(1, 2, 3),
        "took": datetime.timedelta(days=-1, microseconds=5),
        "price": decimal.Decimal("12.50"),
        "nested": {"raw": [b"a", None]},
    }


def by_kind(record: dict[str, Any]) -> Any:
    """What a stage may return, and what it should not, as the record says."""
    match record.get("kind"):
        case "new":
            return {"n": record["n"]}
        case "own id":
            return {**record, "id": f"own {record['n']}"}
        case "bytes":
            return {**record, "bytes": b"\x00\xff"}
        case "mark":
            return {**record, "\x01muster": 1}
        case "none":
            return None
        case "two":
            return [{"n": -1}, record]
        case "wrong":
            return "text"
        case "raise":
            raise ValueError(f"cannot do {record['n']}")
    return record


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class Block:
    """Memory of a pretend device of 100 units, taken for as long as anything refers to it."""

    taken = 0

    def __init__(self, size: int) -> None:
        self.size = 0
        if Block.taken + size > 100:
            raise OutOfMemoryError(f"CUDA out of memory: {size} asked for, {Block.taken} taken")
        self.size = size
        Block.taken += size

    def __del__(self) -> None:
        Block.taken -= self.size


class Cramped:
    """A call takes 60 units, and 8 for each of its records, so that five fit."""

    batch_size = 16

    def process(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        weights = Block(60)
        activations = Block(8 * len(batch))
        return [{**record, "held": weights.size + activations.size} for record in batch]


def every_third(record: dict[str, Any]) -> dict[str, Any] | None:
    return record if record["n"] % 3 == 0 else None


def reversed_bytes(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "image": record["image"][::-1]}


def many_copies(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**record, "copy": number} for number in range(25)]
