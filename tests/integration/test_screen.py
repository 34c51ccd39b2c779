"""The screens, in a real terminal and in a pipe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from tests.conftest import MusterCli

TARGET = """
import time
from pathlib import Path

def f(x: float, ctx, seed: int = 0):
    for step in range(5):
        ctx.report(step / 5, f"step {step}")
        time.sleep(x / 5)
    while Path(f"held-{seed}").exists():  # until it has been seen
        time.sleep(0.01)
    print("seen in the log", seed)
    if seed == 3:
        raise RuntimeError("bad seed")
    return {"y": x}
"""

MUSTER = [sys.executable, "-m", "muster"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target.py").write_text(TARGET)
    return tmp_path


def sweep(*more: str) -> list[str]:
    return ["sweep", "target.py:f", "--grid", "x=0.3", "--seeds", "8", "--run-dir", "run", *more]


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MUSTER, *args], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_terminal_shows_progress_workers_and_what_they_report(folder: Path) -> None:
    words = [*MUSTER, *sweep("--devices", "cpu:2")]
    (folder / "held-6").touch()
    child = pexpect.spawn(
        words[0], words[1:], cwd=str(folder), dimensions=(30, 120), encoding="utf-8", timeout=300
    )
    child.expect(r"2 workers on cpu:0, cpu:1")
    child.expect(r"\d+/8")
    child.expect(r"step \d")
    child.expect(r"left .* s")
    (folder / "held-6").unlink()
    child.expect(r"8 tasks: 7 done, 1 failed")
    child.expect(r"bad seed")
    child.expect(r"muster errors run")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1


def test_ctrl_c_in_a_terminal_drains_and_resume_finishes(folder: Path) -> None:
    words = [*MUSTER, *sweep("--devices", "cpu:1")]
    (folder / "held-1").touch()
    child = pexpect.spawn(
        words[0], words[1:], cwd=str(folder), dimensions=(30, 120), encoding="utf-8", timeout=300
    )
    child.expect(r"[1-9]/8")
    child.sendintr()
    child.expect("draining")
    (folder / "held-1").unlink()
    child.expect("Interrupted; everything finished is saved")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    resumed = run(folder, "resume", "run")
    assert resumed.returncode == 1
    assert "8 tasks: 7 done, 1 failed" in resumed.stdout


@pytest.mark.quick
def test_a_pipe_gets_plain_lines(folder: Path) -> None:
    done = run(folder, *sweep("--devices", "cpu:2"))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"run: 8/8 \(100 %\), 7 done, 1 failed", done.stderr)


def test_quiet_says_nothing(folder: Path) -> None:
    done = run(folder, *sweep("--quiet"))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 1)


@pytest.mark.quick
def test_json_is_one_document(folder: Path, muster_main: MusterCli) -> None:
    done = run(folder, *sweep("--json"))
    answer = json.loads(done.stdout)
    assert answer["counts"]["done"] == 7
    assert answer["exit_code"] == done.returncode == 1
    status = json.loads(muster_main("status", "run", "--json").stdout)
    assert status["counts"]["failed"] == 1
    assert status["is_running"] is False


@pytest.mark.quick
def test_logs_and_errors_show_what_the_task_printed(folder: Path, muster_main: MusterCli) -> None:
    run(folder, *sweep("--quiet"))
    groups = json.loads(muster_main("errors", "run", "--json").stdout)
    assert len(groups) == 1
    task = groups[0]["tasks"][0]
    shown = muster_main("logs", "run", task).stdout
    assert "seen in the log 3" in shown
    assert "RuntimeError: bad seed" in shown
    assert "seen in the log 4" not in shown


@pytest.mark.quick
def test_dry_run_starts_and_writes_nothing(folder: Path, muster_main: MusterCli) -> None:
    done = muster_main(*sweep("--dry-run"))
    assert done.returncode == 0
    assert "8, the first:" in done.stdout
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["swep"], 2, "did you mean 'sweep'"),
        (["sweep", "target.py:g"], 2, "no function or class 'g'|no .*'g'|did you mean"),
        (["sweep", "targte.py:f"], 2, "target.py"),
        (["sweep", "target.py:f", "--grid", "z=1"], 2, "Unknown parameter 'z'"),
        (["sweep", "target.py:f", "--grid", "x=abc"], 2, "cannot read 'abc' as float"),
        (["sweep", "target.py:f", "--grid", "x"], 2, "x"),
        (["sweep"], 2, "nothing to run"),
        (["sweep", "--seeds", "2", "--"], 2, "no command after"),
        (["sweep", "--seeds", "2", "--", "no-such-program-here", "{seed}"], 2, "no such program"),
        (["sweep", "--seeds", "2", "--", "echo", "hello"], 2, "does not appear in the command"),
        (["sweep", "--seeds", "2", "--", "echo", "{sed}"], 2, "did you mean 'seed'"),
        (["status", "no-such-run"], 2, "Unknown run"),
        (["sweep", "target.py:f", "--grid", "x=1", "--run-dir", "/proc/x"], 3, "Cannot"),
        (["sweep", "target.py:f", "--grid", "x=1", "--gpus", "64"], 3, "64"),
        (["sweep", "target.py:f", "--grid", "x=1", "--on", "slrm"], 2, "slrm"),
        (["sweep", "target.py:f", "--grid", "x=1", "--timeout", "soon"], 2, "soon"),
    ],
)
def test_a_mistake_gets_a_clear_error_and_no_traceback(
    folder: Path, args: list[str], code: int, words: str, muster_main: MusterCli
) -> None:
    done = muster_main(*args)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stderr), done.stderr
