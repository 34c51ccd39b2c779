"""Curves of any length as few points: what is kept, and what is read again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_runs import made_sweep

from muster.api.trackers.metrics import RankLog
from muster.base.errors import UsageError
from muster.base.metric_log import mark_start
from muster.web.content import curves
from muster.web.content.curves import between, decimate
from muster.web.folder import Folder
from muster.web.query import Query

_VALUES = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    points=st.lists(st.tuples(st.integers(-(10**9), 10**9), _VALUES), max_size=300),
    px=st.integers(2, 40),
)
def test_a_drawn_curve_keeps_its_ends_and_extremes(
    points: list[tuple[int, float]], px: int
) -> None:
    x = np.array([step for step, _ in points], np.int64)
    y = np.array([value for _, value in points], float)

    drawn = decimate(x, y, px)

    assert len(drawn.x) == len(drawn.y) <= max(2 * px, 0)
    given_points = {(step, value if math.isfinite(value) else None) for step, value in points}
    assert set(zip(drawn.x, drawn.y, strict=True)) <= given_points
    assert drawn.x == sorted(drawn.x)
    finite = [value for _, value in points if math.isfinite(value)]
    shown = [value for value in drawn.y if value is not None]
    assert bool(finite) == bool(shown)
    if points:
        assert (drawn.x[0], drawn.x[-1]) == (x.min(), x.max())
        assert bool(len(finite) < len(points)) >= (None in drawn.y)
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_short_curve_is_drawn_as_it_is_and_a_spike_in_a_long_one_is_seen() -> None:
    x = np.arange(1_000_000)
    y = np.zeros(1_000_000)
    y[123_456], y[777_777] = 5.0, -3.0

    drawn = decimate(x, y, 600)

    assert len(drawn.x) <= 1200
    assert {(123_456, 5.0), (777_777, -3.0)} <= set(zip(drawn.x, drawn.y, strict=True))
    assert decimate(x[:10], y[:10], 600).x == list(range(10))


def test_points_without_a_time_are_left_out_of_a_curve_over_time() -> None:
    x = np.array([math.nan, 2.0, 1.0, math.nan])
    assert decimate(x, np.arange(4.0), 10) == ([1.0, 2.0], [2.0, 1.0])


def test_a_part_of_a_curve_has_a_neighbour_on_each_side() -> None:
    x = np.arange(10)
    assert x[between(x, 3, 5)].tolist() == [2, 3, 4, 5, 6]
    assert x[between(x, None, None)].tolist() == x.tolist()


def test_curves_of_tasks_are_decimated_and_say_how_many_points_they_have(tmp_path: Path) -> None:
    folder = Folder(made_sweep(tmp_path / "run", 20, num_curves=3).path)

    found = curves.content(folder, Query([("px", "50"), ("name", "score")]))

    assert found["names"] == ["loss", "score"]
    assert [one["name"] for one in found["series"]] == ["score"] * 3
    for one in found["series"]:
        assert len(one["x"]) == len(one["y"]) <= 100
        assert (one["x"][0], one["x"][-1], one["points"]) == (0, 1999, 2000)
    zoomed = curves.content(folder, Query([("task", "2"), ("from", "100"), ("to", "110")]))
    assert [one["x"] for one in zoomed["series"]] == [[*range(99, 112)]]
    with pytest.raises(UsageError, match="no task"):
        curves.content(folder, Query([("task", "nope")]))


def test_a_log_that_grows_is_read_on_and_one_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RankLog(path)
    assert log.curves() == {}

    def lines(*steps: int, value: float = 0.5) -> str:
        return "".join(
            json.dumps({"kind": "train", "step": step, "loss": value}) + "\n" for step in steps
        )

    path.write_text(lines(1, 2) + '{"kind": "train", "st')
    assert log.curves()["train/loss"].step.tolist() == [1, 2]
    path.write_text(lines(1, 2) + lines(3) + "not json\n[1]\n" + lines(4))
    assert log.curves()["train/loss"].step.tolist() == [1, 2, 3, 4]
    path.write_text(lines(1, 2) + lines(3, value=9.0))  # goes on from a checkpoint after step 2
    assert log.curves()["train/loss"].value.tolist() == [0.5, 0.5, 9.0]
    path.unlink()
    assert log.curves() == {}


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.one_of(st.integers(0, 8), st.just("again")), max_size=30),
    looks=st.sets(st.integers(0, 30)),
)
def test_a_log_that_is_looked_at_often_says_the_same_as_one_that_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | str], looks: set[int]
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.touch()
    often = RankLog(path)
    for number, step in enumerate(steps):
        if step == "again":
            mark_start(path)
        else:
            line = {"step": step, ("loss", "speed")[number % 2]: number}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if number in looks:
            often.curves()
    once = RankLog(path).curves()
    found = often.curves()
    assert [*found] == [*once]
    for name, curve in once.items():
        assert [c.tolist() for c in found[name][::2]] == [c.tolist() for c in curve[::2]]
        assert found[name].token.tolist() == curve.token.tolist()
