"""The loopback SLURM itself: what the other tests of SLURM rely on."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from tests.processes import is_gone
from tests.slurm_cluster import SlurmCluster, loopback

pytestmark = pytest.mark.slurm


def test_two_jobs_get_different_gpus_of_both_nodes(slurm: SlurmCluster) -> None:
    show = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    words = ["srun", "-N2", "--ntasks=2", "--gres=gpu:2", "bash", "-c", show]
    assert sorted(slurm.run(*words).splitlines()) == ["n1 0,1", "n2 0,1"]


@pytest.mark.slow
def test_a_preempted_job_runs_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = 'echo $SLURM_RESTART_COUNT >> starts; [ "$SLURM_RESTART_COUNT" = 1 ] || sleep 600'
    words = ["sbatch", "--parsable", "--requeue", "--nodelist=n1", "--output=o", f"--wrap={script}"]
    job = slurm.run(*words, cwd=tmp_path).strip()
    slurm.await_state(job, "RUNNING")
    _await(tmp_path / "starts")
    slurm.preempt(nodes=("n1",))
    slurm.await_state(job, "PENDING")
    slurm.await_state(job, "COMPLETED")
    assert (tmp_path / "starts").read_text() == "\n1\n"


def test_a_node_that_is_lost_takes_its_jobs_along(slurm: SlurmCluster, tmp_path: Path) -> None:
    words = ["sbatch", "--parsable", "--no-requeue", "--nodelist=n2", "--output=/dev/null"]
    job = slurm.run(*words, "--wrap=touch begun; sleep 600", cwd=tmp_path).strip()
    _await(tmp_path / "begun")
    slurm.node_down("n2")
    slurm.await_state(job, "NODE_FAIL")
    assert slurm.processes(job) == []
    slurm.node_up("n2")
    assert slurm.run("srun", "-w", "n2", "hostname")


def test_it_dies_with_its_starter(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Also beside another one, at ports of its own."""
    root = tmp_path / "second"
    with subprocess.Popen(["sleep", "600"]) as starter:
        loopback("up", root, "--with-pid", str(starter.pid))
        pids = [int(path.read_text()) for path in root.glob("*.pid")]
        assert len(pids) == 5  # munged, slurmctld, two slurmd, and what watches
        starter.kill()
    deadline = time.monotonic() + 300
    while root.exists() or not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "the cluster outlives its starter"
        time.sleep(0.1)


def _await(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.05)
