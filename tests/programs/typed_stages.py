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
