"""Why nothing runs on SLURM: it is said where there is no terminal, and in the error at the end."""

from __future__ import annotations

import subprocess
import sys
import time
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
    done = muster_cli(*words, timeout_s=120)
    assert done.returncode == 3, done.stdout + done.stderr
    error = done.stderr[done.stderr.index("No worker is left") :]
    assert "failed (it printed: no such module" in error, error
    output = Path(error.partition("Hint: see ")[2].partition(";")[0])
    assert output.parent == Path("run/pilots/jobs")
    assert "no such module" in (tmp_path / output).read_text()


def test_why_it_waits_is_said_once_and_in_the_status(
    slurm: SlurmCluster, words: tuple[str, ...], muster_cli: MusterCli, tmp_path: Path
) -> None:
    held = (*words, "--slurm-arg", "begin=now+1hour", "--workers", "1")
    with (tmp_path / "log").open("wb") as log:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "muster", *held], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while "BeginTime" not in (status := muster_cli("status", "run").stdout):
            assert time.monotonic() < deadline, status + (tmp_path / "log").read_text()
            time.sleep(0.2)
        assert "slurm/0: starting waits for SLURM: BeginTime (job " in status
        time.sleep(1.5)  # another answer of squeue, which is no news
        said = (tmp_path / "log").read_text()
        assert said.count("slurm/0 waits for SLURM: BeginTime (job ") == 1, said
    finally:
        sweep.terminate()
        sweep.wait(60)
