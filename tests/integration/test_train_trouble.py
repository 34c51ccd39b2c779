"""Trainings in trouble, as their user meets them: stalls, signals, errors, a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import psutil
import pytest
from tests.conftest import MusterCli
from tests.ports import free_port
from tests.processes import command_line
from tests.programs import read_program

TASK = read_program("pausing_task.py")

WORDS = ("train", "slow.py:Slow", "--run-dir", "run", "--batch-size", "8", "--no-tensorboard")


@pytest.fixture(autouse=True)
def task(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)


def num_lines(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_lines(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while num_lines(folder) < count:
        assert time.monotonic() < deadline, "the training does not get there"
        time.sleep(0.05)


def steps(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if json.loads(line)["kind"] == "train"]


def test_a_sleeping_loader_is_named_with_its_step_and_who_waits(
    muster_cli: MusterCli, tmp_path: Path
) -> None:
    done = muster_cli(
        *WORDS, "--devices", "cpu:2", "--num-workers", "0", "--sleep-after", "80",
        "--stall-timeout", "3", "--max-restarts", "0",
    )  # fmt: skip
    assert done.returncode == 1
    assert "stalled: rank 1 is in the data loader at step " in done.stderr
    assert "; rank 0 waits in backward" in done.stderr
    assert done.stderr.count("stalled: ") == 1
    spent = json.loads((tmp_path / "run/logs/phases.json").read_text())
    assert max(spent["1"], key=spent["1"].get) == "waiting for data", spent
    assert spent["0"].keys() - {"waiting for data"}, "and what the other one was at"
    assert "Traceback" not in done.stderr


def test_a_stopped_rank_is_named_and_the_training_goes_on_without_a_hand(tmp_path: Path) -> None:
    """Stopped once: after the restart from the checkpoint it reaches the end."""
    (tmp_path / "slowly").touch()  # not over before it is stopped
    command = [
        *(sys.executable, "-m", "muster", *WORDS, "--devices", "cpu:2"),
        *("--max-steps", "150", "--checkpoint-interval", "5steps", "--stall-timeout", "3"),
        *("--max-restarts", "1", "--epochs", "99"),
    ]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_lines(tmp_path, 6)
    time.sleep(2.5)  # so that a beat has told where it is
    # The ranks are the processes without children.
    family = psutil.Process(launcher.pid).children(recursive=True)
    leaves = [p for p in family if not p.children() and "reaper" not in command_line(p)]
    os.kill(leaves[-1].pid, signal.SIGSTOP)
    (tmp_path / "slowly").unlink()
    out, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out + error
    assert "has been silent for" in error and "restart 1 of 1" in error
    assert steps(tmp_path) == list(range(1, 151))


@pytest.mark.parametrize(
    "number",
    # As a training that gives back a device is asked: tests/integration/test_lent_ranks.py.
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)],
)
def test_asked_to_stop_it_saves_and_asks_to_be_started_again(
    number: signal.Signals, tmp_path: Path, muster_cli: MusterCli
) -> None:
    words = (*WORDS, "--devices", "cpu:2", "--max-steps", "990", "--epochs", "99")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "muster", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(tmp_path, 10)
    launcher.send_signal(number)
    out, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 75, out + error
    done_before = steps(tmp_path)
    assert 10 <= len(done_before) < 990
    if number == signal.SIGUSR1:  # what is saved does not know which signal it was
        return
    state = muster_cli("status", "run").stdout
    assert f"run: saved\n  step {done_before[-1]} of 990 · epoch" in state
    assert "muster resume run" in state
    most = done_before[-1] + 20
    again = muster_cli("resume", "run", "--max-steps", str(most))
    assert again.returncode == 0, again.stderr
    assert f"resume     from step {done_before[-1]} " in again.stdout
    assert steps(tmp_path) == list(range(1, most + 1))


def test_an_exception_of_one_rank_is_told_once_in_ten_lines(muster_cli: MusterCli) -> None:
    done = muster_cli(*WORDS, "--devices", "cpu:2", "--fail-after", "5")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("muster: ") :].strip().splitlines()
    assert len(report) <= 10, done.stderr
    assert "rank 1 of 2 failed: KeyError" in report[0]
    assert "/muster/train/" not in done.stderr, "its user wrote none of that"
    assert done.stderr.count("failed: KeyError: 'no such column: heart_rate'") == 1
    assert "slow.py" in done.stderr and "rank-1.log" in done.stderr
    assert "restart" not in done.stderr, "it would only come again"


@pytest.mark.alone
def test_a_terminal_shows_rate_and_time_to_go_and_ctrl_c_saves(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    words = ["-m", "muster", *WORDS, "--devices", "cpu:2", "--max-steps", "400", "--epochs", "99"]
    child = pexpect.spawn(
        sys.executable,
        words,
        cwd=str(tmp_path),
        dimensions=(30, 140),
        encoding="utf-8",
        timeout=300,
    )
    child.expect("global batch 16")
    child.expect(r"\d+/400.*ETA \d.* · epoch \d+/99 · loss \d")
    child.expect(r"samples/s · data \d+% · comm \d+%")
    during = muster_cli("status", "run")
    assert re.search(r"run: running\n  step \d+ of 400 · epoch \d", during.stdout), during
    child.sendintr()
    child.expect("saved")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    again = muster_cli("resume", "run", "--max-steps", "30", "--dry-run")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_a_batch_system_may_signal_every_process_at_once(start: str, tmp_path: Path) -> None:
    """As SLURM and systemd do: the ranks save although the launcher passes the signal on too."""
    words = (*WORDS, "--devices", "cpu:2", "--max-steps", "990", "--epochs", "99", "--start", start)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "muster", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(tmp_path, 10)
    family = [launcher.pid, *(p.pid for p in psutil.Process(launcher.pid).children(recursive=True))]
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    out, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 75, out + error
    assert "saved: asked to stop (SIGTERM)" in out


@pytest.mark.slow  # as hosts over SSH (chaos/test_hosts_chaos.py) and programs (test_muster_run.py)
def test_two_nodes_start_again_when_a_rank_is_killed_on_one(tmp_path: Path) -> None:
    words = (
        *WORDS, "--devices", "cpu:1", "--nodes", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), "--max-steps", "100", "--epochs", "99",
        "--checkpoint-interval", "5steps", "--max-restarts", "2",
    )  # fmt: skip
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "muster", *words, "--node-rank", str(rank)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    wait_for_lines(tmp_path, 20)
    # A forked rank has the command line of what it was forked from, and no children.
    family = psutil.Process(nodes[1].pid).children(recursive=True)
    leaves = [p for p in family if "muster.supervisor" in command_line(p) and not p.children()]
    os.kill(leaves[-1].pid, signal.SIGKILL)
    ends = [node.communicate(timeout=300) for node in nodes]
    said = "\n".join(part for end in ends for part in end)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "restart 1 of 2" in ends[0][1] and "restart 1 of 2" in ends[1][1]
    assert steps(tmp_path) == list(range(1, 101))


def test_another_batch_size_is_another_training(
    muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    """The same folder would give the old results for the new question."""
    few = ("--devices", "cpu:1", "--max-steps", "3", "--no-tensorboard")
    words = ("train", "slow.py:Slow", *few, "--json")
    eight, *others = [
        json.loads(muster_main(*words, *more, "--dry-run").stdout)["run_dir"]
        for more in (("--batch-size", "8"), ("--batch-size", "16"), ("--precision", "bf16"))
    ]
    assert len({eight, *others}) == 3
    done = muster_cli(*words, "--batch-size", "8")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == eight  # a dry run names the folder that it will be
    other = muster_main(*words, "--batch-size", "16", "--run-dir", eight)
    assert other.returncode == 2
    assert "--batch-size 8, now 16" in other.stderr
