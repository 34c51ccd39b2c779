"""``--restart`` killed right after its rename: the same command goes on, and nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.programs import slow_task

#: Ends itself where the old run has its new name and the new run has nothing yet.
KILLED = """
import os, signal, sys
from muster.cli.main import main

rename = os.rename

def rename_and_die(before, after):
    rename(before, after)
    os.kill(os.getpid(), signal.SIGKILL)

os.rename = rename_and_die
main(sys.argv[1:])
"""
WORDS = {
    "sweep": ("sweep", "f.py:f", "--grid", "x=1,2"),
    "map": ("map", "s.py:stage", "--input", "in.jsonl", "--output", "o.jsonl"),
    "train": ("train", "t.py:Slow", "--epochs", "1"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_the_same_command_goes_on(
    kind: str, tmp_path: Path, muster_main: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "f.py").write_text("def f(x: int) -> dict:\n    return {'y': 2 * x}\n")
    (tmp_path / "s.py").write_text("def stage(r):\n    return {**r, 'b': r['a'] + 1}\n")
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "t.py").write_text(slow_task(0.0))
    words = [*WORDS[kind], "--devices", "cpu:1", "--run-dir", "runs/it", "--quiet"]
    first = muster_main(*words)
    assert first.returncode == 0, first.stderr
    killed = subprocess.run([sys.executable, "-c", KILLED, *words, "--restart"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "runs/it").exists()
    (aside,) = (tmp_path / "runs").glob("it.before-*")
    again = muster_main(*words, "--restart")
    assert again.returncode == 0, again.stderr
    assert list((tmp_path / "runs").glob("it.before-*")) == [aside]
    for place in (tmp_path / "runs/it", aside):
        status = json.loads(muster_main("status", str(place), "--json").stdout)
        assert status["state"] == "done"
    if kind == "map":
        assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 2


def test_an_output_that_another_has_changed_is_not_replaced(
    tmp_path: Path, muster_main: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "s.py").write_text("def stage(r):\n    return r\n")
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    words = [*WORDS["map"], "--devices", "cpu:1", "--run-dir", "runs/it", "--quiet"]
    assert muster_main(*words).returncode == 0
    (tmp_path / "runs/it").rename(tmp_path / "runs/it.before-20260101-000000")
    (tmp_path / "o.jsonl").write_text("mine\n")
    refused = muster_main(*words, "--restart")
    assert refused.returncode == 2 and "o.jsonl" in refused.stderr
    assert (tmp_path / "o.jsonl").read_text() == "mine\n"
