"""Names as trackers take them: each has its own, and can be turned back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_texts import HOSTILE

from muster.api.trackers import to_mlflow, to_tensorboard, to_trackio, to_wandb
from muster.api.trackers.tracker import from_tracker, to_tracker

TIGHT = re.compile(r"[a-z0-9_/]")
MAPPINGS = [to_mlflow._name, to_tensorboard._tag, to_trackio._name, to_wandb._name]


@given(st.text(alphabet="-x2d0aé/.\ud800", max_size=10))
def test_a_name_comes_back(name: str) -> None:
    assert from_tracker(to_tracker(name, TIGHT)) == name


@given(st.text(alphabet="-x2de5", max_size=6), st.text(alphabet="-x2de5", max_size=6))
def test_two_names_stay_two(one: str, other: str) -> None:
    assert (to_tracker(one, TIGHT) == to_tracker(other, TIGHT)) == (one == other)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(
    "name",
    ["loss", "a/../b", "/x", "x/", "a//b", ".", "", "_step", "step", "timestamp", "é", "\ud800",
     "-x2d-", "a b", "train/loss", *HOSTILE],
)  # fmt: skip
def test_every_tracker_s_own_mapping_turns_back(mapping, name: str) -> None:
    mapped = mapping(name)
    mapped.encode()
    if len(mapped) < 250:
        assert from_tracker(mapped) == name


def test_usual_names_are_left_as_they_are() -> None:
    for name in ("loss", "train/loss", "val.acc", "top-5", "lr_0"):
        assert {mapping(name) for mapping in MAPPINGS} == {name}
