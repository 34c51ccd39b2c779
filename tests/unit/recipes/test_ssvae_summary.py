"""The table of a sweep from its runs: means, deviations, counts, and what is missing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.summary import summarise

CONFIG = SsvaeConfig(
    n_labels=(100, 20), alpha_values=(1.0, 50.0), corruption_rates=(0.0, 0.2), num_seeds=3
)


def _row(method: str = "ssvae", seed: int = 42, **changes: Any) -> dict[str, Any]:
    row = {
        "method": method,
        "n_labels": 100,
        "alpha": None if method == "supervised" else 50.0,
        "corruption_rate": 0.0,
        "seed": seed,
        "state": "done",
        "error": None,
        "accuracy": 0.9,
    }
    if method == "ssvae":
        row |= {"elbo_nats": -30.0, "calibration_error": 0.1, "style_leakage": 0.2}
    return row | changes


def _cell(
    table: list[dict[str, Any]], method: str = "ssvae", alpha: float | None = 50.0
) -> dict[str, Any]:
    (row,) = [
        row
        for row in table
        if (row["method"], row["n_labels"], row["alpha"], row["corruption_rate"])
        == (method, 100, alpha, 0.0)
    ]
    return row


def test_every_cell_asked_for_has_a_row_in_order_also_without_any_run() -> None:
    table = summarise(CONFIG, [])
    assert [
        (row["method"], row["alpha"], row["n_labels"], row["corruption_rate"]) for row in table
    ] == [
        (method, alpha, labels, rate)
        for method, alpha in (("ssvae", 1.0), ("ssvae", 50.0), ("supervised", None))
        for labels in (20, 100)
        for rate in (0.0, 0.2)
    ]
    for row in table:
        assert (row["n"], row["failed"], row["expected"], row["accuracy_gain_n"]) == (0, 0, 3, 0)
        assert row["accuracy_mean"] is row["accuracy_sd"] is row["elbo_nats_mean"] is None
        assert row["accuracy_gain_mean"] is row["note"] is None
    assert len({tuple(row) for row in table}) == 1  # every row has the same columns


def test_means_and_sample_deviations_over_the_seeds() -> None:
    rows = [_row(seed=42 + i, accuracy=value) for i, value in enumerate((0.8, 0.9, 0.95))]
    cell = _cell(summarise(CONFIG, reversed(rows)))
    assert cell["n"] == 3
    assert cell["accuracy_mean"] == pytest.approx(2.65 / 3)
    spread = sum((value - 2.65 / 3) ** 2 for value in (0.8, 0.9, 0.95)) / 2
    assert cell["accuracy_sd"] == pytest.approx(math.sqrt(spread))
    assert (cell["elbo_nats_mean"], cell["elbo_nats_sd"]) == (-30.0, 0.0)


def test_one_seed_has_a_mean_and_no_deviation() -> None:
    cell = _cell(summarise(CONFIG, [_row()]))
    assert (cell["accuracy_mean"], cell["accuracy_sd"]) == (0.9, None)


def test_the_gain_is_over_pairs_of_the_same_seed() -> None:
    rows = [
        _row(seed=42, accuracy=0.9),
        _row(seed=43, accuracy=0.8),
        _row(seed=44, accuracy=0.1),  # its baseline is missing
        _row("supervised", seed=42, accuracy=0.7),
        _row("supervised", seed=43, accuracy=0.7),
        _row("supervised", seed=44, state="failed", error="x", accuracy=None),
        _row("supervised", seed=44, accuracy=0.5, corruption_rate=0.2),
    ]
    table = summarise(CONFIG, rows)
    cell = _cell(table)
    assert cell["accuracy_gain_mean"] == pytest.approx(0.15)
    assert cell["accuracy_gain_sd"] == pytest.approx(0.1 / math.sqrt(2))
    assert cell["accuracy_gain_n"] == 2
    baseline = _cell(table, "supervised", None)
    assert baseline["accuracy_gain_mean"] is None
    assert baseline["accuracy_gain_n"] == 0
    assert (baseline["n"], baseline["failed"], baseline["elbo_nats_mean"]) == (2, 1, None)


def test_failed_runs_are_counted_and_say_why() -> None:
    rows = [
        _row(seed=42),
        _row(seed=43, state="failed", error="the objective is nan in epoch 2", accuracy=None),
        _row(seed=44, state="running", accuracy=None),
    ]
    cell = _cell(summarise(CONFIG, rows))
    assert (cell["n"], cell["failed"], cell["expected"]) == (1, 1, 3)
    assert cell["note"] == "1 failed: the objective is nan in epoch 2"
    assert cell["accuracy_mean"] == 0.9


def test_a_metric_that_some_runs_lack_is_said() -> None:
    rows = [_row(seed=42), _row(seed=43, elbo_nats=None), _row(seed=44, elbo_nats=math.nan)]
    cell = _cell(summarise(CONFIG, rows))
    assert (cell["elbo_nats_mean"], cell["elbo_nats_sd"]) == (-30.0, None)
    assert cell["note"] == "elbo_nats over 1 of 3: not a finite number"


def test_a_metric_that_all_runs_lack_is_said_and_what_a_baseline_has_not_is_none() -> None:
    rows = [_row(style_leakage=None), _row("supervised", calibration_error=0.1)]
    table = summarise(CONFIG, rows)
    assert _cell(table)["note"] == "style_leakage over 0 of 1: the probe did not converge"
    assert _cell(table, "supervised", None)["note"] is None


def test_runs_of_earlier_commands_are_part_of_the_table() -> None:
    rows = [
        _row(seed=42),
        _row(seed=41, accuracy=0.7),
        _row(n_labels=50, seed=41),
        _row(n_labels=50, seed=43, state="failed", error="x", accuracy=None),
        _row(alpha=7.0),
        _row("supervised", corruption_rate=0.5),
    ]
    table = summarise(CONFIG, rows)
    places = [(r["method"], r["alpha"] or 0, r["n_labels"], r["corruption_rate"]) for r in table]
    assert len(places) == 12 + 3 and places == sorted(places)
    counts = {place: (r["n"], r["expected"]) for place, r in zip(places, table, strict=True)}
    assert counts["ssvae", 50.0, 100, 0.0] == (2, 4)  # 42 to 44 are asked for, 41 is there
    assert counts["ssvae", 50.0, 50, 0.0] == (1, 2)  # asked for by an earlier command alone
    assert counts["ssvae", 7.0, 100, 0.0] == counts["supervised", 0, 100, 0.5] == (1, 1)
    assert counts["ssvae", 1.0, 20, 0.0] == (0, 3)
    assert _cell(table)["accuracy_mean"] == pytest.approx(0.8)


def test_seed_offsets_one_after_the_other_are_seeds_of_one_cell() -> None:
    second = SsvaeConfig(num_seeds=1, seed_offset=1)
    cell = _cell(summarise(second, [_row(seed=42), _row(seed=43, accuracy=0.8)]))
    assert (cell["n"], cell["expected"], cell["accuracy_mean"]) == (2, 2, pytest.approx(0.85))


def test_without_a_baseline_there_are_no_rows_of_it() -> None:
    alone = SsvaeConfig(supervised=False, num_seeds=1)
    table = summarise(alone, [_row()])
    assert {row["method"] for row in table} == {"ssvae"}
    assert all(row["accuracy_gain_mean"] is None for row in table)


def test_factor_scores_have_columns_only_where_they_were_measured() -> None:
    assert "beta_vae_score_mean" not in _cell(summarise(CONFIG, [_row()]))
    cell = _cell(summarise(CONFIG, [_row(beta_vae_score=0.5)]))
    assert (cell["beta_vae_score_mean"], cell["factor_vae_score_mean"]) == (0.5, None)
