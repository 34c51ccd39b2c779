"""Tasks of a file may start processes that look the file's functions up by name."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import muster
from muster.base.target import load_target

PROGRAM = Path(__file__).parents[1] / "programs" / "spawning_tasks.py"


def test_another_process_finds_the_module_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "my-task.v2.py").write_text("class C:\n    x = 3\ndef f():\n    return C()\n")
    before = list(sys.path)
    try:
        data = pickle.dumps(load_target(f"{tmp_path}/my-task.v2.py:f")())
    finally:
        sys.path[:] = before
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).x)"
    places = os.pathsep.join([*filter(None, before), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=data,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert done.stdout == b"3\n"


@pytest.mark.parametrize(
    ("function", "way"),
    [
        ("executor", "spawn"),
        pytest.param("pool", "spawn", marks=pytest.mark.thorough),
        pytest.param("pool", "forkserver", marks=pytest.mark.thorough),
        pytest.param("pool", "fork", marks=pytest.mark.thorough),
        pytest.param("loader", "spawn", marks=pytest.mark.thorough),
        pytest.param("loader", "forkserver", marks=pytest.mark.thorough),
    ],
)
def test_a_task_may_spawn(function: str, way: str, tmp_path: Path) -> None:
    run = muster.sweep(
        f"{PROGRAM}:{function}",
        grid={"way": [way]},
        devices="cpu:1",
        run_dir=tmp_path / "run",
        timeout_s=300,  # without the module, Python's own pool starts children for ever
        retries=0,
        monitor_interval_s=0,
    )
    [row] = run.results().to_pylist()
    assert (row["state"], row["sum"]) == ("done", 14), row["error"]
