"""Dataclasses come back from JSON as they were; what does not fit is named with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.codec import MalformedError, decode, read_as, to_json, write_json
from muster.base.errors import SetupError


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Whole:
    count: int
    parts: tuple[Part, ...] = ()
    pair: tuple[int, str] | None = None
    by_name: dict[str, Part] = field(default_factory=dict)
    order: Sequence[int] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    mode: Literal["fast", "slow"] = "fast"
    is_on: bool = False
    either: int | Literal["auto"] = "auto"
    named: list[str] = field(default_factory=list)
    seed: int = None  # type: ignore[assignment]  # as users write it


numbers = st.integers(-(2**53), 2**53)
parts = st.builds(Part, name=st.text(), size=st.floats(allow_nan=False, allow_infinity=False))
wholes = st.builds(
    Whole,
    count=numbers,
    parts=st.lists(parts).map(tuple),
    pair=st.none() | st.tuples(numbers, st.text()),
    by_name=st.dictionaries(st.text(), parts),
    order=st.lists(numbers).map(tuple),
    spec=st.dictionaries(st.text(), st.none() | st.booleans() | st.lists(numbers)),
    path=st.none() | st.just(Path("/a/b")),
    mode=st.sampled_from(["fast", "slow"]),
    is_on=st.booleans(),
    either=st.just("auto") | numbers,
    named=st.lists(st.text()),
    seed=st.none() | numbers,
)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(wholes)
def test_a_dataclass_comes_back_as_it_was(whole: Whole) -> None:
    again = decode(Whole, json.loads(to_json(whole)))
    assert again == whole
    assert type(again.named) is list and type(again.order) is tuple


@given(json_values, st.sampled_from(list(Whole.__dataclass_fields__)))
def test_any_json_is_read_or_refused(value: Any, name: str) -> None:
    for record in (value, {"count": 1, name: value}, {"count": 1, "parts": [value]}):
        try:
            found = decode(Whole, record, ignore_unknown=True)
        except MalformedError:
            continue
        assert decode(Whole, json.loads(to_json(found))) == found or "nan" in repr(found)


def test_what_an_older_file_lacks_has_its_default() -> None:
    assert decode(Whole, {"count": 3}) == Whole(count=3)
    assert decode(Whole, {"count": 3, "seed": None}).seed is None


def test_what_a_newer_file_has_is_ignored_where_asked() -> None:
    record = {"count": 3, "colour": "red", "parts": [{"name": "a", "weight": 2}]}
    assert decode(Whole, record, ignore_unknown=True).parts == (Part(name="a"),)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "it is [], which is not an object"),
        ({}, "it lacks count"),
        ({"count": 1, "x": 2}, "it has the unknown key 'x' (known: count, parts, "),
        ({"count": True}, "count is true, which is not a whole number"),
        ({"count": 1.5}, "count is 1.5, which is not a whole number"),
        ({"count": None}, "count is null, which is not a whole number"),
        ({"count": 1, "is_on": 1}, "is_on is 1, which is not true or false"),
        ({"count": 1, "path": 3}, "path is 3, which is not a path or null"),
        ({"count": 1, "parts": {}}, "parts is {}, which is not a list"),
        ({"count": 1, "parts": [{"name": 3}]}, "parts[0].name is 3, which is not text"),
        ({"count": 1, "pair": [1]}, "pair must have 2 entries, not 1"),
        ({"count": 1, "by_name": {"a": {}}}, "by_name.a lacks name"),
        ({"count": 1, "mode": "odd"}, "mode is 'odd', not one of fast, slow"),
        ({"count": 1, "either": "x"}, "either is 'x', which is not a whole number or 'auto'"),
    ],
)
def test_a_refusal_names_the_place_and_the_value(record: Any, says: str) -> None:
    with pytest.raises(MalformedError) as caught:
        decode(Whole, record)
    assert says in str(caught.value)


def test_a_whole_number_with_a_point_is_one() -> None:
    assert type(decode(Whole, {"count": 8.0}).count) is int


def test_what_json_has_no_type_for_stays_as_it_is() -> None:
    assert decode(Colour, "red") == "red"  # type: ignore[comparison-overlap]


def test_a_file_is_read_as_its_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    write_json(path, Whole(count=3))
    assert read_as(Whole, path, "whole") == Whole(count=3)
    path.write_text('{"count": "three"}')
    with pytest.raises(SetupError, match=r"The whole at .* is damaged: count is 'three'"):
        read_as(Whole, path, "whole")


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Of what JSON has no type for."""

    colour: Colour = Colour.RED
    perhaps: Colour | None = None
    names: set[str] = field(default_factory=set)
    pairs: frozenset[tuple[int, int]] = frozenset()


def test_members_of_an_enum_and_sets_come_back() -> None:
    """A task with such a field could not be trained: "Mode is not JSON serializable"."""
    odd = Odd(perhaps=Colour.RED, names={"b", "a"}, pairs=frozenset({(1, 2)}))
    stored = json.loads(to_json(odd))
    assert stored == {"colour": "RED", "perhaps": "RED", "names": ["a", "b"], "pairs": [[1, 2]]}
    assert decode(Odd, stored) == odd
    with pytest.raises(MalformedError, match="it has values that a set cannot hold"):
        decode(set, [[1]])
