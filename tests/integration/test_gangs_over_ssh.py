"""Gangs on hosts over SSH: real sshd's on loopback, each with a cache folder of its own.

The hosts see neither the run folder nor the code, which lie in a folder that only the driver names.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.conftest import MusterCli
from tests.integration.test_two_nodes import check_same_weights, resumed_at, write_task
from tests.processes import lives
from tests.ray_cluster import wait_for
from tests.ssh_hosts import SshHosts

Main = Callable[..., CompletedProcess[str]]

WORDS = (
    *("train", "task.py:Slow", "--global-batch", "12", "--batch-size", "4", "--epochs", "99"),
    *("--checkpoint-interval", "5steps", "--no-tensorboard", "--monitor-interval", "0"),
)
SCRIPT = """
import os, sys, time
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
Path(f"made-{rank}.txt").write_text(os.environ["SSH_CONNECTION"].split()[2])
print("hello from", rank, "of", dist.get_world_size(), sys.argv[1:])
dist.barrier()
if sys.argv[1:] == ["fail"] and rank == 2:
    raise ValueError("of its own")
dist.barrier()
"""


@pytest.fixture
def hosts(ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    for name, value in ssh_hosts.environment.items():
        monkeypatch.setenv(name, value)
    return ssh_hosts


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--hosts", "a;id"), 2, "is not the name of a host"),
        (("--hosts", "a,b", "--on", "slurm"), 2, "no effect with --on slurm"),
        (("--hosts", "a,b", "--nodes", "2"), 2, "--nodes is for starting each by hand"),
        (("--hosts", "a,b", "--devices", "cpu:2"), 2, "--devices and --hosts each choose"),
        (("--hosts", "a,b", "--nproc-per-node", "2"), 2, "name the GPUs of each host (a:0-3)"),
        (("--hosts", "a,b", "--wait=1h"), 2, "queue of one machine"),
        (("--hosts", "a,b", "--min-nodes", "3"), 2, "not between 1 and the number of hosts"),
        (("--hosts-python", "/x"), 2, "no effect without --hosts"),
        (("--setup", "true"), 2, "--setup has no effect without --hosts"),
        (("--hosts", "a", "--setup", "echo no; false"), 3, "--setup has failed"),
        (("--hosts", "a,b", "--strategy", "dp"), 2, "--strategy dp is one process"),
        (("--hosts", "nowhere.invalid"), 3, "Cannot reach nowhere.invalid"),
        (("--hosts", "a,c"), 2, "a would work without a GPU"),
        (("--hosts", "c:0-2"), 3, "no GPU 2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_begins(
    hosts: SshHosts, muster_main: Main, words: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    done = muster_main("train", "digits", "--dry-run", "--run-dir", "run", *words)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_would_be_started_where(hosts: SshHosts, muster_main: Main) -> None:
    done = muster_main("train", "digits", "--dry-run", "--hosts", "a:cpu:2,b")
    assert "a: 2 ranks on its CPU" in done.stdout and "b: 1 rank on its CPU" in done.stdout
    told = json.loads(muster_main("train", "digits", "--dry-run", "--json", "--hosts", "c").stdout)
    assert told["ranks"] == ["c:0", "c:1"] and told["nodes"] == 1


@pytest.mark.thorough
def test_unlike_hosts_train_with_the_bits_of_one(
    hosts: SshHosts, muster_cli: MusterCli, tmp_path: Path
) -> None:
    """Two ranks there and one here are three ranks; the driver has all of it, and no host."""
    write_task(tmp_path, seconds=0)
    words = (*WORDS, "--max-steps", "12")
    done = muster_cli(*words, "--hosts", "a:cpu:2,b:cpu:1", "--run-dir", "run", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    here = muster_cli(*words, "--devices", "cpu:3", "--run-dir", "here", timeout_s=300)
    assert here.returncode == 0, here.stderr
    check_same_weights(tmp_path / "run", tmp_path / "here")
    names = [
        {path.relative_to(tmp_path / run).as_posix() for path in (tmp_path / run).rglob("*")}
        for run in ("run", "here")
    ]
    seldom = {"logs/phases.json"}  # not of a start shorter than a look of the watchdog
    assert names[0] - seldom == names[1] - seldom | {"logs/agent-1.log"}
    for name in ("a", "b"):
        kept = [path for path in (hosts.folder / name / "cache").rglob("*") if path.is_file()]
        assert {path.name for path in kept if "muster" in path.parts} == {"task.py", "pace", ".sum"}
        wait_for(lambda n=name: not hosts.processes(n), 120)  # sshd's own end a little later


@pytest.mark.thorough
def test_a_program_finds_its_files_and_a_rank_that_fails_is_named(
    hosts: SshHosts, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("run", "--hosts", "a:cpu:2,b:cpu:1", "--run-dir", "run", "--all-ranks", "script.py")
    done = muster_cli(*words, "fail")
    assert done.returncode == 1
    for rank in range(3):
        assert f"[{rank}] hello from {rank} of 3 ['fail']" in done.stdout
    assert "rank 2 of 3 failed: ValueError: of its own" in done.stderr
    assert "ranks 0-1 ended because of it" in done.stderr
    assert str(hosts.folder) not in done.stderr  # it names files as they are here
    log = tmp_path / "run" / "logs" / "rank-2.log"
    assert f"log: {log.relative_to(tmp_path)}" in done.stderr and "of its own" in log.read_text()
    for name, rank in (("a", 0), ("a", 1), ("b", 2)):
        made = tmp_path / "run" / "files" / name / f"made-{rank}.txt"
        assert made.read_text() == hosts.addresses[name]


@pytest.mark.slow
def test_a_killed_driver_a_lost_host_and_a_stop(hosts: SshHosts, tmp_path: Path) -> None:
    """One training through all of it: what goes on is what one machine makes of the same state."""
    write_task(tmp_path, seconds=0.1)
    both = ("--hosts", "a:cpu:1,b:cpu:1")
    words = (*WORDS, "--max-steps", "300", "--run-dir", "run", "--max-restarts", "1")
    with driven(tmp_path, *words, *both) as driver:
        await_step(tmp_path, 10, driver)
        begun = [*hosts.processes("a"), *hosts.processes("b")]
        assert len(begun) > 8
        driver.kill()
        driver.wait()
    wait_for(lambda: not [one for one in begun if lives(one)], 120)
    assert not list((hosts.folder / "a" / "cache" / "muster" / "gangs").iterdir())

    with driven(tmp_path, "resume", "run", "--min-nodes", "1") as driver:
        await_step(tmp_path, 30, driver)
        hosts.cut("b")
        await_words(tmp_path, "restart 1 of 1, on a", driver)
        await_step(tmp_path, newest(tmp_path) + 10, driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(120) == 130, said(tmp_path)
    hosts.start("b")
    assert "b was lost" in said(tmp_path) and "saved: asked to stop" in said(tmp_path)
    assert resumed_at(said(tmp_path)) >= 30

    write_task(tmp_path, seconds=0)
    with driven(tmp_path, "resume", "run", "--devices", "cpu:2") as driver:
        assert driver.wait(300) == 0, said(tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [one["step"] for one in steps if one["kind"] == "train"] == list(range(1, 301))
    wait_for(lambda: not hosts.processes("a") and not hosts.processes("b"), 120)


@pytest.mark.slow  # as chaos/test_hosts_chaos.py, which loses a rank before
def test_a_lost_host_is_taken_back_when_it_returns(hosts: SshHosts, tmp_path: Path) -> None:
    """By a stop at which all is saved: no step is done twice, and none is left out."""
    write_task(tmp_path, seconds=0.1)
    words = (*WORDS, "--max-steps", "500", "--run-dir", "run", "--max-restarts", "1")
    both = ("--hosts", "a:cpu:1,b:cpu:1", "--min-nodes", "1")
    with driven(tmp_path, *words, *both) as driver:
        await_step(tmp_path, 10, driver)
        hosts.cut("b")
        await_words(tmp_path, "restart 1 of 1, on a", driver)
        await_words(tmp_path, "b is still lost", driver)
        hosts.start("b")
        await_words(tmp_path, "b: back again; the ranks save", driver)
        await_words(tmp_path, "begins again on a, b", driver)
        step = newest(tmp_path)
        await_step(tmp_path, step + 10, driver)
        assert len(hosts.processes("b")) > 4
        write_task(tmp_path, seconds=0)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(120) == 130, said(tmp_path)
    told = said(tmp_path)
    assert "Traceback" not in told
    assert resumed_at(told) == step  # the last start began where the one before had saved
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    done = [one["step"] for one in map(json.loads, lines) if one["kind"] == "train"]
    assert done == list(range(1, len(done) + 1)) and len(done) >= step + 10
    wait_for(lambda: not hosts.processes("a") and not hosts.processes("b"), 120)


@pytest.mark.slow
def test_a_lost_host_pauses_with_the_command_that_goes_on(hosts: SshHosts, tmp_path: Path) -> None:
    write_task(tmp_path, seconds=0.1)
    words = (*WORDS, "--max-steps", "300", "--run-dir", "run")
    with driven(tmp_path, *words, "--hosts", "a:cpu:1,b:cpu:1") as driver:
        await_step(tmp_path, 10, driver)
        hosts.cut("a")  # where they meet
        assert driver.wait(120) == 75, said(tmp_path)
    hosts.start("a")
    assert "a was lost" in said(tmp_path)
    assert "go on with: muster resume run --hosts b:cpu:1" in said(tmp_path)
    wait_for(lambda: not hosts.processes("a") and not hosts.processes("b"), 120)


# ----------------------------------------------------------------------------------------


@contextmanager
def driven(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "said.txt").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "muster", *words], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def said(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def newest(folder: Path) -> int:
    steps = (folder / "run" / "checkpoints").glob("step-*")
    return max((int(path.name[5:]) for path in steps), default=0)


def await_step(folder: Path, step: int, driver: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: newest(folder) >= step or driver.poll() is not None, 120)
    assert driver.poll() is None, said(folder)


def await_words(folder: Path, words: str, driver: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: words in said(folder) or driver.poll() is not None, 120)
    assert driver.poll() is None, said(folder)
