from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.hostile_texts import unescape_surrogates

from muster.base.errors import TargetError
from muster.farm.canonical import (
    decode,
    encode,
    encode_canonical,
    escape_surrogates,
)

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
        ({"a": None, "b": math.nan}, b'{"a":null,"b":{"$float":"nan"}}'),
        (
            {"a": None, "null": "null", "b": math.nan},
            b'{"a":null,"null":"null","b":{"$float":"nan"}}',
        ),
        ({"a": [None, math.nan], "b": None}, b'{"a":[null,{"$float":"nan"}],"b":null}'),
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


def test_a_tag_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown tag '\$new'.*a newer muster"):
        decode(b'{"$new":1}')


@examples(300)
@given(st.text(alphabet=st.one_of(st.sampled_from("\\ud8cf\udcff\ud83d\ude00"), st.characters())))
def test_any_text_can_be_written_as_unicode_and_read_back(text: str) -> None:
    written = escape_surrogates(text)
    assert written.encode().decode() == written
    assert unescape_surrogates(written) == text


def test_ordinary_texts_are_written_as_they_are() -> None:
    for text in ("", "C:\\users\\data", "\\frac{1}{2}", "é 日本", "\\udots"):
        assert escape_surrogates(text) == text
    assert escape_surrogates("a\udcff.txt") == "a\\udcff.txt"
