"""Gangs as jobs of a real SLURM (on loopback): sent, preempted, timed out, cancelled, followed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.conftest import MusterCli
from tests.json_schemas import check_printed
from tests.programs import slow_task
from tests.slurm_cluster import SlurmCluster
from tests.unit.train.rank_jobs import last_weights

from muster.run.folder import RunFolder
from muster.slurm.commands import job_status

pytestmark = pytest.mark.slurm

WORDS = (
    *("train", "task.py:Slow", "--global-batch", "8", "--batch-size", "4", "--epochs", "99"),
    *("--max-steps", "120", "--checkpoint-interval", "5steps", "--no-tensorboard"),
    *("--monitor-interval", "0"),
)
ON_SLURM = ("--on", "slurm", "--nodes", "2", "--devices", "cpu:1")
DIGITS = ("train", "digits", "--max-steps", "6", "--no-tensorboard", "--run-dir", "run")


@pytest.mark.slow
def test_two_nodes_train_as_two_ranks_of_one(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that is alone on its node has all of its cores, and two threads add in another order.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = muster_cli(*DIGITS, *ON_SLURM, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch      2 ranks x 32 per rank" in done.stdout  # what rank 0 printed, followed
    assert "RUNNING on n[1-2]" in done.stderr and "has ended well" in done.stderr
    here = muster_cli(*DIGITS[:-1], "here", "--devices", "cpu:2", timeout_s=300)
    assert here.returncode == 0, here.stderr
    check_same_weights(tmp_path / "run", tmp_path / "here")


def test_a_preempted_gang_goes_on_with_the_same_bits(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    write_task(tmp_path, seconds=0.2)
    with following(tmp_path, *WORDS, *ON_SLURM, "--run-dir", "run") as follower:
        job = job_of(tmp_path / "run", follower)
        await_steps(tmp_path / "run", 10)
        slurm.preempt()
        slurm.await_state(job, "PENDING")
        write_task(tmp_path, seconds=0)
        out, error = follower.communicate(timeout=300)
    assert follower.returncode == 0, out + error
    assert "1 rank on each of 2 nodes" in out
    assert "saved: asked to stop" in out and "resume     from step" in out
    assert "started again 1×" in error
    undisturbed = muster_cli(*WORDS, "--devices", "cpu:2", "--run-dir", "here", timeout_s=300)
    assert undisturbed.returncode == 0, undisturbed.stderr
    check_same_weights(tmp_path / "run", tmp_path / "here")


def test_a_cancelled_gang_leaves_no_rank_and_the_same_command_submits_anew(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    write_task(tmp_path, seconds=0.3)
    words = (*WORDS, *ON_SLURM, "--run-dir", "run")
    submitted = muster_cli(*words, "--no-wait", timeout_s=300)
    job = submitted.stdout.strip()
    assert submitted.returncode == 0 and job == job_of(tmp_path / "run"), submitted.stderr
    await_steps(tmp_path / "run", 10)
    write_task(tmp_path, seconds=3)  # not over before the last of those below has begun
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["argv"] == ["muster", *words, "--no-wait"]  # for `muster resume`, not a node's
    with following(tmp_path, *words) as leaver:
        await_line(leaver, f"job {job}: RUNNING")
        leaver.send_signal(signal.SIGINT)
        error = leaver.communicate(timeout=300)[1]
    assert leaver.returncode == 130 and f"The job {job} goes on" in error, error
    with following(tmp_path, *words) as follower:  # attaches, submits no second job
        await_line(follower, f"job {job} of this run is there")
        assert [entry["id"] for entry in slurm.squeue()] == [job]
        slurm.scancel(job)
        out, error = follower.communicate(timeout=300)
    assert follower.returncode == 130 and "was cancelled" in error, out + error
    slurm.await_state(job, "CANCELLED")
    await_nothing(slurm, job)
    assert slurm.squeue() == []  # it did not go back into the queue
    again = muster_cli(*words, "--no-wait", "--slurm-arg", "hold", "--json", timeout_s=300)
    assert again.returncode == 0, again.stderr
    assert check_printed("train", again.stdout)["job_id"] != job


def test_muster_cancel_keeps_what_is_saved_and_nothing_starts_again(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    write_task(tmp_path, seconds=0.3)
    job = muster_cli(*WORDS, *ON_SLURM, "--run-dir", "run", "--no-wait").stdout.strip()
    await_steps(tmp_path / "run", 10)
    write_task(tmp_path, seconds=3)
    asked = muster_cli("cancel", "run")
    assert "asked its ranks to save what they can and to end" in asked.stdout, asked.stderr
    slurm.await_state(job, "CANCELLED", "PENDING")
    assert slurm.state(job) == "CANCELLED"
    await_nothing(slurm, job)
    assert slurm.squeue() == []
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert muster_cli("status", "run").stdout.startswith("run: stopped\n")


@pytest.mark.slow  # a program that is begun anew, below; two nodes train above
def test_an_agent_on_two_nodes_and_begun_anew_by_a_job_that_is_left_alone(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    agent = (
        "train", "ppo", "--env", "CartPole-v1", "--num-steps", "256", "--num-envs", "4",
        "--rollout-steps", "32", "--hidden", "8", "--eval-episodes", "1", "--no-tensorboard",
    )  # fmt: skip
    done = muster_cli(*agent, *ON_SLURM, "--run-dir", "run", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has ended well" in done.stderr
    first = json.loads((tmp_path / "run" / "training_results.json").read_text())
    assert (first["num_ranks"], first["steps"]) == (2, 256)

    anew = (*agent, *ON_SLURM, "--run-dir", "run", "--restart", "--no-wait")
    left = muster_cli(*anew, timeout_s=300)
    assert left.returncode == 0, left.stderr
    [aside] = tmp_path.glob("run.before-*")
    assert f"the run so far is kept in {aside}" in left.stderr
    assert json.loads((aside / "training_results.json").read_text()) == first
    job = left.stdout.strip()
    assert "--restart" not in (tmp_path / "run" / "slurm" / "job.sh").read_text()
    slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED")
    assert slurm.state(job) == "COMPLETED", (tmp_path / f"run/slurm/job-{job}.log").read_text()
    check_same_weights(tmp_path / "run", aside)
    assert len(list(tmp_path.glob("run.before-*"))) == 1, "the job itself moved nothing aside"


def test_a_program_is_begun_anew_by_a_job_that_is_left_alone(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "p.py").write_text("print('begun')\n")
    words = ("run", "--on", "slurm", "--devices", "cpu:1", "--run-dir", "run")
    done = muster_cli(*words, "p.py")
    assert done.returncode == 0 and "has ended well" in done.stderr, done.stderr
    left = muster_cli(*words, "--restart", "--no-wait", "p.py")
    assert left.returncode == 0, left.stderr
    [aside] = tmp_path.glob("run.before-*")
    assert f"the run so far is kept in {aside}" in left.stderr
    assert "begun" in (aside / "logs" / "rank-0.log").read_text()
    job = left.stdout.strip()
    assert "--restart" not in (tmp_path / "run" / "slurm" / "job.sh").read_text()
    slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED")
    assert slurm.state(job) == "COMPLETED", (tmp_path / f"run/slurm/job-{job}.log").read_text()
    assert "begun" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert len(list(tmp_path.glob("run.before-*"))) == 1, "the job itself moved nothing aside"


def test_a_partition_that_is_not_there(slurm: SlurmCluster, muster_cli: MusterCli) -> None:
    done = muster_cli(*DIGITS, *ON_SLURM, "--partition", "gpu")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "SLURM has refused the job: invalid partition specified: gpu" in done.stderr
    assert "the partitions here are main, urgent" in done.stderr


def test_a_job_that_slurm_has_forgotten_is_not_alive(slurm: SlurmCluster) -> None:
    assert job_status("4000000").state == "UNKNOWN"
    assert not job_status("4000000").is_alive


def test_a_failing_script_gives_its_exit_code_and_where_to_look(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such data')\n")
    done = muster_cli("run", "--on", "slurm", "--devices", "cpu:1", "broken.py", timeout_s=300)
    assert done.returncode == 1, done.stderr
    assert "no such data" in done.stdout
    assert "has failed with exit code 1; what it printed: " in done.stderr


@pytest.mark.slow
def test_a_lost_node_sends_the_gang_back_into_the_queue(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    write_task(tmp_path, seconds=0.1)
    with following(tmp_path, *WORDS, *ON_SLURM, "--run-dir", "run") as follower:
        job = job_of(tmp_path / "run", follower)
        await_steps(tmp_path / "run", 10)
        slurm.node_down("n2")
        slurm.await_state(job, "PENDING")
        slurm.node_up("n2")
        write_task(tmp_path, seconds=0)
        out, error = follower.communicate(timeout=300)
    assert follower.returncode == 0, out + error
    assert "resume     from step" in out
    undisturbed = muster_cli(*WORDS, "--devices", "cpu:2", "--run-dir", "here", timeout_s=300)
    assert undisturbed.returncode == 0, undisturbed.stderr
    check_same_weights(tmp_path / "run", tmp_path / "here")


@pytest.mark.slow
def test_at_its_time_limit_it_saves_and_is_sent_again(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    """SLURM looks at limits twice a minute, so this takes minutes."""
    write_task(tmp_path, seconds=0.5)
    words = (*WORDS, "--max-steps", "150", *ON_SLURM, "--time", "2", "--run-dir", "run")
    with following(tmp_path, *words) as follower:
        job = job_of(tmp_path / "run", follower)
        slurm.await_state(job, "RUNNING")
        await_steps(tmp_path / "run", 5)
        slurm.await_state(job, "PENDING", timeout_s=300)
        write_task(tmp_path, seconds=0)  # the second start is to be the last
        out, error = follower.communicate(timeout=300)
    assert follower.returncode == 0, out + error
    assert "saved: asked to stop (SIGTERM)" in out and "resume     from step" in out


@pytest.mark.slow
def test_a_script_that_does_not_save_is_not_sent_again_at_its_time_limit(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    words = ("run", "--on", "slurm", "--devices", "cpu:1", "--time", "1", "sleep.py")
    done = muster_cli(*words, timeout_s=300)
    assert done.returncode == 130, done.stdout + done.stderr
    assert slurm.squeue() == []


# ----------------------------------------------------------------------------------------


def write_task(folder: Path, *, seconds: float) -> None:
    """The pace is no code, so it may change while the training goes on."""
    (folder / "task.py").write_text(slow_task(0.05))
    (folder / "pace").write_text(repr(seconds))


@contextmanager
def following(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def job_of(run: Path, follower: subprocess.Popen[str] | None = None) -> str:
    path = run / "slurm" / "job.json"
    while not path.exists():
        assert follower is not None and follower.poll() is None, "no job was submitted"
        time.sleep(0.05)
    return str(json.loads(path.read_text())["job_id"])


def await_steps(run: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or _steps(run) < count:
        logs = "".join(path.read_text() for path in (run / "slurm").glob("job-*.log"))
        assert time.monotonic() < deadline, f"no {count} steps were made: {logs}"
        time.sleep(0.1)


def _steps(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count('"train"')


def await_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}")


def await_nothing(slurm: SlurmCluster, job: str) -> None:
    deadline = time.monotonic() + 300
    while left := slurm.processes(job):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


def check_same_weights(one: Path, other: Path) -> None:
    found, wanted = last_weights(RunFolder(one)), last_weights(RunFolder(other))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
