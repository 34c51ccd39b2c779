"""Why nothing runs on SLURM: it is said where there is no terminal, and in the error at the end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "target.py").write_text("def f(x: int):\n    return {'x': x}\n")
    options = ("--on", "slurm", "--run-dir", "run", "--monitor-interval", "0")
    return ("sweep", "target.py:f", "--grid", "x=1", *options)


def test_a_start_that_failed_is_told_with_what_it_printed(
    slurm: SlurmCluster,
    words: tuple[str, ...],
    muster_cli: MusterCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "site.toml").write_text('setup = ["echo no such module; exit 3"]\n')
    monkeypatch.setenv("MUSTER_SLURM_SITE", str(tmp_path / "site.toml"))
    done = muster_cli(*words, timeout_s=300)
    assert done.returncode == 3, done.stdout + done.stderr
    error = done.stderr[done.stderr.index("No worker is left") :]
    assert "failed (it printed: no such module" in error, error
    output = Path(error.partition("Hint: see ")[2].partition(";")[0])
    assert output.parent == Path("run/pilots/jobs")
    assert "no such module" in (tmp_path / output).read_text()


def test_why_it_waits_is_said_once_and_in_the_status(
    slurm: SlurmCluster, words: tuple[str, ...], muster_main: MusterCli, tmp_path: Path
) -> None:
    held = (*words, "--slurm-arg", "begin=now+1hour", "--workers", "1")
    with (tmp_path / "log").open("wb") as log:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "muster", *held], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 300
        while "BeginTime" not in (status := muster_main("status", "run").stdout):
            assert time.monotonic() < deadline, status + (tmp_path / "log").read_text()
            time.sleep(0.2)
        assert "slurm/0: starting waits for SLURM: BeginTime (job " in status
        time.sleep(1.5)  # another answer of squeue, which is no news
        said = (tmp_path / "log").read_text()
        assert said.count("slurm/0 waits for SLURM: BeginTime (job ") == 1, said
    finally:
        sweep.terminate()
        sweep.wait(300)


@pytest.fixture
def closed(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The partition urgent starts no jobs."""
    slurm.run("scontrol", "update", "PartitionName=urgent", "State=DOWN")
    yield slurm
    slurm.run("scontrol", "update", "PartitionName=urgent", "State=UP")


def test_a_sweep_that_can_never_start_ends_with_the_reason(
    closed: SlurmCluster, words: tuple[str, ...], muster_cli: MusterCli
) -> None:
    done = muster_cli(*words, "--partition", "urgent", timeout_s=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "SLURM will never start job " in done.stderr
    assert "its partition is down (PartitionDown)." in done.stderr
    assert "name another --partition" in done.stderr
    assert "each worker asks SLURM for no GPU; --gpus-per-worker N" in done.stderr + done.stdout
    assert closed.squeue() == []


@pytest.mark.thorough
def test_a_gang_that_can_never_start_ends_with_the_reason(
    closed: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text("print(1)\n")
    words = ("run", "--on", "slurm", "--partition", "urgent", "--run-dir", "r%j", "--devices")
    done = muster_cli(*words, "cpu:1", "p.py", timeout_s=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "its partition is down (PartitionDown)." in done.stderr
    assert closed.squeue() == []


def test_a_percent_sign_and_a_letter_in_the_run_folder_mean_themselves(
    slurm: SlurmCluster, words: tuple[str, ...], muster_cli: MusterCli, tmp_path: Path
) -> None:
    again = [word if word != "run" else "run%j-%A" for word in words]
    done = muster_cli(*again, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"run%j-%A", ".muster"}
    jobs = {path.name for path in (tmp_path / "run%j-%A" / "pilots" / "jobs").iterdir()}
    assert len(jobs) == 2, jobs  # the script and the output
