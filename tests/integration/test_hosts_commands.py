"""Every command on a run that was started with ``--hosts``, and what differs between hosts: their
clocks, their code. Real sshd's on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.integration.test_gangs_over_ssh import WORDS, await_step, driven, newest, said
from tests.integration.test_two_nodes import write_task
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

import muster

Main = Callable[..., CompletedProcess[str]]
Line = tuple[tuple[str, ...], int, str]

#: While it runs: the words of a command, its exit code, and what it says.
AT_WORK = (
    (("status", "run"), 0, "run: running"),
    (("list", "--root", "."), 0, "running"),
    (("devices", "run"), 0, "late:cpu:0"),
    (("devices", "run", "--release", "1"), 2, "on several nodes, whose ranks work in lock-step"),
    (("devices", "run", "--add", "1"), 2, "end it (muster cancel"),
    (("devices", "run", "--only", "cpu:1"), 2, "their number stays while they run"),
    (("add", "run", "--seeds", "3"), 2, "it has ranks, and no tasks"),
    (("retry", "run"), 2, "there are no failed tasks"),
    (("resume", "run"), 3, "is being worked on by"),
    (("resume", "run", "--hosts", "a:cpu:1"), 3, "is being worked on by"),
    (("logs", "run"), 0, ""),
    (("logs", "run", "1"), 0, ""),
    (("errors", "run"), 0, ""),
    (("why", "run"), 0, "running"),
    (("metrics", "run"), 0, "loss"),
    (("report", "run"), 0, "report"),
    (("export", "run", "--to", "steps.csv"), 0, ""),
    (("monitor", "run"), 3, "--monitor-interval 0"),
    (("verify", "digits", "--hosts", "late"), 2, "--hosts"),
)
#: Once it was cancelled.
OVER = (
    (("status", "run"), 0, "run: stopped"),
    (("status", "run"), 0, "go on: muster resume run"),
    (("devices", "run"), 0, "it holds no device"),
    (("devices", "run", "--release", "1"), 2, "lock-step"),
    (("attach", "run"), 130, "nobody works on it now"),
    (("wait", "run"), 130, "run: "),
    (("cancel", "run"), 0, ""),
    (("resume", "run", "--dry-run", "--hosts", "b:cpu:2"), 0, "b: 2 ranks on its CPU"),
    (("resume", "run", "--dry-run", "--devices", "cpu:1"), 0, "1 rank"),
)


@pytest.fixture(scope="module")
def clocks(ssh_hosts: SshHosts) -> SshHosts:
    """With the host ``late``, whose clock is an hour ahead: it writes of what is to come."""
    ssh_hosts.add("late", ahead_s=3600.0)
    return ssh_hosts


@pytest.fixture
def hosts(clocks: SshHosts, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    for name, value in clocks.environment.items():
        monkeypatch.setenv(name, value)
    return clocks


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``muster`` with these words; what it says is read at its end."""
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            one = subprocess.Popen(
                [sys.executable, "-m", "muster", *words], cwd=tmp_path, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(one.communicate)
            stack.callback(one.kill)
            return one

        yield start


def check(muster_main: Main, *lines: Line) -> None:
    wrong = []
    for words, code, says in lines:
        done = muster_main(*words)
        told = done.stdout + done.stderr
        if done.returncode != code or says not in told or "Traceback" in done.stderr:
            wrong.append((words, done.returncode, told))
    assert wrong == []


def test_every_command_on_a_training(
    hosts: SshHosts, muster_main: Main, tmp_path: Path,
    started: Callable[..., subprocess.Popen[str]],
) -> None:  # fmt: skip
    """Rank 0 is where the clock is an hour ahead."""
    write_task(tmp_path, seconds=0.5)  # long enough for a slow machine
    words = (*WORDS, "--max-steps", "300", "--run-dir", "run")
    with driven(tmp_path, *words, "--hosts", "late:cpu:1,b:cpu:1") as driver:
        await_step(tmp_path, 5, driver)
        followers = {
            name: started(*line) for name, line in {
                "attach": ("attach", "run"), "wait": ("wait", "run"), "logs": ("logs", "-f", "run"),
            }.items()
        }  # fmt: skip
        check(muster_main, *AT_WORK)
        told = json.loads(muster_main("status", "run", "--json").stdout)
        assert told["state"] == "running", told
        await_step(tmp_path, newest(tmp_path) + 5, driver)
        assert [name for name, one in followers.items() if one.poll() is not None] == []
        check(muster_main, (("cancel", "run"), 0, "asked its ranks"))
        assert driver.wait(120) == 130, said(tmp_path)
        logs = followers.pop("logs")
        for name, one in followers.items():
            told = one.communicate(timeout=120)[0]
            assert one.returncode == 130, (name, told)
            assert name == "wait" or "step" in told
    assert "the clock of late is 1 h 00 min ahead" in said(tmp_path)
    wait_for(lambda: not hosts.processes("late") and not hosts.processes("b"), 120)
    check(muster_main, *OVER)

    write_task(tmp_path, seconds=0)
    with driven(tmp_path, "resume", "run", "--hosts", "b:cpu:2") as driver:
        assert driver.wait(300) == 0, said(tmp_path)
    told = logs.communicate(timeout=120)[0]
    assert logs.returncode == 0 and "saved" in told, told
    assert "run has stopped; what it prints when it goes on: below" in told
    check(muster_main, (("status", "run"), 0, "run: done"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [one["step"] for one in steps if one["kind"] == "train"] == list(range(1, 301))
    check(muster_main, (("report", "run"), 0, "report"))


WAITS = """
import os, signal, sys, time
from pathlib import Path

def end(*_):
    print("asked to end", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("rank", os.environ["RANK"], "waits", flush=True)
while True:
    time.sleep(0.05)
"""


def test_every_command_on_a_program(hosts: SshHosts, muster_main: Main, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(WAITS)
    words = ("run", "--hosts", "a:cpu:1,b:cpu:1", "--run-dir", "run", "--all-ranks", "p.py")
    with driven(tmp_path, *words) as driver:
        logs = [tmp_path / "run" / "logs" / f"rank-{rank}.log" for rank in range(2)]
        for log in logs:
            wait_for(lambda one=log: (one.exists() and "waits" in one.read_text()) or driver.poll())
        assert driver.poll() is None, said(tmp_path)
        check(
            muster_main,
            (("status", "run"), 0, "run: running"),
            (("devices", "run"), 0, "b:cpu:0"),
            (("devices", "run", "--release", "1"), 2, "work in lock-step"),
            (("add", "run", "--seeds", "3"), 2, "it has ranks, and no tasks"),
            (("logs", "run", "1"), 0, "rank 1 waits"),
            (("resume", "run"), 2, "goes on when it is started again"),
        )
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == 130, said(tmp_path)
    assert said(tmp_path).count("] asked to end") == 2
    check(muster_main, (("status", "run"), 0, "run: stopped"))
    check(muster_main, (("wait", "run"), 130, "run: "))
    wait_for(lambda: not hosts.processes("a") and not hosts.processes("b"), 120)


FAILS_IN_TURN = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
place = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    (place / "new").write_text(str(os.getpid()))
    (place / "new").rename(place / "pid")
    raise ValueError("the first")
while not (place / "pid").exists():
    time.sleep(0.01)
while os.path.exists("/proc/" + (place / "pid").read_text()):
    time.sleep(0.001)
raise ValueError("the second")
"""


def test_which_rank_failed_first_is_known_where_clocks_differ(
    hosts: SshHosts, muster_cli: Main, muster_main: Main, tmp_path: Path
) -> None:
    check(muster_main, (("hosts", "check", "late"), 0, "+3600."))
    (tmp_path / "p.py").write_text(FAILS_IN_TURN)
    words = ("run", "--hosts", "late:cpu:1,b:cpu:1", "--run-dir", "run", "p.py", str(tmp_path))
    done = muster_cli(*words)
    assert done.returncode == 1
    assert "rank 0 of 2 failed: ValueError: the first" in done.stderr
    assert "the clock of late is 1 h 00 min ahead" in done.stderr
    check(muster_main, (("logs", "run"), 0, "the first"))


# ---------------------------------------------------------------------- a sweep

TAKES = """
import time

def takes(x: int) -> dict:
    if x == 2:
        held = bytearray(600 << 20)
        time.sleep(60)
    return {"y": x}
"""


def test_a_task_above_its_memory_fails_on_a_host_of_other_code_and_says_so(
    hosts: SshHosts, muster_cli: Main, muster_main: Main, tmp_path: Path
) -> None:
    sources = tmp_path / "src"
    shutil.copytree(
        Path(muster.__file__).parent, sources / "muster",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    with (sources / "muster" / "base" / "clock.py").open("a") as file:
        file.write("# of another commit\n")
    hosts.add("other", sources=sources)
    (tmp_path / "t.py").write_text(TAKES)
    (tmp_path / "p.py").touch()
    unlike = "other has other code of Muster"
    check(muster_main, (("run", "--hosts", "other:cpu:1", "--dry-run", "p.py"), 0, unlike))
    words = ("sweep", "t.py:takes", "--grid", "x=1,2", "--memory", "300M", "--run-dir", "run")
    done = muster_cli(*words, "--hosts", "other:cpu:1")
    assert done.returncode == 1, done
    assert unlike in done.stdout + done.stderr
    rows = {row["x"]: row["state"] for row in muster.Run(tmp_path / "run").results().to_pylist()}
    assert rows == {1: "done", 2: "failed"}
    told = json.loads(muster_main("why", "run", "--json").stdout)
    [cause] = told["causes"]
    assert cause["outcome"] == "memory_limit"
    assert "of 300 MiB allowed (--memory)" in cause["text"]
    allowed = "of 300 MiB allowed (--memory)"
    check(
        muster_main,
        (("why", "run"), 0, allowed), (("errors", "run"), 0, allowed),
        (("status", "run"), 0, "a task may take 300 MiB of memory (--memory)"),
    )  # fmt: skip
