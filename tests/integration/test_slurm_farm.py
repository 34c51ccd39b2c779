"""Sweeps and maps on a real SLURM, which runs on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program
from tests.slurm_cluster import SlurmCluster

import muster
from muster.api.runs import Run
from muster.base.journal import read_journal
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.mailbox import read_heartbeat
from muster.run.folder import RunFolder

pytestmark = pytest.mark.slurm

TARGET = read_program("slurm_tasks.py")
T = TypeVar("T")
_LIMIT_S = 300.0


def until(found: Callable[[], T], what: str) -> T:
    deadline = time.monotonic() + _LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what}: not within {_LIMIT_S:g} s"
        time.sleep(0.05)
    return value


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target.py"
    path.write_text(TARGET)
    return path


@contextmanager
def started(folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A coordinator in the background; killed with what it started when the test fails."""
    words = [sys.executable, "-m", "muster", *args]
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, out
    return out


def rows(folder: Path) -> list[dict[str, object]]:
    names = ("x", "y", "seed", "state", "n", "starts", "attempts")
    table = Run(folder).results()
    found = [{k: row[k] for k in names if k in row} for row in table.to_pylist()]
    return sorted(found, key=lambda row: json.dumps(row, sort_keys=True))


def attempts(folder: Path) -> list[str]:
    """The outcomes of all attempts in the ledger, those of a task in their order."""
    import sqlite3

    with sqlite3.connect(folder / "ledger.sqlite") as db:
        found = [
            row[0] for row in db.execute("SELECT outcome FROM attempts ORDER BY task_id, token")
        ]
    db.close()
    return found


def arrays(folder: Path) -> set[str]:
    """The arrays that were submitted for a run."""
    names = (path.name for path in RunFolder(folder).job_files.glob("*_submission.sh"))
    return {name.partition("_")[0] for name in names}


# ------------------------------------------------------------------ the same as without it


def test_a_sweep_gives_what_it_gives_here_and_leaves_nothing(
    slurm: SlurmCluster, target: Path, muster_cli: MusterCli, tmp_path: Path
) -> None:
    grid = ("sweep", f"{target}:square", "--grid", "x=1,2,3", "--seeds", "5")
    there = muster_cli(
        *grid, "--on", "slurm", "--workers", "2", "--gpus-per-worker", "1", "--run-dir", "there",
        timeout_s=300,
    )  # fmt: skip
    assert there.returncode == 0, there.stderr
    assert slurm.squeue() == []
    here = muster_cli(*grid, "--devices", "cpu:2", "--run-dir", "here")
    assert here.returncode == 0, here.stderr
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    gpus = set(Run(tmp_path / "there").results()["gpus"].to_pylist())
    assert gpus <= {"0", "1"}, "each worker sees the GPU that SLURM gave it"
    assert len(arrays(tmp_path / "there")) == 1


def test_a_task_above_its_memory_limit_fails_there_too(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    """It is ended by its pilot before SLURM has a reason to end the job, whose others go on."""
    (tmp_path / "takes.py").write_text(
        "import time\n\ndef takes(x):\n    held = bytearray(x << 20)\n"
        "    time.sleep(600 if x > 400 else 0)\n    return {'y': x}\n"
    )
    done = muster_cli(
        "sweep", "takes.py:takes", "--grid", "x=600,1,2", "--on", "slurm", "--memory", "400M",
        "--run-dir", "r", timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "of 400 MiB allowed (--memory)" in done.stdout
    states = {row["x"]: row["state"] for row in rows(tmp_path / "r")}
    assert states == {1: "done", 2: "done", 600: "failed"}
    assert len(arrays(tmp_path / "r")) == 1


def test_tasks_are_added_to_a_sweep_at_work(
    slurm: SlurmCluster, target: Path, muster_cli: MusterCli, tmp_path: Path
) -> None:
    """An urgent one begins before those that wait, in the same jobs."""
    words = ("sweep", f"{target}:long", "--grid", "x=1,2,3,4", "--grid", f"folder={tmp_path}",
             "--on", "slurm", "--run-dir", "r", "--quiet")  # fmt: skip
    with started(tmp_path, *words) as process:
        until((tmp_path / "began-1").exists, "the first task")
        added = muster_cli("add", "r", "--grid", "x=7", "--priority", "1", timeout_s=120)
        assert "1 task added; process" in added.stdout, added.stderr
        (tmp_path / "go").touch()
        ended(process)
    assert [row["x"] for row in rows(tmp_path / "r")] == [1, 2, 3, 4, 7]
    began = {n: (tmp_path / f"began-{n}").stat().st_mtime_ns for n in (1, 2, 3, 4, 7)}
    assert began[7] < began[4]
    assert all((tmp_path / f"began-{n}").read_text() == "x" for n in began), "each once"
    assert len(arrays(tmp_path / "r")) == 1


def test_the_dry_run_prints_what_is_sent(
    slurm: SlurmCluster,
    target: Path,
    muster_cli: MusterCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = tmp_path / "slurm.toml"
    site.write_text('partition = "main"\nsetup = ["export FROM_SITE=1"]\n')
    monkeypatch.setenv("MUSTER_SLURM_SITE", str(site))
    words = (
        "sweep", f"{target}:square", "--grid", "x=1,2", "--on", "slurm", "--workers", "4",
        "--cpus-per-worker", "2", "--mem", "300M", "--time", "5", "--warn-before", "30s",
        "--slurm-arg", "comment=hello", "--run-dir", "run",
    )  # fmt: skip
    dry = muster_cli(*words, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    script = json.loads(dry.stdout)["script"]
    assert not (tmp_path / "run").exists()
    for line in (
        "#SBATCH --array=0-1", "#SBATCH --partition=main", "#SBATCH --mem=300M",
        "#SBATCH --time=5", "#SBATCH --cpus-per-task=2", "#SBATCH --signal=USR2@30",
        "#SBATCH --comment=hello", "#SBATCH --requeue", "export FROM_SITE=1",
    ):  # fmt: skip
        assert line in script.splitlines(), script
    plain = muster_cli(*words, "--dry-run")
    assert script.rstrip() in plain.stdout
    done = muster_cli(*words, timeout_s=300)
    assert done.returncode == 0, done.stderr
    [sent] = RunFolder(tmp_path / "run").job_files.glob("*_submission.sh")
    assert sent.read_text() == script


def test_a_map_gives_what_it_gives_here(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "stage.py").write_text("def double(record):\n    return {'y': 2 * record['x']}\n")
    lines = "".join(json.dumps({"x": x}) + "\n" for x in range(500))
    (tmp_path / "in.jsonl").write_text(lines)
    words = ("map", "stage.py:double", "--input", "in.jsonl")
    there = muster_cli(
        *words, "--output", "there.jsonl", "--on", "slurm", "--workers", "2", timeout_s=300
    )
    assert there.returncode == 0, there.stderr
    here = muster_cli(*words, "--output", "here.jsonl", "--devices", "cpu:2")
    assert here.returncode == 0, here.stderr
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    assert slurm.squeue() == []


# ------------------------------------------------------------------ coordinators come and go


def test_a_second_coordinator_goes_on_with_the_workers_of_the_first(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = (
        "sweep", f"{target}:long", "--grid", "x=1,2", "--grid", f"folder={tmp_path}",
        "--on", "slurm", "--workers", "2", "--run-dir", str(run),
    )  # fmt: skip
    began = [tmp_path / f"began-{x}" for x in (1, 2)]
    with started(tmp_path, *words) as first:
        until(lambda: all(path.exists() for path in began), "both tasks begin")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    with started(tmp_path, "resume", str(run)) as second:
        until(lambda: read_heartbeat(RunFolder(run)).session == 2, "the second one is at work")
        (tmp_path / "go").touch()
        ended(second)
    assert [path.read_text() for path in began] == ["x", "x"], "no task was begun twice"
    assert [row["state"] for row in rows(run)] == ["done", "done"]
    assert attempts(run) == ["ok", "ok"]
    assert len(arrays(run)) == 1, "nothing was submitted again"
    assert slurm.squeue() == []


def test_results_wait_for_a_coordinator_wherever_it_runs(
    slurm: SlurmCluster, target: Path, tmp_path: Path, muster_cli: MusterCli
) -> None:
    run = tmp_path / "run"
    words = ("sweep", f"{target}:long", "--grid", "x=1", "--grid", f"folder={tmp_path}")
    with started(tmp_path, *words, "--on", "slurm", "--run-dir", str(run)) as first:
        until((tmp_path / "began-1").exists, "the task begins")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    outbox = next(run.glob("pilots/0/*/outbox"))
    size = outbox.stat().st_size
    (tmp_path / "go").touch()
    until(lambda: outbox.stat().st_size > size, "the result is in the outbox")
    done = muster_cli(*words, "--devices", "cpu:1", "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "began-1").read_text() == "x", "what was done is not done again"
    assert [row["state"] for row in rows(run)] == ["done"]
    until(lambda: not slurm.squeue(), "the pilot that is not needed ends of itself")


def test_an_older_coordinator_that_wakes_up_ends_and_the_run_goes_on(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    """Its host was held up for so long that the file server took its lock away."""
    run = tmp_path / "run"
    words = (
        "sweep", f"{target}:long", "--grid", "x=1,2", "--grid", f"folder={tmp_path}",
        "--on", "slurm", "--workers", "2", "--run-dir", str(run),
    )  # fmt: skip
    began = [tmp_path / f"began-{x}" for x in (1, 2)]
    with started(tmp_path, *words) as older:
        until(lambda: all(path.exists() for path in began), "both tasks begin")
        os.killpg(older.pid, signal.SIGSTOP)
        RunFolder(run).lock.unlink()
        with started(tmp_path, "resume", str(run)) as newer:
            until(lambda: read_heartbeat(RunFolder(run)).session == 2, "the newer one is at work")
            os.killpg(older.pid, signal.SIGCONT)
            out, _ = older.communicate(timeout=_LIMIT_S)
            assert older.returncode == 3 and "Another coordinator has gone on" in out, out
            (tmp_path / "go").touch()
            ended(newer)
    assert [path.read_text() for path in began] == ["x", "x"], "no task was begun twice"
    assert attempts(run) == ["ok", "ok"]
    assert len(arrays(run)) == 1, "nothing was submitted again"
    assert slurm.squeue() == []


def killed(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_same_command_goes_on_when_coordinator_and_jobs_are_gone(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    """The pilot is killed while it leaves: its mailbox says that, and never goodbye."""
    run = tmp_path / "run"
    words = (
        "sweep", f"{target}:long", "--grid", "x=1", "--grid", f"folder={tmp_path}",
        "--on", "slurm", "--run-dir", str(run),
    )  # fmt: skip
    with started(tmp_path, *words) as first:
        until((tmp_path / "began-1").exists, "the task begins")
        killed(first)
    [job] = slurm.squeue()
    slurm.scancel(job["id"])
    until(lambda: not slurm.squeue(), "the job is gone")
    (tmp_path / "go").touch()
    with started(tmp_path, *words) as second:
        ended(second)
    assert (tmp_path / "began-1").read_text() == "xx"
    assert len(arrays(run)) == 2


def test_jobs_with_other_resources_do_not_serve_the_next_coordinator(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("sweep", f"{target}:square", "--grid", "x=1,2", "--on", "slurm", "--run-dir", str(run))
    with started(tmp_path, *words, "--slurm-arg", "begin=now+1hour") as first:
        until(lambda: arrays(run) and slurm.squeue(), "a job waits for its time")
        killed(first)
    with started(tmp_path, *words) as second:
        ended(second)
    assert len(arrays(run)) == 2
    assert slurm.squeue() == []


def test_a_job_that_somebody_cancels_is_written_down_and_replaced(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    """The run folder has a name that SLURM would expand."""
    run = tmp_path / "50%j"
    words = (
        "sweep", f"{target}:long", "--grid", "x=1", "--grid", f"folder={tmp_path}",
        "--on", "slurm", "--run-dir", str(run),
    )  # fmt: skip
    with started(tmp_path, *words) as process:
        until((tmp_path / "began-1").exists, "the task begins")
        [job] = slurm.squeue()
        slurm.scancel(job["id"])
        journal = RunFolder(run).events
        until(lambda: "job_cancelled" in journal.read_text(), "the journal says so")
        (tmp_path / "go").touch()
        ended(process)
    [line] = [line for line in read_journal(journal) if line["event"] == "job_cancelled"]
    assert line["text"].startswith(f"job {job['id']} was cancelled with scancel; Ctrl-C or")
    assert {path.name for path in run.glob("pilots/jobs/*.out")} >= {f"{job['id']}.out"}


def test_resume_of_a_run_that_python_made(
    slurm: SlurmCluster, target: Path, tmp_path: Path, muster_cli: MusterCli
) -> None:
    run = tmp_path / "run"
    made = muster.sweep(
        f"{target}:square", grid={"x": [1, 2]}, run_dir=run, executor="slurm", retries=2,
        cluster=ClusterRequest(num_workers=2),
    )  # fmt: skip
    assert made.exit_code == 0
    again = muster_cli("resume", str(run), "--json", timeout_s=300)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["counts"]["done"] == 2


# ------------------------------------------------------------------ SLURM takes workers away


def test_a_worker_that_is_warned_of_its_time_limit_saves_and_is_requeued(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    """The warning is sent by hand here; the slow test below waits for a real time limit."""
    run = tmp_path / "run"
    with started(tmp_path, *counting(target, run)) as process:
        until((tmp_path / "counting").exists, "it counts")
        [job] = slurm.squeue()
        slurm.scancel("--signal=USR2", job["id"])
        until(lambda: not running(slurm, job["id"]), "the job leaves its node")
        ended(process)
    assert attempts(run) == ["job_timeout", "ok"]
    [row] = rows(run)
    assert (row["n"], row["starts"], row["state"]) == (30, 2, "done")
    assert len(arrays(run)) == 1, "the same job went on"


@pytest.mark.slow
def test_a_preempted_worker_saves_and_goes_on_later(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(tmp_path, *counting(target, run), "--partition", "main") as process:
        until((tmp_path / "counting").exists, "it counts")
        [job] = slurm.squeue()
        slurm.preempt()
        until(lambda: not running(slurm, job["id"]), "the job leaves its node")
        ended(process)
    assert attempts(run) == ["preempted", "ok"]
    [row] = rows(run)
    assert (row["n"], row["starts"], row["state"]) == (30, 2, "done")


@pytest.mark.slow
def test_a_task_goes_on_over_the_time_limit_of_its_job(
    slurm: SlurmCluster, target: Path, tmp_path: Path, muster_cli: MusterCli
) -> None:
    run = tmp_path / "run"
    words = (*counting(target, run), "--time", "1", "--warn-before", "20s")
    done = muster_cli(*words, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert attempts(run) == ["job_timeout", "ok"]
    assert [row["starts"] for row in rows(run)] == [2]


def counting(target: Path, run: Path) -> tuple[str, ...]:
    return (
        "sweep", f"{target}:counting", "--grid", "to=30", "--grid", f"folder={run.parent}",
        "--on", "slurm", "--run-dir", str(run), "--retries", "0",
    )  # fmt: skip


def running(slurm: SlurmCluster, job: str) -> bool:
    return any(row["id"] == job and row["state"] == "RUNNING" for row in slurm.squeue())


def test_a_worker_that_waits_in_the_queue_says_why_and_is_cancelled_with_the_run(
    slurm: SlurmCluster, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = (
        "sweep", f"{target}:square", "--grid", "x=1", "--on", "slurm", "--run-dir", str(run),
        "--timeout", "1s", "--slurm-arg", "begin=now+1hour",
    )  # fmt: skip
    with started(tmp_path, *words) as process:

        def shown() -> bool:
            try:
                [worker] = json.loads((run / "status.json").read_text())["workers"]
            except (OSError, ValueError):
                return False
            return "waits for SLURM: BeginTime" in str(worker["progress"])

        until(shown, "the picture says that it waits, and why")
        assert len(slurm.squeue()) == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 130 or process.returncode == 1
    assert slurm.squeue() == []


# ------------------------------------------------------------------ mistakes


def test_what_sbatch_refuses_is_told_in_its_words(
    slurm: SlurmCluster, target: Path, muster_cli: MusterCli
) -> None:
    done = muster_cli(
        "sweep", f"{target}:square", "--grid", "x=1", "--on", "slurm", "--partition", "nowhere"
    )
    assert done.returncode == 3
    assert "SLURM has refused the job" in done.stderr
    assert "invalid partition" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_slurm_the_error_says_so(
    target: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = muster_main("sweep", f"{target}:square", "--grid", "x=1", "--on", "slurm")
    assert done.returncode == 3
    assert "There is no squeue on this machine." in done.stderr
    assert "login node" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--mem", "lots"), "--mem lots"),
        (("--time", "soon"), "--time soon"),
        (("--workers", "0"), "--workers 0"),
        (("--gpus-per-worker", "0.5"), "SLURM gives whole GPUs to a job"),
        (("--resource", "ssd=1"), "--resource has no effect with --on slurm"),
        (("--slurm-arg", "array=3"), "muster sets this option itself"),
        (("--warn-before", "0s"), "--warn-before 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    target: Path, muster_main: MusterCli, words: tuple[str, ...], says: str
) -> None:
    done = muster_main("sweep", f"{target}:square", "--grid", "x=1", "--on", "slurm", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


SETUP = """
import os

def word(x: int) -> dict:
    return {"word": os.environ["WORD"]}

if __name__ == "__main__":
    print("WORD", os.environ["WORD"])
"""


@pytest.mark.thorough
def test_lines_of_setup_come_before_the_work_of_a_job_and_end_it_where_one_fails(
    slurm: SlurmCluster, muster_cli: MusterCli, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(SETUP)
    good = ("--on", "slurm", "--setup", 'WORD="it\'s up"', "--setup", "export WORD", "--run-dir")
    sweep = ("sweep", "t.py:word", "--grid", "x=1,2")
    done = muster_cli(*sweep, *good, "swept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["word"] for row in Run(tmp_path / "swept").results().to_pylist()] == ["it's up"] * 2
    done = muster_cli("run", "--devices", "cpu:1", *good, "ran", "t.py")
    assert done.returncode == 0 and "WORD it's up" in done.stdout, done.stdout + done.stderr
    bad = ("--on", "slurm", "--setup", "module load no_such_module", "--run-dir")
    done = muster_cli(*sweep, *bad, "bad-sweep")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "--setup has failed: module load no_such_module" in done.stderr, done.stderr
    done = muster_cli("run", "--devices", "cpu:1", *bad, "bad-run", "t.py")
    assert done.returncode == 97 and "failed with exit code 97" in done.stderr, done.stderr
    assert "--setup has failed: module load no_such_module" in done.stdout
