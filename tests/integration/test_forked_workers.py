"""A map's workers are forked from a process that is started with the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.base import processes
from muster.base.processes import RUN_MARKER
from muster.farm.executors.forked import ForkServerLost, fork_worker, started_ahead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere none is forked")

STAGE = """
import json, os, time

def note(record):
    path = f"/proc/{os.getpid()}"
    mark = [v for v in open(f"{path}/environ", "rb").read().split(b"\\0") if v.startswith(b"MARK=")]
    time.sleep(0.02)
    return {
        "n": record["n"],
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "command": open(f"{path}/cmdline", "rb").read().decode().split("\\0"),
        "marks": [v.decode().split("=")[1] for v in mark], "own": os.environ["MARK"],
        "threads": os.environ["OMP_NUM_THREADS"],
    }
""".replace("MARK", RUN_MARKER)


def begin(folder: Path, count: int) -> subprocess.Popen[bytes]:
    (folder / "stage.py").write_text(STAGE)
    rows = "".join(json.dumps({"n": n}) + "\n" for n in range(count))
    (folder / "in.jsonl").write_text(rows)
    argv = [
        *(sys.executable, "-m", "muster", "map", "stage.py:note", "--input", "in.jsonl"),
        *("--output", "out.jsonl", "--devices", "cpu:2", "--run-dir", "run", "--quiet"),
        *("--chunk-rows", "10"),
    ]
    return subprocess.Popen(argv, cwd=folder)


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def commands(parent: int) -> dict[int, list[str]]:
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == parent:
                    found[int(path.name)] = (path / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_workers_are_children_of_the_coordinator_with_its_mark(tmp_path: Path) -> None:
    process = begin(tmp_path, 40)
    assert process.wait(timeout=120) == 0
    rows = rows_of(tmp_path)
    assert [row["n"] for row in rows] == list(range(40))
    assert all("fork" in row["command"] for row in rows)  # type: ignore[operator]
    assert {row["parent"] for row in rows} == {process.pid}
    assert all(row["session"] == row["pid"] for row in rows)
    assert all(row["marks"] == [row["own"]] and row["own"] for row in rows)
    assert {row["threads"] for row in rows} == {"1"}


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_map_goes_on_without_the_process_that_workers_are_forked_from(
    tmp_path: Path, when: str
) -> None:
    """It is killed before there is a worker; and before a worker that was killed is replaced."""
    process = begin(tmp_path, 100)
    deadline = time.monotonic() + 60
    is_done = False
    while process.poll() is None and time.monotonic() < deadline and not is_done:
        found = commands(process.pid)
        servers = [pid for pid, words in found.items() if "fork" in words and len(words) > 3]
        workers = [pid for pid in servers if os.getsid(pid) == pid]
        if when == "before" and servers:
            os.kill(min(servers), signal.SIGKILL)
            is_done = True
        elif when == "between" and len(workers) == 3:
            for pid in sorted(workers)[:2]:
                os.kill(pid, signal.SIGKILL)
            is_done = True
        time.sleep(0.002)
    assert is_done
    assert process.wait(timeout=120) == 0
    rows = rows_of(tmp_path)
    assert [row["n"] for row in rows] == list(range(100))
    assert any("fork" not in row["command"] for row in rows)  # type: ignore[operator]


def test_nothing_is_left_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    process = begin(tmp_path, 400)
    deadline = time.monotonic() + 60
    while len(children := commands(process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(children) >= 4  # two workers, what they were forked from, and the reaper
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_where_orphans_go_elsewhere_none_is_used(tmp_path: Path) -> None:
    """As in a sandbox without subreapers: a process that is nobody's child of ours is killed."""
    ours, theirs = socket.socketpair()
    with ours, theirs, started_ahead(), (tmp_path / "log").open("ab") as log:
        lifeline, end = os.pipe()
        before = processes.set_subreaper(False)
        try:
            with pytest.raises(ForkServerLost):
                fork_worker(theirs, log.fileno(), lifeline, {**os.environ, RUN_MARKER: "m"})
            assert fork_worker(theirs, log.fileno(), lifeline, {RUN_MARKER: "m"}) is None
        finally:
            processes.set_subreaper(before)
            os.close(lifeline)
            os.close(end)
