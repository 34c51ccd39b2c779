"""For each of the promises in scripts/break_invariants.py a test goes red when it is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "break_invariants.py"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_what_would_be_broken_is_in_the_source() -> None:
    done = _run("--list")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_broken_promise_turns_a_test_red() -> None:
    done = _run()
    assert done.returncode == 0, done.stdout + done.stderr
