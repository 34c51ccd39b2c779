"""What a command finds in its environment, and what its row says about it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import muster

PROGRAM = """
import json, os, sys
found = {n: v for n, v in os.environ.items() if n.startswith("MUSTER_")}
place = os.environ["MUSTER_TASK_DIR"]
if "write" in sys.argv:
    with open(os.path.join(place, "result.json"), "w") as file:
        json.dump({"seed": found["MUSTER_SEED"], "params": found["MUSTER_PARAMS"],
                   "score": {"train": 0.5}, "task": found["MUSTER_TASK"]}, file)
"""

#: Both children have their memory at once, and for longer than it takes to look at them twice.
HUNGRY = """
import subprocess, sys, time
from subprocess import PIPE
if len(sys.argv) > 1:
    block = bytearray(200 << 20)
    block[::4096] = b"a" * len(block[::4096])
    print("has it", flush=True)
    sys.stdin.read()
else:
    words = [sys.executable, __file__, "child"]
    children = [subprocess.Popen(words, stdin=PIPE, stdout=PIPE) for _ in range(2)]
    for child in children:
        assert child.stdout.readline()
    time.sleep(1.5)
    for child in children:
        child.communicate()
    sys.exit(sum(child.returncode for child in children))
"""

OOM = """
import sys
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", file=sys.stderr)
sys.exit(1)
"""


def run(tmp_path: Path, program: str, *words: str, **options: object) -> muster.Run:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), *words]
    options = {"devices": "cpu:1", "monitor_interval_s": 0, "keep_going": True, **options}
    return muster.sweep(command, run_dir=tmp_path / "run", **options)


def test_a_command_learns_its_task_from_the_environment(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM, "write", "{lr}", "{seed}", grid={"lr": ["1e-3"]}, seeds=2)
    rows = done.results().to_pylist()
    assert [row["metric_seed"] for row in rows] == ["0", "1"]
    assert json.loads(rows[1]["params"]) == {"lr": "1e-3", "seed": 1}
    assert [row["score.train"] for row in rows] == [0.5, 0.5]
    assert [row["metric_task"] for row in rows] == [row["task"] for row in rows]
    assert all((done.path / row["folder"] / "result.json").exists() for row in rows)


def test_a_command_that_writes_nothing_leaves_no_folder(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM, "{x}", grid={"x": ["1", "2"]})
    assert [row["folder"] for row in done.results().to_pylist()] == [None, None]
    assert not [*done.folder.attempts.glob("*"), *done.folder.artifacts.glob("*")]


@pytest.mark.thorough
def test_memory_of_a_command_is_that_of_its_whole_tree(tmp_path: Path) -> None:
    [row] = run(tmp_path, HUNGRY).results().to_pylist()
    assert row["state"] == "done"
    assert 400 < row["peak_mib"] < 800


def test_memory_of_a_function_is_that_of_its_task(tmp_path: Path) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel does not forget a peak")
    (tmp_path / "t.py").write_text(
        "def f(mib: int):\n    b = bytearray(mib << 20)\n    b[::4096] = b'a' * len(b[::4096])\n"
    )
    done = muster.sweep(
        f"{tmp_path / 't.py'}:f",
        grid={"mib": [300, 1]},
        devices="cpu:1",
        run_dir=tmp_path / "run",
        monitor_interval_s=0,
    )
    large, small = (row["peak_mib"] for row in done.results().to_pylist())
    assert large > 300
    assert small < 200


def test_a_command_without_gpu_memory_is_known_as_that(tmp_path: Path) -> None:
    done = run(tmp_path, OOM, retries=0)
    [group] = done.failures()
    assert group.outcome == "device_oom"
    assert "CUDA out of memory" in group.message
