"""The fixtures of ``tests/conftest.py`` fail exactly the tests that leave something behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SUITE = """
import os, subprocess, sys, threading, time
import pytest

@pytest.fixture(autouse=True)
def before_each(monkeypatch):
    monkeypatch.setenv("SET_BY_A_FIXTURE", "1")

def test_good_monkeypatch(monkeypatch, tmp_path):
    monkeypatch.setenv("A_VARIABLE", "1")
    monkeypatch.chdir(tmp_path)

def test_bad_environment():
    os.environ["A_VARIABLE"] = "1"

def test_bad_removed_variable():
    del os.environ["PATH"]

def test_good_after_them():
    assert "A_VARIABLE" not in os.environ and os.environ["PATH"]

def test_bad_folder(tmp_path):
    os.chdir(tmp_path)

OVER = threading.Event()

def test_bad_thread():
    threading.Thread(target=OVER.wait).start()

def test_good_that_ends_it():
    OVER.set()

def test_good_daemon_thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

KEPT = []

def test_bad_child():
    KEPT.append(subprocess.Popen(["sleep", "60"]))

def test_bad_orphan():
    subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"], check=True)

def test_good_child_that_ends_within_the_grace():
    KEPT.append(subprocess.Popen(["sleep", "0.1"]))

def test_good_child_that_ended_and_was_not_waited_for():
    KEPT.append(subprocess.Popen(["true"]))

def test_good_command(muster_cli):
    done = muster_cli("--version")
    assert done.returncode == 0 and done.stdout.startswith("muster "), done.stderr

def test_good_command_ended_at_its_limit(muster_cli, tmp_path):
    (tmp_path / "t.py").write_text("import time\\ndef f(x: int):\\n    time.sleep(60)\\n")
    sweep = ["sweep", "t.py:f", "--grid", "x=1", "--devices", "cpu:1", "--run-dir", "run"]
    with pytest.raises(subprocess.TimeoutExpired):
        muster_cli(*sweep, timeout_s=2.0)
"""


def _with_tests() -> str:
    """For the conftest, which imports fixtures from modules of ``tests``."""
    return os.pathsep.join(filter(None, [str(CONFTEST.parents[1]), os.environ.get("PYTHONPATH")]))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are made with setsid")
def test_what_is_left_behind_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_suite.py").write_text(SUITE)
    options = ["-q", "--tb=short", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": _with_tests()},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = set(re.findall(r"^(?:ERROR|FAILED) .*::(test_\w+)", done.stdout, re.M))
    assert wrong == set(re.findall(r"def (test_bad_\w+)", SUITE)), done.stdout + done.stderr
