"""What stands beside an integer beyond 64 bits is written as it is without one."""

from __future__ import annotations

import enum
import json
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest

from muster.pipeline.sinks.lines import as_json, as_plain

LONG = 2**70


class Color(enum.Enum):
    RED = "red"


class Huge(enum.Enum):
    ONE = LONG


@dataclass
class Box:
    size: Any
    _hidden: int = 1


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.array([0.1, 2.5], np.float32), [np.float32(0.1)], Color.RED,
        Box(np.float32(0.1)), uuid.UUID(int=5), np.float64("nan"),
        np.array([np.nan, 1.5], np.float32), b"ab",
    ],
)  # fmt: skip
def test_it_is_as_orjson_writes_it(value: Any) -> None:
    usual = orjson.dumps(value, default=as_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    assert as_json({"v": value, "n": LONG}) == b'{"v":%s,"n":%d}' % (usual, LONG)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (Box(LONG), {"size": LONG}),
        (Box([Box(-LONG)]), {"size": [{"size": -LONG}]}),
        (Huge.ONE, LONG),
        (np.array([LONG, 1], object), [LONG, 1]),
        (orjson.Fragment(f'{{"a":{LONG},"b":NaN}}'), {"a": LONG, "b": None}),
    ],
)
def test_it_may_hold_the_integer(value: Any, meant: Any) -> None:
    assert json.loads(as_json([value, LONG])) == [meant, LONG]


def test_what_holds_itself_or_is_unknown_is_refused_as_ever() -> None:
    around: list[Any] = [LONG]
    around.append(around)
    deep: list[Any] = [LONG]
    for _ in range(5000):
        deep = [LONG, deep]
    for value in (around, deep):
        with pytest.raises(TypeError, match="holds itself"):
            as_json(value)
    with pytest.raises(TypeError, match="JSON has no object"):
        as_json([LONG, object()])
