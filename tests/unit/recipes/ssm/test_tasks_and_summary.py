"""From tasks to the table: blocks merge exactly, and what is missing stays missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.one_block import sample_block

from muster_recipes.ssm import tasks
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import plan
from muster_recipes.ssm.problem import stream_seed
from muster_recipes.ssm.sampler import Moments
from muster_recipes.ssm.summary import summarise

CONFIG = SsmConfig(
    num_seeds=2,
    student_dims=(4, 8),
    gnc_num_samples=2_500,
    gnc_batch_size=1_000,
    eps_train=1e-2,
    gd_epochs=50,
)
CPU: Any = SimpleNamespace(device="cpu")


def carried_out(config: SsmConfig) -> Iterator[dict[str, Any]]:
    """Every task of a plan, run here, as the row that the farm would export."""
    torch.set_num_threads(1)
    for task in plan(config):
        params = dict(task.params)
        if task.target == "gnc":
            [metrics] = tasks.gnc_block([params], ctx=CPU)
        else:
            [metrics] = tasks.gd_cells([params], ctx=CPU)
        yield {**params, **metrics, "state": "done", "device": "cpu", "seconds": 0.5}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(carried_out(CONFIG))


def unfinished(row: dict[str, Any], state: str) -> dict[str, Any]:
    """The same task without a result, as exported."""
    names = {"seed", "rank", "dim", "block", "num_samples", "alpha", "w", "eps"} & set(row)
    return {**{n: row[n] for n in names}, "state": state, "device": None, "seconds": None}


def cell(table: list[dict[str, Any]], seed: int, dim: int, method: str) -> dict[str, Any]:
    [found] = [r for r in table if (r["seed"], r["dim"], r["method"]) == (seed, dim, method)]
    return found


def test_one_row_per_cell_and_method(rows: list[dict[str, Any]]) -> None:
    table = summarise(CONFIG, rows)
    assert len(table) == 2 * 2 * 2
    assert len({tuple(row) for row in table}) == 1, "all rows have the same columns"
    for row in table:
        assert row["is_complete"]
        assert row["loss"] > 0
        assert row["theory"] > 0


def test_blocks_merge_to_the_values_of_all_students(rows: list[dict[str, Any]]) -> None:
    found = cell(summarise(CONFIG, rows), seed=1, dim=8, method="gnc")
    [h_row] = [r for r in rows if (r["seed"], r["dim"], r.get("block")) == (1, 8, 0)]
    fits = Moments.none()
    h = [sum(a**m for a in h_row["alpha"]) for m in range(1, 5)]
    for block, size in enumerate((1_000, 1_000, 500)):
        stream = stream_seed("ssm-gnc", 1, 1, 8, block)
        part = sample_block(
            h=h, w=h_row["w"], dim=8, num_samples=size, seed=stream, eps=CONFIG.eps_train
        )
        fits = fits.merge(part.accepted)
    assert (found["num_samples"], found["num_accepted"]) == (2_500, fits.count)
    assert found["loss"] == pytest.approx(fits.mean, rel=1e-12)
    assert found["standard_error"] == pytest.approx(fits.standard_error, rel=1e-12)
    assert found["variance"] == pytest.approx(fits.variance, rel=1e-12)
    assert found["acceptance"] == fits.count / 2_500
    assert abs(found["prior_sampled"] - found["prior"]) < 0.5
    assert found["runtime_s"] == 1.5


def test_the_order_of_results_does_not_matter(rows: list[dict[str, Any]]) -> None:
    forwards, backwards = summarise(CONFIG, rows), summarise(CONFIG, rows[::-1])
    for one, other in zip(forwards, backwards, strict=True):
        # A mean of measured rates, in the order of arrival: equal to rounding only.
        assert one.pop("students_per_s") == pytest.approx(other.pop("students_per_s"))
        assert one == other


@pytest.mark.parametrize("state", ["failed", "waiting", "cancelled"])
def test_a_cell_with_a_missing_block_has_no_value(rows: list[dict[str, Any]], state: str) -> None:
    """Not 0, and not the average over the blocks that happen to be there."""
    lost = (0, 4, 1)
    partial = [
        unfinished(r, state) if (r["seed"], r["dim"], r.get("block")) == lost else r for r in rows
    ]
    table = summarise(CONFIG, partial)
    found = cell(table, seed=0, dim=4, method="gnc")
    for name in ("loss", "standard_error", "variance", "num_accepted", "acceptance"):
        assert found[name] is None, name
    assert not found["is_complete"]
    assert (found["blocks_done"], found["blocks_expected"]) == (2, 3)
    others = [r for r in table if r != found]
    assert others == [r for r in summarise(CONFIG, rows) if r in others]
    assert len(others) == 7


@pytest.mark.parametrize("state", ["failed", "waiting"])
def test_a_missing_student_is_not_a_perfect_one(rows: list[dict[str, Any]], state: str) -> None:
    partial = [unfinished(r, state) if r.get("block") is None else r for r in rows]
    for row in summarise(CONFIG, partial):
        if row["method"] == "gd":
            assert (row["loss"], row["train_loss"], row["is_complete"]) == (None, None, False)


def test_none_accepted_is_a_count_of_0_and_no_value() -> None:
    config = SsmConfig(
        num_seeds=1, student_dims=(4,), gnc_num_samples=100, eps_train=1e-300, gd=False
    )
    [row] = summarise(config, carried_out(config))
    assert row["is_complete"]
    assert (row["num_accepted"], row["acceptance"]) == (0, 0.0)
    assert (row["loss"], row["standard_error"], row["variance"]) == (None, None, None)
    assert row["prior_sampled"] is not None


def test_one_accepted_has_a_value_and_no_error() -> None:
    config = SsmConfig(num_seeds=1, student_dims=(4,), gnc_num_samples=10, gd=False)
    [row] = carried_out(config)
    row |= {"num_accepted": 1, "accepted_mean": 0.7, "accepted_m2": 0.0}
    [found] = summarise(config, [row])
    assert (found["loss"], found["standard_error"], found["variance"]) == (0.7, None, None)


def test_a_task_repeats_itself(rows: list[dict[str, Any]]) -> None:
    again = list(carried_out(CONFIG))
    for first, second in zip(rows, again, strict=True):
        for name in set(first) - {"students_per_s"}:
            assert first[name] == second[name], name


def test_a_batch_gives_each_cell_its_own_result(rows: list[dict[str, Any]]) -> None:
    cells = [dict(task.params) for task in plan(CONFIG) if task.target == "gd"]
    together = tasks.gd_cells(cells, ctx=CPU)
    alone = [r for r in rows if r.get("block") is None]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["gen_loss"] == pytest.approx(theirs["gen_loss"], rel=1e-9)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6, abs=1e-14)
    assert all(math.isfinite(result["gen_loss"]) for result in together)
