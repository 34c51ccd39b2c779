"""A run whose ledger has lost something ends with exit code 3 and the numbers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.conftest import MusterCli


@pytest.mark.thorough
def test_a_sweep_that_lost_a_task_publishes_nothing(tmp_path: Path, muster_cli: MusterCli) -> None:
    (tmp_path / "a.py").write_text("def f(x: int):\n    return {'y': x}\n")
    words = ("sweep", "a.py:f", "--grid", "x=1,2,3", "--devices", "cpu:1", "--run-dir", "r")
    assert muster_cli(*words, "--quiet", timeout_s=120).returncode == 0
    before = (tmp_path / "r" / "results.csv").read_bytes()
    with closing(sqlite3.connect(tmp_path / "r" / "ledger.sqlite")) as ledger:
        for table in ("tasks", "results"):
            ledger.execute(f"DELETE FROM {table} WHERE task_id = 2")
        ledger.commit()
    done = muster_cli(*words, "--quiet", timeout_s=120)
    assert done.returncode == 3
    assert "the plan has 3 tasks, and the ledger knows 2 (2 done" in done.stderr
    assert (tmp_path / "r" / "results.csv").read_bytes() == before
