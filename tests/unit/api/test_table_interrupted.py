"""Ctrl-C goes to every process of a terminal: it does not end the one that writes the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, threading
from pathlib import Path
import muster
from muster.api.runs import refresh_export
from muster.run.folder import RunFolder

run = muster.sweep("f.py:f", grid={"x": [1, 2]}, devices="cpu:1", executor="inline", run_dir="it",
                   monitor_interval_s=0)
(run.folder.path / "results.parquet").unlink()
signal.signal(signal.SIGINT, lambda number, frame: None)
finished = threading.Event()

def press():
    while not finished.wait(0.01):
        os.killpg(0, signal.SIGINT)

thread = threading.Thread(target=press)
thread.start()
try:
    refresh_export(run.folder)
finally:
    finished.set()
    thread.join()
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="groups of processes")
def test_an_interrupt_while_the_table_is_written_does_not_cost_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(x):\n    return {'y': x}\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, start_new_session=True, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "it" / "results.parquet").exists()
