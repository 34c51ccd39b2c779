"""The picture of awkward tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib.figure import Figure

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.figure import _finish, _lines, _medians, _title, points_of
from muster_recipes.ssm.summary import summarise


def test_values_within_a_decade_have_numbers_on_the_axis() -> None:
    axis = Figure().subplots()
    axis.plot([4, 8], [2.0, 6.0])
    _finish(axis, [4, 8], "")
    axis.figure.canvas.draw()
    labels = [text.get_text() for text in axis.get_yticklabels(which="both")]
    assert sum(map(bool, labels)) >= 2


def test_cells_without_a_loss_are_counted_in_the_title() -> None:
    chosen = SsmConfig(num_seeds=3, student_dims=(8,))
    table = [{**row, "loss": 1.0} for row in summarise(chosen, [])]
    assert "without" not in _title(table)
    table[0]["loss"] = None
    assert "cells without a loss, left out: 1 of 6" in _title(table)


def _table(losses: dict[tuple[int, int], tuple[float | None, int]]) -> list[dict[str, Any]]:
    """Rows of Guess & Check: (seed, width) -> (loss, accepted guesses)."""
    return [
        {
            "seed": seed, "rank": 1, "dim": dim, "method": "gnc", "loss": loss,
            "num_accepted": accepted, "theory": 1.0, "prior": 2.0,
        }
        for (seed, dim), (loss, accepted) in losses.items()
    ]  # fmt: skip


def test_a_median_of_some_seeds_or_of_few_guesses_is_weak_and_says_its_number() -> None:
    """One guess of one seed, which is where this picture once misled."""
    table = _table(
        {
            (0, 8): (0.5, 900), (1, 8): (0.6, 800), (2, 8): (0.7, 700),
            (0, 16): (0.5, 900), (1, 16): (0.6, 9), (2, 16): (0.7, 50),
            (0, 32): (None, 0), (1, 32): (0.001, 1), (2, 32): (None, 0),
            (0, 64): (None, 0), (1, 64): (None, 0), (2, 64): (None, 0),
        }
    )  # fmt: skip
    found = points_of(table, "gnc")
    assert [(p.dim, len(p.values), p.is_weak) for p in found] == [
        (8, 3, False),
        (16, 3, True),
        (32, 1, True),
        (64, 0, True),
    ]
    assert [p.is_weak for p in points_of(table, "theory")] == [False] * 4
    axis = Figure().subplots()
    _medians(axis, table)
    assert [text.get_text() for text in axis.texts] == ["3/3", "1/3"]
    assert "hollow" in _title(table)


def test_lines_break_where_a_width_has_no_value() -> None:
    table = _table({(0, 8): (0.5, 99), (0, 16): (None, 0), (0, 32): (0.6, 99)})
    for draw_on in (_medians, _lines):
        axis = Figure().subplots()
        draw_on(axis, table)
        line = next(line for line in axis.lines if line.get_color() == "#0072B2")
        y = [float(value) for value in line.get_ydata()]
        assert len(y) == 3
        assert math.isnan(y[1])
    assert "hollow" not in _title(_table({(0, 8): (0.5, 99)}))


def test_a_single_width_stands_in_the_middle() -> None:
    axis = Figure().subplots()
    axis.plot([31, 33], [1.0, 2.0])
    _finish(axis, [32], "")
    low, high = axis.get_xlim()
    assert low * high == pytest.approx(32.0**2)
