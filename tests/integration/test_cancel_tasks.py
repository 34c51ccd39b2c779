"""Single tasks that are cancelled: they wait, run, are paused or done, and the run is at work or
not, or is killed; and what a resume and a retry do with them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.json_schemas import check_printed
from tests.processes import Commands

from muster.api.runs import Run
from muster.farm.task import TaskState

Main = Callable[..., subprocess.CompletedProcess[str]]

SOURCE = """
import pathlib, subprocess, sys, time

def held(x: int):
    here = pathlib.Path(__file__).parent
    with (here / "began.txt").open("a") as file:
        print(x, file=file)
    while x > 1 and not (here / "go").exists():
        time.sleep(0.01)
    return {"y": x}

def trial(x: int, ctx):
    state = ctx.restore() or {"step": 0}
    while x > 1 and not (pathlib.Path(__file__).parent / "go").exists():
        time.sleep(0.01)
    for step in range(state["step"], 9):
        ctx.log(step + 1, score=-x)
        ctx.checkpoint({"step": step + 1})
        time.sleep(0.01)
    return {"score": -x}
"""
#: Its descendants are as deaf to SIGTERM as it is.
DEAF = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("began.txt").open("a").write(sys.argv[1] + "\\n")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
while sys.argv[1] == "2":
    time.sleep(0.05)
"""


class Place(Commands):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        (path / "t.py").write_text(SOURCE)
        (path / "deaf.py").write_text(DEAF)

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        return super().begin(*words, "--quiet")

    def sweep(self, *words: str) -> subprocess.Popen[bytes]:
        flags = ("--devices", "cpu:1", "--monitor-interval", "0", "--run-dir", "r")
        return self.begin("sweep", *flags, *words)

    @property
    def began(self) -> list[str]:
        path = self.path / "began.txt"
        return path.read_text().split() if path.exists() else []

    def states(self) -> list[str]:
        rows = Run(self.path / "r").results().to_pylist()
        return [row["state"] for row in rows]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def test_tasks_of_a_run_at_work(place: Place, muster_main: Main) -> None:
    process = place.sweep("t.py:held", "--grid", "x=1,2,3,4")
    place.until(lambda: len(place.began) == 2)
    said = muster_main("cancel", "r", "--task", "1", "2", "4")
    assert said.returncode == 0
    assert "task 1: nothing to cancel, it is done already" in said.stdout
    assert "task 2: told to end" in said.stdout
    assert "task 4: cancelled" in said.stdout or "task 4: told" in said.stdout, "handed out ahead"
    assert "muster retry r --cancelled" in said.stdout
    place.until(lambda: place.began == ["1", "2", "3"])
    (place.path / "go").touch()
    assert process.wait(300) == 1, "it is not complete"
    assert place.states() == ["done", "cancelled", "done", "cancelled"]
    assert place.began == ["1", "2", "3"]
    [row] = [row for row in Run(place.path / "r").results().to_pylist() if row["x"] == 2]
    assert row["y"] is None
    assert place.begin("resume", "r").wait(300) == 1
    assert place.begin("retry", "r", "--cancelled").wait(300) == 0
    assert place.states() == ["done"] * 4
    assert place.began == ["1", "2", "3", "2", "4"]


@pytest.mark.slow  # for ten seconds nothing happens; the scheduler's part is a table of its own
def test_a_program_that_does_not_hear_goes_with_all_it_started(
    place: Place, muster_main: Main
) -> None:
    words = ("--grid", "x=2,3", "--", sys.executable, "deaf.py", "{x}")
    process = place.sweep(*words)
    place.until((place.path / "child").exists)
    place.until(lambda: (place.path / "child").read_text())
    child = int((place.path / "child").read_text())
    muster_main("cancel", "r", "--task", "1")
    assert process.wait(300) == 1
    assert place.states() == ["cancelled", "done"]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.slow  # its grace is ten seconds long
def test_what_was_asked_outlives_the_coordinator(place: Place, muster_main: Main) -> None:
    """It is killed after it has said that the task is told to end, and before that has ended."""
    process = place.sweep("--grid", "x=2,3", "--", sys.executable, "deaf.py", "{x}")
    place.until((place.path / "child").exists)
    assert "told to end" in muster_main("cancel", "r", "--task", "1").stdout
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert place.begin("resume", "r").wait(300) == 1
    assert place.states() == ["cancelled", "done"]
    assert place.began == ["2", "3"]


@pytest.mark.slow  # its reduced version is the next
def test_tasks_of_a_run_that_is_stopped(place: Place, muster_main: Main) -> None:
    process = place.sweep("t.py:held", "--grid", "x=1,2,3,4")
    place.until(lambda: len(place.began) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = muster_main("cancel", "r", "--task", "1", "2", "4", "--json")
    said = check_printed("cancel", done.stdout)
    assert said["tasks"] == {"1": "was done", "2": "cancelled", "4": "cancelled"}
    assert Run(place.path / "r").counts()[TaskState.CANCELLED] == 2
    (place.path / "go").touch()
    assert place.begin("resume", "r").wait(300) == 1
    assert place.states() == ["done", "cancelled", "done", "cancelled"]
    assert place.began == ["1", "2", "3"]


@pytest.mark.quick
def test_one_that_waits_in_a_stopped_run(place: Place, muster_main: Main) -> None:
    (place.path / "go").touch()
    flags = ("--quiet", "--devices", "cpu:1", "--monitor-interval", "0", "--on", "inline")
    muster_main("sweep", *flags, "--run-dir", "r", "t.py:held", "--grid", "x=1,2")
    with closing(sqlite3.connect(place.path / "r" / "ledger.sqlite")) as database, database:
        database.execute("UPDATE tasks SET state = 1 WHERE task_id = 2")
        database.execute("DELETE FROM results WHERE task_id = 2")
    assert "task 2: cancelled" in muster_main("cancel", "r", "--task", "2").stdout
    assert muster_main("resume", "r", "--quiet").returncode == 1
    assert place.states() == ["done", "cancelled"]


@pytest.mark.slow
@pytest.mark.parametrize("is_running", [True, False])
def test_a_trial_that_is_paused_is_promoted_no_more(
    is_running: bool, place: Place, muster_main: Main
) -> None:
    """Hyperband pauses trials until their rung is full: trial 1 is the best and would go on.

    The others wait for a file, so that it has not been promoted before it is cancelled.
    """
    words = ("--space", "x=int(1,100)", "--maximize", "score", "--trials", "9")
    tries = ("--try", "x=1", "--stop", "hyperband:min=1,max=9")
    process = place.sweep("t.py:trial", *words, *tries)
    run = place.path / "r"
    place.until(lambda: (run / "ledger.sqlite").exists() and Run(run).counts()[TaskState.STOPPED])
    if not is_running:
        process.send_signal(signal.SIGKILL)
        process.wait()
    said = muster_main("cancel", "r", "--task", "1")
    assert "task 1: cancelled" in said.stdout, said.stdout + said.stderr
    (place.path / "go").touch()
    if not is_running:
        process = place.begin("resume", "r")
    assert process.wait(300) == 1
    assert place.states()[0] == "cancelled"


@pytest.mark.quick
def test_refusals(place: Place, muster_main: Main) -> None:
    (place.path / "go").touch()
    (place.path / "in.jsonl").write_text('{"x": 1}\n')
    flags = ("--quiet", "--devices", "cpu:1", "--monitor-interval", "0")
    muster_main("sweep", *flags, "--on", "inline", "--run-dir", "r", "t.py:held", "--grid", "x=1,2")
    unknown = muster_main("cancel", "r", "--task", "77")
    assert (unknown.returncode, "no task '77'" in unknown.stderr) == (2, True)
    done = muster_main("cancel", "r", "--task", "1", "2")
    assert (done.returncode, done.stdout.count("it is done already")) == (0, 2)
    muster_main(
        "map", *flags, "--on", "inline", "--run-dir", "m", "t.py:held",
        "--input", "in.jsonl", "--output", "out.jsonl",
    )  # fmt: skip
    a_map = muster_main("cancel", "m", "--task", "1")
    assert (a_map.returncode, "is a map" in a_map.stderr) == (2, True)
