"""The picture of awkward tables."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.figure import _dress, _title
from muster_recipes.ssm.summary import summarise


def test_values_within_a_decade_have_numbers_on_the_axis() -> None:
    axis = Figure().subplots()
    axis.plot([4, 8], [2.0, 6.0])
    _dress(axis, [4, 8])
    axis.figure.canvas.draw()
    labels = [text.get_text() for text in axis.get_yticklabels(which="both")]
    assert sum(map(bool, labels)) >= 2


def test_cells_without_a_loss_are_counted_in_the_title() -> None:
    chosen = SsmConfig(num_seeds=3, student_dims=(8,))
    table = [{**row, "loss": 1.0} for row in summarise(chosen, [])]
    assert "without" not in _title(table)
    table[0]["loss"] = None
    assert _title(table).endswith("cells without a loss, left out: 1 of 6")


def test_a_single_width_stands_in_the_middle() -> None:
    axis = Figure().subplots()
    axis.plot([31, 33], [1.0, 2.0])
    _dress(axis, [32])
    low, high = axis.get_xlim()
    assert low * high == pytest.approx(32.0**2)
