"""--log-level of the commands that run something: what is said, and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.errors import UsageError
from muster.cli.flags import ONE_TIME, ShownFlags
from muster.cli.main import read_command

TARGET = """
from pathlib import Path

def f(x: int):
    if not Path("second-time").exists():
        Path("second-time").touch()
        raise RuntimeError("\\x1b]0;title\\x07not yet")
    return {"y": x}

def g(record):
    return record
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "hello.py").write_text("print('hello from the program')")
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "muster", *words],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


SWEEP = (
    "sweep", "target.py:f", "--grid", "x=7", "--retry-exceptions", "1", "--devices", "cpu:1",
    "--run-dir", "run", "--monitor-interval", "0",
)  # fmt: skip
MAP = (
    "map", "target.py:g", "--input", "in.jsonl", "--output", "out.jsonl", "--devices", "cpu:1",
    "--run-dir", "mapped",
)  # fmt: skip


def events_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("debug: ")]


@pytest.mark.parametrize(
    "flag", [pytest.param("--log-level", marks=pytest.mark.quick), "--log_level"]
)
def test_debug_shows_workers_attempts_and_retries(folder: Path, flag: str) -> None:
    done = run(folder, *SWEEP, flag, "debug")
    events = "\n".join(events_in(done.stderr))
    for sign in ("debug: start {", "starts in slot", "is ready, pid", "is sent task",
                 "exception after", "it will run again", "ok after", "debug: end {"):  # fmt: skip
        assert sign in events, sign
    assert "\x1b" not in done.stderr
    assert "1 tasks: 1 done" in done.stdout or "1 task: 1 done" in done.stdout
    again = run(folder, "resume", "run", "--log-level", "debug")
    assert "debug: start {" in again.stderr
    assert events_in(run(folder, "resume", "run").stderr) == []


@pytest.mark.quick
def test_warning_leaves_how_it_ended(folder: Path) -> None:
    done = run(folder, *SWEEP, "--log-level", "warning")
    assert done.stderr == ""
    assert "table: " in done.stdout
    assert run(folder, *MAP, "--log-level=warning").stderr == ""


def test_debug_of_map_and_run(folder: Path) -> None:
    assert "ok after" in "\n".join(events_in(run(folder, *MAP, "--log-level", "debug").stderr))
    words = ("run", "--devices", "cpu:1", "--run-dir", "gang")
    done = run(folder, *words, "--log-level", "debug", "hello.py")
    assert "hello from the program" in done.stdout
    assert any("'ranks'" in line for line in events_in(done.stderr))
    done = run(folder, *words, "--log-level", "warning", "hello.py")
    assert "hello" not in done.stdout
    assert "done after" in done.stderr


def test_debug_of_train_shows_checkpoints(folder: Path) -> None:
    words = ("--epochs", "1", "--devices", "cpu:1", "--run-dir", "trained", "--no-tensorboard")
    done = run(folder, "train", "digits", *words, "--log-level", "debug")
    assert any("checkpoint written: step-" in line for line in events_in(done.stderr))
    assert "epoch   1/1" in done.stdout


@pytest.mark.quick
def test_quiet_and_debug_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--quiet and --log-level debug"):
        assert ShownFlags(quiet=True, log_level="debug").level
    assert ShownFlags(quiet=True).level == "nothing"
    assert ShownFlags(log_level="warning").level == "warning"


@pytest.mark.quick
def test_it_is_of_the_moment() -> None:
    words = ["muster", "sweep", "a.py:f", "--log-level", "debug", "--log_level=warning"]
    parsed = read_command([*words, "--seeds", "3"])
    assert parsed.argv(without=ONE_TIME) == ["muster", "sweep", "a.py:f", "--seeds", "3"]
