"""A training inside a function of a sweep: its numbers are those of the task."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.programs import read_program

import muster

FIT = """
import line_task
import muster

def fit(lr: float, devices: str, ctx):
    done = muster.fit(
        line_task.Line, epochs=2, batch_size=8, lr=lr, devices=devices, tensorboard=False,
        run_dir=ctx.folder / "training", say=lambda text: None,
    )
    ctx.log(1, mine=lr)
    return {"loss": done.results["metrics"]["val"]["loss"]}
"""


def test_what_a_training_logs_is_logged_by_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slope_helper.py").write_text("SLOPE = 2.0\n")
    (tmp_path / "line_task.py").write_text(read_program("line_task.py"))
    (tmp_path / "work.py").write_text(FIT)
    run = muster.sweep(
        "work.py:fit", grid={"lr": [0.1], "devices": ["cpu", "cpu:2"]}, devices="cpu:1",
        monitor_interval_s=0, run_dir="runs/it",
    )  # fmt: skip
    rows = run.results().to_pylist()
    assert [row["state"] for row in rows] == ["done", "done"], rows
    for row in rows:
        curves = {one.name: one.curve for one in run.series() if one.task == row["task"]}
        count = {"cpu": 8, "cpu:2": 4}[row["devices"]]  # the batch is that of a rank
        assert list(curves["train/loss"].step) == list(range(1, 1 + count)), "none is there twice"
        assert curves["evaluation/loss"].value[-1] == pytest.approx(row["loss"])
        assert list(curves["mine"].value) == [0.1]
