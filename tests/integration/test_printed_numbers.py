"""A script that prints its numbers: what the user is told until they are in the table."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from tests.conftest import MusterCli

SCRIPT = """
import sys
for epoch in range(2):
    print(f"Epoch {epoch}: train loss {float(sys.argv[1]) / (epoch + 1)}")
"""
WORDS = ("sweep", "--grid", "lr=1,2", "--devices", "cpu:1", "--run-dir", "r")
PROGRAM = ("--", "python", "s.py", "{lr}")
WRONG, RIGHT = (f"stdout:loss{sign}(?P<loss>\\S+)" for sign in ("=", " "))


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)


def losses(place: Path) -> list[str]:
    lines = (place / "r/results.csv").read_text().splitlines()
    return [row["loss"] for row in csv.DictReader(lines)]


def test_the_pattern_that_is_proposed_reads_what_scripts_print(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    done = muster_main(*WORDS, *PROGRAM)
    assert "No task handed over a number." in done.stdout
    (proposed,) = re.findall(r"--metrics-from '(.+?)'", done.stdout)
    pattern = proposed.removeprefix("stdout:")
    for line in ("loss 0.25", "loss=0.25", "Loss: 1 loss: 0.25", "loss = 2.5e-1, acc 3"):
        assert float(re.search(pattern, line)["loss"]) == 0.25
    again = muster_main(*WORDS, "--metrics-from", proposed, "--restart", *PROGRAM)
    assert losses(tmp_path) == ["0.5", "1"] and "number" not in again.stdout


def test_a_pattern_that_fits_nothing_is_named_with_the_way_out(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    """The corrected command found everything done and gave the advice for scripts that print
    nothing."""
    done = muster_main(*WORDS, "--metrics-from", WRONG, *PROGRAM)
    assert f"nothing fits --metrics-from {WRONG}" in done.stdout
    assert "muster logs r 1" in done.stdout and "--restart" in done.stdout
    corrected = muster_main(*WORDS, "--metrics-from", RIGHT, *PROGRAM)
    assert corrected.returncode == 0
    assert f"started with --metrics-from {WRONG}" in corrected.stderr
    assert "Hint: --restart runs all of them" in corrected.stderr
    record = json.loads((tmp_path / "r/run.json").read_bytes())
    assert record["targets"][0]["metrics_from"] == RIGHT, "a resume reads by the last one"
    anew = muster_main(*WORDS, "--metrics-from", RIGHT, "--restart", *PROGRAM)
    assert "Hint" not in anew.stderr and losses(tmp_path) == ["0.5", "1"]


def test_tasks_that_were_begun_without_one_are_told_of_too(muster_main: MusterCli) -> None:
    muster_main(*WORDS, *PROGRAM)
    grown = muster_main(*WORDS[:2], "lr=1,2,3", *WORDS[3:], "--metrics-from", RIGHT, *PROGRAM)
    assert "started without --metrics-from; their numbers" in grown.stderr
