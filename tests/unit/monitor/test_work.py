"""Whose a process is, from real processes that write into logs as workers and ranks do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from muster.monitor.sample import Work, WorkFinder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

#: A worker whose task is a command with its output elsewhere, as a data loader has it.
PROGRAM = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                         stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
sys.stderr.write(f"{child.pid}\\n")
sys.stderr.flush()
sys.stdin.read()
child.stdin.close()
child.wait()
"""


def start(folder: Path, log: str) -> tuple[subprocess.Popen[str], int]:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    with (folder / "logs" / log).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.stderr is not None
    return process, int(process.stderr.readline())


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stderr is not None
    process.stdin.close()
    process.wait()
    process.stderr.close()


def test_a_worker_and_its_descendants_belong_to_a_run_and_its_task(tmp_path: Path) -> None:
    folder = tmp_path / "my-sweep"
    process, child = start(folder, "worker-0.log")
    try:
        picture = {"workers": [{"pid": process.pid, "task": "3fa0b1"}]}
        (folder / "status.json").write_text(json.dumps(picture))
        finder = WorkFinder()
        assert finder.find([process.pid, child, 1]) == {
            process.pid: Work("my-sweep", "3fa0b1"),
            child: Work("my-sweep", "3fa0b1"),
        }
        picture["workers"][0]["task"] = "77c2"  # the next task, the same process
        (folder / "status.json").write_text(json.dumps(picture))
        assert finder.find([child]) == {child: Work("my-sweep", "77c2")}
        (folder / "status.json").write_text("torn")
        assert finder.find([child]) == {child: Work("my-sweep", "")}
    finally:
        end(process)
    assert finder.find([process.pid, child]) == {}


def test_a_rank_of_a_gang(tmp_path: Path) -> None:
    process, child = start(tmp_path / "digits", "rank-3.log")
    try:
        found = WorkFinder().find([process.pid, child])
        assert found == dict.fromkeys([process.pid, child], Work("digits", "rank 3"))
        assert found[child].label == "digits/rank 3"
    finally:
        end(process)


def test_a_log_of_the_same_name_elsewhere_is_no_run(tmp_path: Path) -> None:
    process, child = start(tmp_path / "other", "worker-0.log")
    try:
        (tmp_path / "other" / "run.json").unlink()
        assert WorkFinder().find([process.pid, child]) == {}
    finally:
        end(process)


def recorded(proc: Path, pid: int, *, started: int, output: str) -> None:
    fields = ["S", "1", *["0"] * 17, str(started), *["0"] * 30]
    (proc / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) with (parts) {' '.join(fields)}\n")
    (proc / "stat").write_text("btime 0\n")
    link = proc / str(pid) / "fd" / "1"
    link.unlink(missing_ok=True)
    link.symlink_to(output)


def test_a_number_that_is_used_again_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/run.json").write_text("{}")
    recorded(tmp_path / "proc", 7, started=100, output=f"{tmp_path}/digits/logs/rank-0.log")
    finder = WorkFinder(tmp_path / "proc")
    assert finder.find([7]) == {7: Work("digits", "rank 0")}
    recorded(tmp_path / "proc", 7, started=900, output="/dev/null")
    assert finder.find([7]) == {}
