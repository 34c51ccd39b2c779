from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import TargetError
from muster.farm.codec import check_result, decode, encode, encode_canonical

keys = st.one_of(st.text(), st.text().map("$".__add__), st.sampled_from(["$float", "$dict"]))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(alphabet=st.characters())
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)


def same(left: Any, right: Any) -> bool:
    """Equal including types, the sign of zero and NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@examples(300)
@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert same(decode(encode_canonical(value)), value)


@examples(100)
@given(st.dictionaries(keys, scalars))
def test_canonical_ignores_the_order_of_keys(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert encode_canonical(value) == encode_canonical(backwards)


@examples(200)
@given(values, values)
def test_canonical_tells_different_values_apart(one: Any, two: Any) -> None:
    assert (encode_canonical(one) == encode_canonical(two)) == same(one, two)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"a": 1.5, "b": "x"}, b'{"a":1.5,"b":"x"}'),
        ({"a": None}, b'{"a":null}'),
        ("null", b'"null"'),
        (math.nan, b'{"$float":"nan"}'),
        ([math.inf, -math.inf], b'[{"$float":"inf"},{"$float":"-inf"}]'),
        (2**64 - 1, b"18446744073709551615"),
        (2**64, b'{"$int":"0x10000000000000000"}'),
        (-(2**63) - 1, b'{"$int":"-0x8000000000000001"}'),
        ({"$a": 1}, b'{"$dict":[["$a",1]]}'),
        ("$a", b'"$a"'),
        ("a\udc80", b'{"$str":"61edb280"}'),
        (-0.0, b"-0.0"),
        ((1, 2), b"[1,2]"),
    ],
)
def test_written_form(value: object, data: bytes) -> None:
    assert encode(value) == data


def test_numbers_that_compare_equal_stay_distinct() -> None:
    different = [1, 1.0, True, 0, 0.0, -0.0, False, None, "1"]
    assert len({encode_canonical(value) for value in different}) == len(different)


def test_huge_integers_survive() -> None:
    huge = 10**5000
    assert decode(encode(huge)) == huge


def test_mapping_keys_that_are_not_strings_are_refused() -> None:
    with pytest.raises(TargetError) as caught:
        encode({"a": {1: 2}})
    assert str(caught.value) == (
        'Cannot store value["a"]: its key 1 is of type int, and JSON keys are strings.\n'
        "Hint: write str(1)."
    )


def test_objects_are_refused_with_their_path() -> None:
    with pytest.raises(TargetError) as caught:
        encode({"a": [1, object()]})
    assert str(caught.value) == (
        'Cannot store value["a"][1]: a value of type object has no JSON form.\n'
        "Hint: use numbers, strings, booleans, None, and lists or dicts of those."
    )


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TargetError, match="nested deeper than 80 levels, or it contains itself"):
        encode(loop)
    with pytest.raises(TargetError, match="nested deeper than 80 levels, or it contains itself"):
        check_result({"x": loop})


def test_a_tag_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown tag '\$new'.*a newer muster"):
        decode(b'{"$new":1}')


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


class Color(StrEnum):
    RED = "red"


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (None, {}),
        ({}, {}),
        ({"loss": 0.5, "n": 3, "ok": True, "s": "x", "none": None}, None),
        ({"curve": [1.0, [2, "a"]]}, None),
        (Metrics(0.5, [1.0]), {"loss": 0.5, "curve": [1.0]}),
        (OrderedDict(a=1), {"a": 1}),
        ({"t": (1, (2.0, "b"))}, {"t": [1, [2.0, "b"]]}),
        ({"p": Point(1, 2)}, {"p": [1, 2]}),
        ({"x": Scalar(1.5), "y": [Scalar(2)]}, {"x": 1.5, "y": [2]}),
        ({"c": Color.RED}, {"c": "red"}),
        ({Color.RED: 1}, {"red": 1}),
    ],
)
def test_results_that_are_accepted(returned: object, result: dict[str, object] | None) -> None:
    expected = returned if result is None else result
    got = check_result(returned)
    assert same(got, expected)
    assert same(decode(encode(got)), expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            0.5,
            "The task returned a value of type float; a result is a mapping or a dataclass, "
            'so that each value has a name.\nHint: return {"value": x}.',
        ),
        (
            Metrics,
            "The task returned a value of type type; a result is a mapping or a dataclass, "
            'so that each value has a name.\nHint: return {"value": x}.',
        ),
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
            {"a": {"b": 1}},
            'The task returned result["a"] = a value of type dict, which cannot be stored as a '
            "result.\nHint: lift its entries to the top level, each under its own name.",
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
        (
            {1: 2.0},
            "The task returned a mapping with the key 1 of type int: field names are strings, "
            "they become columns.\nHint: return {str(key): value}, here '1'.",
        ),
    ],
)
def test_results_that_are_refused(returned: object, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        check_result(returned)
    assert str(caught.value) == message


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
    assert same(check_result(returned), expected)
    with pytest.raises(TargetError, match=r'result\["g"\] = .*numpy.ndarray of shape \(2,\)'):
        check_result({"g": numpy.zeros(2)})
