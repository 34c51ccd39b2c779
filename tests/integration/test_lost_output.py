"""What becomes of a command whose output nobody takes: closed, full, or a pipe without reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import slow_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")

TINY = """
def f(x: int):
    return {"y": x}

def double(record):
    return {"y": 2 * record["x"]}
"""

#: What is done to the streams, for a shell.
HARMS = {
    "stdout closed": ">&-",
    "stderr closed": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "disk full": ">/dev/full 2>/dev/full",
    "reader gone": "",
}

#: Commands that work → what they are given, and what shows that they went to their end.
WORKING = {
    "sweep": ("sweep tiny.py:f --grid x=1,2,3 --devices cpu:1", "results.csv"),
    "map": (
        "map tiny.py:double --input in.jsonl --output out.jsonl --devices cpu:1",
        "../out.jsonl",
    ),
    "run": ("run --devices cpu:1 lines.py", "../written"),
    "train": ("train slow.py:Slow --devices cpu:1 --epochs 1", "training_results.json"),
}
LOOKING = ["status run", "list", "errors run", "devices", "--help", "sweep --help"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "slow.py").write_text(slow_task(0.0))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"x": i}) + "\n" for i in range(3)))
    lines = "for i in range(9):\n    print('line', i, flush=True)\n"
    (tmp_path / "lines.py").write_text(lines + "open('written', 'w').close()\n")
    return tmp_path


def harmed(folder: Path, harm: str, words: str) -> int:
    """The exit code of ``muster WORDS`` with its streams as ``harm`` says."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        command = ["sh", "-c", f"exec {sys.executable} -m muster {words} {HARMS[harm]}"]
        return subprocess.run(
            command, cwd=folder, stdout=theirs, stderr=theirs, timeout=300, check=False
        ).returncode
    finally:
        os.close(theirs)


#: A training has the launcher of a program, which meets each harm, and a screen of its own.
CASES = [
    pytest.param(command, harm, marks=[pytest.mark.slow] * is_as_run)
    for command in sorted(WORKING)
    for harm in sorted(HARMS)
    for is_as_run in [command == "train" and harm not in ("all closed", "disk full")]
]


@pytest.mark.parametrize(("command", "harm"), CASES)
def test_work_goes_on_when_nobody_reads(command: str, harm: str, here: Path) -> None:
    words, shows = WORKING[command]
    name, rest = words.split(" ", 1)
    assert harmed(here, harm, f"{name} --run-dir run {rest}") == 0
    assert (here / "run" / shows).exists()


def test_failures_are_told_by_the_exit_code_when_nobody_reads(here: Path) -> None:
    (here / "bad.py").write_text("def f(x: int):\n    raise ValueError(x)\n")
    words = "sweep bad.py:f --grid x=1,2,3 --devices cpu:1 --run-dir run"
    assert harmed(here, "reader gone", words) == 1


def test_looking_ends_well_when_nobody_reads_and_says_when_it_cannot_write(here: Path) -> None:
    assert harmed(here, "stdout closed", f"{WORKING['sweep'][0]} --run-dir run") == 0
    for words in LOOKING:
        assert harmed(here, "reader gone", words) == 0, words
        assert harmed(here, "stdout closed", words) == 0, words
    assert harmed(here, "disk full", "status run") == 1
    assert harmed(here, "disk full", "list") == 1
