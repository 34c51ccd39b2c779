"""Whatever a task returns becomes fields, or is kept beside them."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from datetime import date
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import pytest

from muster.base.errors import TargetError
from muster.farm.canonical import decode, encode
from muster.farm.results import check_result, keep_beside, note_on, plain, plain_state


class Scalar:
    """Stands for a numpy scalar or a tensor without dimensions."""

    ndim = 0
    shape = ()

    def __init__(self, value: object) -> None:
        self.value = value

    def item(self) -> object:
        return self.value


class Array:
    ndim = 2
    shape = (3, 4)

    def tolist(self) -> list[object]:
        return []


@dataclasses.dataclass
class Metrics:
    loss: float
    curve: list[float]


@dataclasses.dataclass
class Outer:
    train: Metrics
    n: int


class Color(StrEnum):
    RED = "red"


class Level(Enum):
    LOW = 1


Point = namedtuple("Point", "x y")


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (None, {}),
        ({}, {}),
        ({"loss": 0.5, "n": 3, "ok": True, "s": "x", "none": None}, None),
        ({"curve": [1.0, [2, "a"]]}, None),
        (0.5, {"value": 0.5}),
        (7, {"value": 7}),
        ("text", {"value": "text"}),
        (True, {"value": True}),
        (Scalar(0.25), {"value": 0.25}),
        ((0.5, 3), {"value_0": 0.5, "value_1": 3}),
        ((0.5, {"acc": 1.0}), {"value_0": 0.5, "value_1.acc": 1.0}),
        ([0.5, 3], {"value": [0.5, 3]}),
        ((), {"value": []}),
        (Metrics(0.5, [1.0]), {"loss": 0.5, "curve": [1.0]}),
        (Outer(Metrics(0.5, [1.0]), 2), {"train.loss": 0.5, "train.curve": [1.0], "n": 2}),
        (Point(1, Scalar(2)), {"x": 1, "y": 2}),
        (OrderedDict(a=1), {"a": 1}),
        ({"a": {"b": 1, "c": {"d": 2.0}}, "e": 3}, {"a.b": 1, "a.c.d": 2.0, "e": 3}),
        ({"a": {}}, {"a": {}}),
        ({"a": {"b": 1}, "a.b": 2}, None),
        ({"rows": [{"x": 1}, {"x": Scalar(2)}]}, {"rows": [{"x": 1}, {"x": 2}]}),
        ({"t": (1, (2.0, "b"))}, {"t": [1, [2.0, "b"]]}),
        ({"p": Point(1, 2)}, {"p.x": 1, "p.y": 2}),
        ({"x": Scalar(1.5), "y": [Scalar(2)]}, {"x": 1.5, "y": [2]}),
        ({"c": Color.RED, "l": Level.LOW}, {"c": "red", "l": 1}),
        ({Color.RED: 1, Level.LOW: 2}, {"red": 1, "1": 2}),
        ({1: 2.0, 0.5: 3.0}, {"1": 2.0, "0.5": 3.0}),
        ({"when": date(2026, 1, 31), "where": Path("a/b")}, {"when": "2026-01-31", "where": "a/b"}),
        ({"odd": "a\udcff"}, None),
    ],
)
def test_what_becomes_fields(returned: object, result: dict[str, object] | None) -> None:
    expected = returned if result is None else result
    got = check_result(returned)
    assert repr(got) == repr(expected)
    assert repr(decode(encode(got))) == repr(expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            {"loss": [1, 2, 3, {4}]},
            'The task returned result["loss"][3] = a value of type set, which cannot be stored '
            "as a result.\nHint: return sorted(...) of it, a list.",
        ),
        (
            {"w": Array()},
            f'The task returned result["w"] = a value of type {__name__}.Array of shape (3, 4), '
            "which cannot be stored as a result.\n"
            "Hint: .tolist() turns a small one into a list; save a large one under ctx.folder.",
        ),
        (
            {"z": 1j},
            'The task returned result["z"] = a value of type complex, which cannot be stored as a '
            "result.\nHint: return its .real and .imag as two fields.",
        ),
        (
            {"o": [object()]},
            'The task returned result["o"][0] = a value of type object, which cannot be stored as '
            "a result.\nHint: return numbers, strings, or lists of them; save anything else under "
            "ctx.folder.",
        ),
    ],
)
def test_what_has_no_column_is_named_or_kept(
    returned: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TargetError) as caught:
        check_result(returned)
    assert str(caught.value) == message
    [name] = returned
    kept = check_result({**returned, "n": 1}, lambda n, value: keep_beside(tmp_path, n, value))
    assert kept["n"] == 1
    assert (tmp_path / kept[name]).stat().st_size > 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({1: 2, "1": 3}, "two fields that are both named '1'"),
        ({(1, 2): 3}, r"key \(1, 2\) of type tuple"),
        ({"rows": [{1: 2}]}, "key 1 of type int"),
        (generator(), "generator: nothing of its body has run"),
    ],
)
def test_what_has_no_names_of_its_own_is_refused(returned: object, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        check_result(returned)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    circle: dict[str, Any] = {}
    circle["again"] = circle
    for value in ({"x": loop}, circle):
        with pytest.raises(TargetError, match="nested deeper than 80 levels"):
            check_result(value)


class Unfriendly:
    def __reduce__(self) -> str:
        raise RuntimeError("no pickle")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_kept_files_hold_the_value_and_replace_none(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("the user's")
    assert keep_beside(tmp_path, "w", {1, 2}) == "w-2.pickle"
    assert pickle.loads((tmp_path / "w-2.pickle").read_bytes()) == {1, 2}
    assert keep_beside(tmp_path, "../a b\udcff/", {3}) == "a-b.pickle"
    assert keep_beside(tmp_path, "lambda", lambda: 1) == "lambda.txt"
    assert keep_beside(tmp_path, "u", Unfriendly()) == "u.txt"
    assert (tmp_path / "w.txt").read_text() == "the user's"


def test_a_checkpoint_keeps_its_shape() -> None:
    state = {"step": Scalar(3), "best": {"loss": 0.5, "at": [1, (2,)]}}
    assert plain(state, "state") == {"step": 3, "best": {"loss": 0.5, "at": [1, [2]]}}
    with pytest.raises(TargetError, match="key 1 of type int"):
        plain({"a": {1: 2}}, "state")


@pytest.mark.parametrize(
    ("state", "said", "hint"),
    [
        ({"seen": {1}}, '["seen"] = a value of type set, which cannot be stored', "give sorted"),
        ({"a": {1: 2}}, '["a"] with the key 1 of type int: the keys of a chec', "give {str(key)"),
        ({"f": open}, '["f"] = ', "give numbers"),
    ],
)
def test_a_checkpoint_that_cannot_be_stored_is_no_result(state: Any, said: str, hint: str) -> None:
    with pytest.raises(TargetError) as caught:
        plain_state(state)
    assert str(caught.value).startswith(f"ctx.checkpoint was given state{said}")
    assert f"Hint: {hint}" in str(caught.value)
    assert "return" not in str(caught.value)


@pytest.mark.parametrize("annotation", ["float", "dict[str, float]", "None", "Metrics", "tuple"])
def test_nothing_is_said_of_what_becomes_columns(annotation: str) -> None:
    assert note_on(annotation) == ""


def test_what_an_annotation_says_about_files() -> None:
    assert "any other Tensor is saved as a pickled file" in note_on("dict[str, torch.Tensor]")
    assert "any other set" in note_on("set[int]")


def test_numpy_scalars_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    returned = {
        "a": numpy.float64(0.5),
        "b": numpy.float32(0.25),
        "c": numpy.int64(3),
        "d": numpy.bool_(True),
        "e": numpy.array(1.5),
        "f": [numpy.float64(math.nan)],
    }
    expected = {"a": 0.5, "b": 0.25, "c": 3, "d": True, "e": 1.5, "f": [math.nan]}
    assert repr(check_result(returned)) == repr(expected)
    assert check_result(numpy.float32(2.0)) == {"value": 2.0}
    with pytest.raises(TargetError, match=r'result\["g"\] = .*numpy.ndarray of shape \(2,\)'):
        check_result({"g": numpy.zeros(2)})
