"""The table says what is there and never merges what does not belong together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import plan
from muster_recipes.ssm.problem import stream_seed
from muster_recipes.ssm.sampler import Moments
from muster_recipes.ssm.summary import summarise


def config(**changes: Any) -> SsmConfig:
    values = {"num_seeds": 1, "student_dims": (8,), "gnc_num_samples": 250, "gnc_batch_size": 100}
    return SsmConfig(**{**values, **changes})


def losses_of(params: dict[str, Any]) -> list[float]:
    """Made-up losses of a block, a function of what it computes."""
    start = stream_seed(params["block"], params["num_samples"], str(params["alpha"])) / 2**64
    return [start + i for i in range(5)]


def row_of(params: dict[str, Any], state: str = "done") -> dict[str, Any]:
    about = {"state": state, "seconds": 0.5, "device": "cpu:0", "error": None}
    if state != "done":
        return {**params, **about, "seconds": None}
    if "block" not in params:
        return {**params, **about, "train_loss": 0.1, "gen_loss": 0.2}
    accepted = Moments.of(losses_of(params))
    return {
        **params,
        **about,
        "num_accepted": accepted.count,
        "accepted_mean": accepted.mean,
        "accepted_m2": accepted.m2,
        "num_drawn": params["num_samples"],
        "drawn_mean": 1.5,
        "drawn_m2": 4.0,
        "students_per_s": 1e6 * (1 + params["block"]),
    }


def rows_of(chosen: SsmConfig) -> list[dict[str, Any]]:
    return [row_of(dict(task.params)) for task in plan(chosen)]


def test_blocks_in_any_order_give_the_moments_of_all_losses_and_the_same_bits() -> None:
    chosen = config(gd=False)
    rows = rows_of(chosen)
    (row,) = summarise(chosen, rows)
    every = Moments.of([loss for task in rows for loss in losses_of(task)])
    assert row["loss"] == pytest.approx(every.mean, rel=1e-13)
    assert row["standard_error"] == pytest.approx(every.standard_error, rel=1e-12)
    assert summarise(chosen, rows[::-1]) == [row]
    assert row["students_per_s"] == pytest.approx(250 / (100 / 1e6 + 100 / 2e6 + 50 / 3e6))


def test_a_cell_without_any_task_is_a_row_without_a_loss() -> None:
    table = summarise(config(num_seeds=2), [])
    assert [(row["seed"], row["method"]) for row in table] == [
        (0, "gd"), (0, "gnc"), (1, "gd"), (1, "gnc"),
    ]  # fmt: skip
    assert {row["loss"] for row in table} == {None}
    assert {row["num_accepted"] for row in table} == {None}
    assert {row["note"] for row in table} == {"0 of 1 tasks done", "0 of 3 tasks done"}
    assert all(row["theory"] > 0 for row in table)


def test_blocks_of_a_data_file_that_has_changed_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "data.json"

    def write(alpha: float) -> SsmConfig:
        path.write_text(json.dumps([{"alpha": alpha, "w_sequences": [[1, 0, 0, 0]]}]))
        return config(data_file=path, gd=False)

    before = rows_of(write(0.5))
    now = write(0.9)
    first, second, third = rows_of(now)
    (row,) = summarise(now, [*before, first, second, row_of(third, "waiting")])
    assert (row["blocks_done"], row["is_complete"], row["loss"]) == (2, False, None)
    assert summarise(now, [*before, first, second, third]) == summarise(now, rows_of(now))


def test_a_budget_that_grew_leaves_the_smaller_last_block_out() -> None:
    old, new = config(gd=False), config(gd=False, gnc_num_samples=400)
    rows = {json.dumps(row["num_samples"]) + str(row["block"]): row for row in rows_of(old)}
    rows |= {json.dumps(row["num_samples"]) + str(row["block"]): row for row in rows_of(new)}
    assert len(rows) == 5
    (row,) = summarise(new, rows.values())
    assert (row["num_samples"], row["blocks_done"], row["is_complete"]) == (400, 4, True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_training_that_diverged_has_no_loss_and_says_so(value: float) -> None:
    chosen = config(gnc=False)
    (row,) = rows_of(chosen)
    (found,) = summarise(chosen, [{**row, "gen_loss": value}])
    assert (found["loss"], found["train_loss"]) == (None, None)
    assert found["note"] == "diverged: the loss is not a finite number"
    json.dumps(found, allow_nan=False)


def test_the_reason_of_a_failure_is_in_the_table() -> None:
    chosen = config(gd=False)
    rows = rows_of(chosen)
    rows[1] = {**row_of(dict(list(plan(chosen))[1].params), "failed"), "error": "crashed: KILL"}
    (row,) = summarise(chosen, rows)
    assert row["note"] == "2 of 3 tasks done, 1 failed: crashed: KILL"
