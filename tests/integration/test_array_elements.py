"""Elements of an array of one's own, which run at the same time with one command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from muster.api.runs import Run

TARGET = """
import time

def slow(seed: int):
    time.sleep(1.0)
    return {"seed_again": seed}
"""


def test_each_element_has_a_run_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    words = ["muster", "sweep", "target.py:slow", "--seeds", "1", "--devices", "cpu:1", "--quiet"]
    started = []
    for element in ("0", "1"):
        variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": element}
        started.append(
            psutil.Popen(
                [sys.executable, "-m", *words, "--seed-offset", element],
                cwd=tmp_path,
                env={**os.environ, **variables},
            )
        )
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    found = {}
    for path in (tmp_path / "runs").iterdir():
        found[path.name.rpartition("-")[2]] = Run(path).results()["seed"].to_pylist()
    assert found == {"0": [0], "1": [1]}
