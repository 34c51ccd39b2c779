"""What a target's file does on import is the user's: its files are whole in the end, its settings
of the garbage collector hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import muster

HELPER = """
LOG = open("helper.txt", "a")


def write(text):
    LOG.write(text)
"""
TARGET = """
import gc
import weakref

import helper

LOG = open("target.txt", "a")
gc.disable()


class Big:
    def __init__(self):
        self.me = self


is_alive = weakref.ref(Big())


def f(x: int):
    LOG.write("last line")
    helper.write("last line")
    gc.collect()
    kept = is_alive() is not None
    return {"collects": gc.isenabled(), "threshold": gc.get_threshold()[0], "kept": kept}
"""


def test_what_it_opens_is_written_and_what_it_sets_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "target.py").write_text(TARGET)
    run = muster.sweep("target.py:f", grid={"x": [1]}, devices="cpu:1", run_dir="r")
    [row] = run.results().to_pylist()
    assert (row["collects"], row["kept"]) == (False, False)
    assert row["threshold"] < 10**6, "as Python has it"
    assert (tmp_path / "target.txt").read_text() == "last line"
    assert (tmp_path / "helper.txt").read_text() == "last line"
