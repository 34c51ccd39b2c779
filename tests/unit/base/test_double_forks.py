"""A double fork: who began a session and ended by itself is collected with what it left there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from muster.base import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")

#: A process that ends without waiting for the one that began a session and ended before it.
FORKS = """
import os, pathlib, sys, time
if os.fork():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    os._exit(0)
os.setsid()
if not os.fork():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
os._exit(0)
"""


@pytest.fixture
def subreaper() -> Iterator[None]:
    before = processes.set_subreaper(True)
    yield
    processes.set_subreaper(before)


def end_orphans(mark: str, session: int) -> list[int]:
    return processes.end_orphans(mark, session, set())


def end_marked(mark: str, session: int) -> list[int]:
    return processes.end_marked(mark, [session])


@pytest.mark.usefixtures("subreaper")
@pytest.mark.parametrize("end", [end_orphans, end_marked])
def test_no_zombie_of_a_double_fork_stays(
    end: Callable[[str, int], list[int]], tmp_path: Path
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    mark = f"mark-{time.time_ns()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / "forked")],
        env={"PATH": "/usr/bin", processes.RUN_MARKER: mark},
        start_new_session=True,
    )
    parent.wait(300)
    assert end(mark, parent.pid) == []
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_process_and_what_it_has_started_are_a_family() -> None:
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])\n"
        "print(child.pid, flush=True)\n"
        "sys.exit(child.wait())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.family(parent.pid) == {parent.pid, child}
        parent.stdin.close()
        parent.wait(300)
    assert processes.family(parent.pid) == {parent.pid}
    assert processes.resident_mib() > 5
