"""A sweep inside a task of another sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

import muster

TASK = """
import os
import muster

def run(x: int):
    muster.log(1, y=x)
    return {"seen": [os.environ.get(name, "") for name in
                     ("MUSTER_TASK_DIR", "MUSTER_CHECKPOINT_DIR", "MUSTER_METRICS")]}
"""


def test_the_tasks_of_the_inner_one_know_nothing_of_the_outer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    for name in ("MUSTER_TASK_DIR", "MUSTER_CHECKPOINT_DIR", "MUSTER_METRICS"):
        monkeypatch.setenv(name, str(tmp_path / "outer"))
    (tmp_path / "outer").mkdir()
    run = muster.sweep(
        f"{tmp_path}/task.py:run", grid={"x": [1]}, devices="cpu:1", run_dir=tmp_path / "it"
    )
    [row] = run.results().to_pylist()
    assert row["seen"] == ["", "", ""]
    assert not list((tmp_path / "outer").iterdir())
