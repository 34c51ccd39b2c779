"""How the threads of a rank or worker wait, where the user has not said it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import muster
from muster.base.settings import waiting_threads


def test_threads_wait_briefly_unless_the_user_has_said_how() -> None:
    assert waiting_threads({}) == {"GOMP_SPINCOUNT": "500"}
    assert waiting_threads({"OMP_WAIT_POLICY": "active"}) == {}
    assert waiting_threads({"GOMP_SPINCOUNT": "infinity"}) == {}


@pytest.mark.parametrize("said", ["", "7"])
def test_a_worker_has_the_users_word_or_ours(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if said:
        monkeypatch.setenv("GOMP_SPINCOUNT", said)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import os; print('n =', os.environ['GOMP_SPINCOUNT'])", "{i}"]
    run = muster.sweep(command, grid={"i": [1]}, devices="cpu:1", run_dir="r")
    [log] = run.path.glob("logs/*.log")
    assert f"n = {said or 500}" in log.read_text()
