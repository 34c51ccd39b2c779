from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.base.errors import SetupError
from muster.plan.compare import MeasuredRun, compare, compare_run, store_plan, write_comparison
from muster.plan.units import Seconds
from muster.run.folder import RunFolder


def row(num_devices: int, step_s: float) -> dict[str, Any]:
    figure = {"value": step_s, "unit": "s", "origin": "measured"}
    return {
        "num_devices": num_devices,
        "step": figure,
        "samples_per_s": {"value": 64 / step_s, "origin": "measured"},
        "exposed": {"value": 0.001, "unit": "s", "origin": "assumed"},
        "loading": {"value": 0.0, "unit": "s", "origin": "measured"},
        "wall": {"value": step_s * 100, "unit": "s", "origin": "given"},
    }


PLAN = {
    "global_batch": 64,
    "strategy": "ddp",
    "num_steps": 100,
    "predictions": [row(1, 0.020), row(2, 0.012)],
}


def run(**changes: Any) -> MeasuredRun:
    values: dict[str, Any] = {
        "num_ranks": 2, "global_batch": 64, "strategy": "ddp", "num_steps": 100,
        "step": Seconds(0.010), "mean_step": Seconds(0.0125), "wall": Seconds(1.25),
        "loading_share": 0.1, "communication_share": 0.2,
    }  # fmt: skip
    return MeasuredRun(**{**values, **changes})


def test_errors_are_relative_to_what_was_measured() -> None:
    found = compare(PLAN, run())
    assert found is not None
    errors = {line.name: line.error for line in found.lines}
    assert errors["step (median)"] == pytest.approx(0.2)  # 12 against 10 ms
    assert errors["step (mean)"] == pytest.approx(-0.04)  # 12 against 12.5 ms
    assert errors["samples per s"] == pytest.approx(10 / 12 - 1)
    assert errors["exposed communication"] == pytest.approx(1 / 2.5 - 1)  # 1 ms against 20 %
    assert errors["all steps"] == pytest.approx(1.2 / 1.25 - 1)
    assert found.notes == ()


def test_what_was_not_planned_is_said() -> None:
    found = compare(PLAN, run(global_batch=32, strategy="fsdp", num_steps=7))
    assert found is not None
    assert found.notes == (
        "planned with a global batch of 64, run with 32",
        "planned with ddp, run with fsdp",
        "planned for 100 steps, run for 7",
    )
    assert compare(PLAN, run(num_ranks=3)) is None


def finished(folder: RunFolder) -> None:
    folder.create()
    results = {
        "num_ranks": 2, "global_batch": 64, "strategy": "ddp", "steps": 5,
        "measured": {"data_wait_share": 0.0, "communication_share": 0.5},
    }  # fmt: skip
    folder.training_results.write_text(json.dumps(results))
    lines = [{"kind": "train", "step": n, "seconds": 0.01 * n} for n in range(1, 6)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    folder.metrics.write_text(text + '{"kind": "evaluation", "seconds": 9}\n{"kind": "train", "st')


def test_a_stored_plan_meets_its_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    store_plan(folder, PLAN)
    with pytest.raises(SetupError, match="has not finished"):
        compare_run(folder)
    assert write_comparison(folder) is None
    finished(folder)
    found = compare_run(folder)
    measured = {line.name: line.measured for line in found.lines}
    # The first three steps warm up: 0.04 and 0.05 count; a torn line does not.
    assert measured["step (median)"] == pytest.approx(0.045)
    assert measured["all steps"] == pytest.approx(0.15)
    assert json.loads((folder.path / "plan_error.json").read_text()) == found.record()


@pytest.mark.parametrize("text", ["{", "[]", '{"predictions": []}', '{"predictions": [{}]}'])
def test_a_damaged_plan_never_spoils_a_finished_training(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one")
    finished(folder)
    (folder.path / "plan.json").write_text(text)
    assert write_comparison(folder) is None
    with pytest.raises(SetupError, match="cannot be compared"):
        compare_run(folder)
