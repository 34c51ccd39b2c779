from __future__ import annotations

import random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.farm.identity import (
    PlanHash,
    key_text,
    name_with_hash,
    payload_and_key,
    plan_hash,
    task_key,
)

keys = st.lists(st.binary(min_size=16, max_size=16), max_size=20)


def test_the_key_is_pinned() -> None:
    """Changing it would orphan every result in every existing run folder."""
    key = task_key("train.py:train", {"lr": 0.001, "seed": 3})
    assert key.hex() == "1f2f71f2392e589b61c3fdb2be988428"
    assert key_text(key) == key.hex()[:12]


def test_the_key_ignores_the_order_and_the_type_of_the_mapping() -> None:
    key = task_key("a:f", {"x": 1, "y": 2})
    assert key == task_key("a:f", {"y": 2, "x": 1})
    assert key == task_key("a:f", MappingProxyType({"x": 1, "y": 2}))


def test_the_key_depends_on_everything_else() -> None:
    tasks: list[tuple[str, dict[str, object]]] = [
        ("a:f", {}),
        ("a:g", {}),
        ("a:f", {"x": 1}),
        ("a:f", {"x": 1.0}),
        ("a:f", {"x": True}),
        ("a:f", {"x": "1"}),
        ("a:f", {"x": None}),
        ("a:f", {"x": float("nan")}),
        ("a:f", {"x": 1, "seed": 0}),
    ]
    assert len({task_key(*task) for task in tasks}) == len(tasks)


@given(
    st.text(),
    st.dictionaries(st.text(), st.none() | st.integers() | st.floats() | st.text()),
)
def test_the_fast_way_gives_the_same_key(target: str, params: dict[str, object]) -> None:
    _, key = payload_and_key(target)(params)
    assert key == task_key(target, params)


@given(keys, st.randoms())
def test_a_plan_is_the_same_in_any_order(some: list[bytes], shuffler: random.Random) -> None:
    shuffled = some.copy()
    shuffler.shuffle(shuffled)
    assert plan_hash(some) == plan_hash(shuffled)


def test_a_plan_can_grow() -> None:
    plan = PlanHash()
    plan.update([b"a" * 16])
    first = plan.hexdigest()
    plan.add(b"\xff" * 16)
    assert plan.count == 2
    assert first == plan_hash([b"a" * 16])
    assert plan.hexdigest() == plan_hash([b"\xff" * 16, b"a" * 16])


def test_different_plans_differ() -> None:
    zero, one = bytes(16), bytes(15) + b"\x01"
    plans = [[], [zero], [zero, zero], [one], [one, one], [zero, one]]
    assert len({plan_hash(plan) for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("ssm", "ssm-abcdef"),
        ("path/to/train.py:main", "path-to-train.py-main-abcdef"),
        ("../..", "run-abcdef"),
        ("", "run-abcdef"),
        ("a b\nc", "a-b-c-abcdef"),
        (".hidden", "hidden-abcdef"),
        ("größe", "gr-e-abcdef"),
        ("x" * 300, "x" * 80 + "-abcdef"),
    ],
)
def test_folder_names_are_safe(name: str, folder: str) -> None:
    assert name_with_hash(name, "abcdef0123") == folder
