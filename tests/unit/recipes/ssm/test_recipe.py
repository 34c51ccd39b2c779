"""The plan, the table and the picture of the recipe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from muster import UsageError
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.figure import draw
from muster_recipes.ssm.plan import count, forecast, plan
from muster_recipes.ssm.problem import Problem, problems
from muster_recipes.ssm.summary import summarise


def config(**changes: Any) -> SsmConfig:
    values: dict[str, Any] = {
        "num_seeds": 2,
        "student_dims": (8, 16),
        "gnc_num_samples": 250,
        "gnc_batch_size": 100,
        **changes,
    }
    return SsmConfig(**values)


def make_problem(chosen: SsmConfig, seed: int, rank: int) -> Problem:
    wanted = dataclasses.replace(chosen, seeds=(seed,), teacher_ranks=(rank,))
    [(_, _, problem)] = problems(wanted)
    return problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gd": False},
        {"gnc": False},
        {"teacher_ranks": (1, 2, 4), "seeds": (7, 3)},
        {"gnc_num_samples": 100},
        {"gnc_num_samples": 101},
    ],
)
def test_the_plan_has_as_many_tasks_as_it_says(changes: dict[str, Any]) -> None:
    tasks = list(plan(config(**changes)))
    assert len(tasks) == count(config(**changes))
    texts = {json.dumps([task.target, dict(task.params)], sort_keys=True) for task in tasks}
    assert len(texts) == len(tasks)


def test_blocks_add_up_to_the_budget() -> None:
    sizes: dict[tuple[int, int], int] = {}
    for task in plan(config()):
        if task.target == "gnc":
            cell = (task.params["seed"], task.params["dim"])
            sizes[cell] = sizes.get(cell, 0) + task.params["num_samples"]
    assert set(sizes.values()) == {250}


def test_more_seeds_and_widths_only_add_tasks() -> None:
    few = {json.dumps(dict(t.params)) for t in plan(config())}
    many = {json.dumps(dict(t.params)) for t in plan(config(num_seeds=5, student_dims=(8, 16, 32)))}
    assert few < many


def rows(chosen: SsmConfig, accepted: int = 10) -> list[dict[str, Any]]:
    found = []
    for task in plan(chosen):
        result: dict[str, Any] = {"train_loss": 0.1, "gen_loss": 0.2}
        if task.target == "gnc":
            result = {
                "num_accepted": accepted,
                "accepted_mean": 2.0 if accepted else None,
                "accepted_m2": 9.0 if accepted else None,
                "num_drawn": task.params["num_samples"],
                "drawn_mean": 1.5,
                "drawn_m2": 4.0,
                "students_per_s": 1e6,
            }
        about = {"state": "done", "seconds": 0.5, "device": "cpu:0"}
        found.append({**task.params, **result, **about})
    return found


def test_blocks_merge_into_one_row_per_cell() -> None:
    table = summarise(config(), rows(config()))
    assert len(table) == 2 * 2 * 2
    gnc = next(row for row in table if row["method"] == "gnc")
    assert gnc["num_accepted"] == 30
    assert gnc["num_samples"] == 250
    assert gnc["loss"] == pytest.approx(2.0)
    assert gnc["variance"] == pytest.approx(27.0 / 29)
    assert gnc["runtime_s"] == pytest.approx(1.5)
    assert gnc["is_complete"]


@pytest.mark.parametrize("state", ["failed", "waiting", "cancelled"])
def test_a_cell_with_a_missing_block_has_no_loss(state: str) -> None:
    all_rows = rows(config())
    broken = next(row for row in all_rows if row.get("block") == 1)
    for name in ("num_accepted", "accepted_mean", "accepted_m2", "num_drawn", "drawn_mean"):
        broken[name] = None
    broken["state"] = state
    table = summarise(config(), all_rows)
    row = next(r for r in table if not r["is_complete"])
    assert row["loss"] is None
    assert row["num_accepted"] is None
    assert (row["blocks_done"], row["blocks_expected"]) == (2, 3)
    assert sum(not r["is_complete"] for r in table) == 1


def test_a_failed_training_has_no_loss() -> None:
    all_rows = rows(config(gnc=False))
    all_rows[0].update(state="failed", train_loss=None, gen_loss=None)
    losses = [row["loss"] for row in summarise(config(gnc=False), all_rows)]
    assert losses.count(None) == 1
    assert 0 not in losses


def test_nothing_accepted_is_no_loss_with_a_count_of_0() -> None:
    table = summarise(config(gd=False), rows(config(gd=False), accepted=0))
    assert {row["loss"] for row in table} == {None}
    assert {row["num_accepted"] for row in table} == {0}


def test_the_picture_is_drawn_also_with_values_missing(tmp_path: Path) -> None:
    seeds = tuple(range(90))
    chosen = config(seeds=seeds, teacher_ranks=(1, 2))
    all_rows = rows(chosen)
    all_rows[0].update(state="failed", train_loss=None, gen_loss=None)
    paths = draw(chosen, summarise(chosen, all_rows), tmp_path)
    assert [path.name for path in paths] == ["ssm.png", "ssm.pdf"]
    assert all(path.stat().st_size > 5000 for path in paths)
    assert draw(chosen, [], tmp_path)


def test_a_seed_has_the_same_data_for_every_rank() -> None:
    one, two = (make_problem(config(), 3, rank) for rank in (1, 2))
    assert one.w == two.w
    assert len(two.alpha) == 2
    assert make_problem(config(), 3, 1) == one
    assert make_problem(config(), 4, 1).w != one.w


def test_a_data_file_is_read_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    pairs = [
        {"alpha": 0.5, "w_sequences": [[1, 0, 0, 0]]},
        {"alpha": [0.4], "w_sequences": [[0, 0, 0, 1]]},
    ]
    path.write_text(json.dumps(pairs))
    chosen = config(data_file=path)
    assert make_problem(chosen, 3, 1).alpha == (0.4,)
    assert make_problem(chosen, 2, 3).alpha == (0.5, 0.5, 0.5)
    with pytest.raises(UsageError, match=r"entry 1: alpha has 1 values|asks for rank"):
        path.write_text(json.dumps([pairs[0], {"alpha": [1, 2, 3], "w_sequences": [[1, 2, 3, 4]]}]))
        make_problem(chosen, 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "at least one entry"),
        ('[{"alpha": 1}]', "entry 0: write"),
        ('[{"alpha": "x", "w_sequences": [[1,2,3,4]]}]', "alpha must be a number"),
        ('[{"alpha": 1, "w_sequences": [[1,2,3]]}]', "each sequence needs 4 numbers"),
    ],
)
def test_a_damaged_data_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        make_problem(config(data_file=path), 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gnc": False, "gd": False}, "nothing to run"),
        ({"sequence_length": 1}, "--sequence-length 1 has no lag"),
        ({"student_dims": (8, 8)}, "--student-dims 8 8"),
        ({"student_dims": (0,)}, "--student-dims 0"),
        ({"teacher_ranks": ()}, "--teacher-ranks"),
        ({"eps_train": 0.0}, "--eps-train 0.0 must be above 0"),
        ({"seeds": (1, 1)}, "--seeds 1 1 names a seed twice"),
        ({"gnc_num_samples": 0}, "--gnc-num-samples 0 is too small"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**changes)


def test_hopeless_cells_are_foretold(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"alpha": 0.5, "w_sequences": [[0, 0, 0, 1]]}]')
    (sentence,) = forecast(config(data_file=path, student_dims=(150,)))
    assert "fewer than 10 of 250 guesses" in sentence
    assert forecast(config(input_e1=True, gnc_num_samples=10**9)) == []
