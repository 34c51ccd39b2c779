"""Handing runs in to SLURM: whose job is found again, beginning anew, and what is refused.

SLURM's commands are small scripts that answer what a real one has answered; the real SLURM is in
tests/integration/test_slurm_gang.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli

from muster.api.gangs.work import Entry, GangWork, Script
from muster.api.slurm.gang import NodeStart, SlurmGang, SlurmJob, hand_in, options_on_node
from muster.api.start.earlier_work import move_aside
from muster.api.start.options import GangOptions
from muster.base.code import Code
from muster.base.errors import PlanMismatchError, SetupError, UsageError
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.run.session import open_run
from muster.slurm.commands import typed_for_job
from muster.slurm.request import JobRequest

ARGV = ("muster", "train", "har", "--on", "slurm")


class Queue:
    """Numbers the jobs that are sent to it from 90 on; all are in one state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sent = folder / "sent"
        self._command("sbatch", f"echo x >> {sent}; echo $((89 + $(wc -l < {sent})))")
        self._command("scancel", f'echo "$@" >> {folder}/cancelled')
        self.squeue()
        self.show("PENDING")

    def refuse(self, words: str) -> None:
        self._command("sbatch", f"echo '{words}' >&2; exit 1")

    def squeue(self, *lines: str) -> None:
        self._command("squeue", "\n".join(f"echo '{line}'" for line in lines))

    def show(self, state: str) -> None:
        self._command("scontrol", f"echo JobId=7 JobState={state} Restarts=0 ExitCode=0:0")

    def cancelled(self) -> list[str]:
        return (self._folder / "cancelled").read_text().splitlines()

    def _command(self, name: str, line: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Queue(folder)


def gang_of(path: Path, *, lr: float = 1e-3, code: Code | None = None, **values: Any) -> SlurmGang:
    folder, options = RunFolder(path), GangOptions(slurm=JobRequest())
    entry = Entry(target="muster.train.loop:run_rank", params={"lr": lr})
    work = GangWork(folder=folder, program=entry, kind="train", code=code or {})
    renew = work.renewal(options, ARGV)
    return SlurmGang(folder=folder, request=JobRequest(), kind="train", renew=renew, **values)


def send(path: Path, **values: Any) -> SlurmJob:
    return hand_in(gang_of(path, **values))


def of_an_older_muster(path: Path) -> None:
    """Its jobs had no record of the run beside them, and named what was typed."""
    folder = RunFolder(path)
    job = {**json.loads(folder.slurm_job.read_bytes()), "script": "other", "argv": list(ARGV)}
    folder.slurm_job.write_text(json.dumps(job))
    folder.run_json.unlink()


def test_the_same_command_finds_the_job_that_lives(queue: Queue, tmp_path: Path) -> None:
    first, again = send(tmp_path / "run"), send(tmp_path / "run")
    assert (first.job_id, first.is_new) == ("90", True)
    assert (again.job_id, again.is_new, again.is_same) == ("90", False, True)
    assert not send(tmp_path / "run", lr=0.1).is_same
    queue.show("COMPLETED")
    assert send(tmp_path / "run").job_id == "91"


def test_a_copied_folder_does_not_follow_the_job_of_the_original(
    queue: Queue, tmp_path: Path
) -> None:
    send(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    assert move_aside(copy, "train") is not None, "the original's job does not work on the copy"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert send(tmp_path / "copy").job_id == "91"
    assert send(tmp_path / "run").job_id == "90", "the original still has its own"


def test_a_folder_that_has_moved_keeps_its_job(queue: Queue, tmp_path: Path) -> None:
    send(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert send(moved).job_id == "90"


def test_a_record_from_before_folders_had_ids_is_followed(queue: Queue, tmp_path: Path) -> None:
    send(tmp_path / "run")
    path = RunFolder(tmp_path / "run").slurm_job
    record = json.loads(path.read_text())
    del record["folder"]
    path.write_text(json.dumps(record))
    assert send(tmp_path / "run").is_new is False


def test_beginning_anew_is_refused_while_the_job_lives(queue: Queue, tmp_path: Path) -> None:
    send(tmp_path / "run")
    with pytest.raises(SetupError, match=r"cannot be moved aside: job 90 still work") as caught:
        send(tmp_path / "run", restart=True)
    assert "scancel" in str(caught.value)
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_beginning_anew_keeps_the_run_so_far_and_submits(queue: Queue, tmp_path: Path) -> None:
    first = send(tmp_path / "run", restart=True)
    assert first.aside is None, "there was nothing to move"
    (tmp_path / "run" / "metrics.jsonl").write_text("earlier\n")
    queue.show("COMPLETED")
    anew = send(tmp_path / "run", restart=True)
    assert (anew.job_id, anew.is_new) == ("91", True)
    assert anew.aside is not None and anew.aside.name.startswith("run.before-")
    assert (anew.aside / "metrics.jsonl").read_text() == "earlier\n"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_record_is_there_before_the_job(queue: Queue, tmp_path: Path) -> None:
    send(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    record = read_run(folder)
    assert (record.kind, record.argv, record.options["slurm"]["num_nodes"]) == ("train", ARGV, 1)
    assert f"muster resume {folder.path} --node-rank" in folder.slurm_script.read_text()
    assert not folder.events.exists(), "it has not begun"


def test_a_refused_job_leaves_no_run_and_no_other_record(queue: Queue, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    queue.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    with pytest.raises(SetupError, match="SLURM has refused the job"):
        send(folder.path)
    assert not folder.exists()
    Queue(tmp_path / "bin")
    assert send(folder.path).is_new
    before = folder.run_json.read_bytes()
    queue.show("COMPLETED")
    queue.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    with pytest.raises(SetupError, match="SLURM has refused the job"):
        send(folder.path, lr=0.1, code={"t.py": "new"})
    assert folder.run_json.read_bytes() == before


def test_where_slurm_does_not_answer_the_job_may_be_there_and_finds_its_record(
    queue: Queue, tmp_path: Path
) -> None:
    queue.refuse("sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    with pytest.raises(SetupError, match="does not answer"):
        send(tmp_path / "run")
    assert read_run(RunFolder(tmp_path / "run")).argv == ARGV
    Queue(tmp_path / "bin")
    assert send(tmp_path / "run").is_new


def test_a_node_runs_what_was_handed_in_or_says_what_has_changed(
    queue: Queue, tmp_path: Path
) -> None:
    folder, submitted = RunFolder(tmp_path / "run"), {"t.py": "one", "u.py": "two"}
    send(folder.path, code=submitted)
    node = NodeStart({"node_rank": 1, "master_addr": "n1", "master_port": 29400}, ARGV)
    options = GangOptions(slurm=JobRequest(num_nodes=2), restart=True)
    found = options_on_node(node, folder, options, submitted)
    assert (found.num_nodes, found.node_rank, found.master_port) == (2, 1, 29400)
    assert found.slurm is None and not found.restart
    changed = {**submitted, "u.py": "three"}
    with pytest.raises(PlanMismatchError, match=r"was submitted to SLURM: u\.py\. The job") as told:
        options_on_node(node, folder, options, changed)
    assert "submit it again: muster train har --on slurm" in str(told.value)
    allowed = GangOptions(slurm=JobRequest(num_nodes=2), allow_changed_code=True)
    assert options_on_node(node, folder, allowed, changed).num_nodes == 2


def test_a_job_of_an_older_muster_is_followed_and_says_what_was_typed(
    queue: Queue, tmp_path: Path
) -> None:
    send(tmp_path / "run")
    of_an_older_muster(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    again = send(folder.path)
    assert (again.job_id, again.is_new, again.is_same) == ("90", False, True)
    assert typed_for_job(folder, "90") == ARGV
    assert typed_for_job(folder, "91") is typed_for_job(folder, None) is None
    shutil.copytree(folder.path, tmp_path / "copy")
    assert typed_for_job(RunFolder(tmp_path / "copy"), "90") is None


def test_a_script_for_a_folder_whose_job_lives_is_refused(queue: Queue, tmp_path: Path) -> None:
    send(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(UsageError, match="is the folder of job 90, which has not ended"):
        gang_of(tmp_path / "run", lr=0.1).make_ready()
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    queue.show("COMPLETED")
    gang_of(tmp_path / "run", lr=0.1).make_ready()
    assert read_run(RunFolder(tmp_path / "run")).spec["program"]["params"] == {"lr": 0.1}
    (tmp_path / "run" / "metrics.jsonl").write_text("earlier\n")
    gang_of(tmp_path / "run", restart=True).make_ready()
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "moved aside, as it is asked for"


def test_a_run_that_waits_says_so_and_is_cancelled_in_the_queue(
    queue: Queue, tmp_path: Path, muster_main: MusterCli
) -> None:
    send(tmp_path / "run")
    said = muster_main("status", "run").stdout
    assert said.startswith("run: queued\n  waiting for SLURM job 90 ("), said
    assert json.loads(muster_main("status", "run", "--json").stdout)["job_id"] == "90"
    queue.show("COMPLETED")
    said = muster_main("status", "run").stdout
    assert said.startswith("run: not begun\n  job 90 has ended before the run began; "), said
    assert "what it printed: run/slurm/job-90.log\n" in said
    assert json.loads(muster_main("status", "run", "--json").stdout)["ended_job_id"] == "90"
    assert "nothing to cancel here, it is not begun" in muster_main("cancel", "run").stdout
    queue.show("PENDING")
    assert "cancelled SLURM job 90, which waited" in muster_main("cancel", "run").stdout
    assert queue.cancelled() == ["--quiet 90"]


def test_a_waiting_program_is_not_resumed_and_its_job_is_named(
    queue: Queue, tmp_path: Path, muster_main: MusterCli
) -> None:
    (tmp_path / "p.py").write_text("")
    words = ("run", "--on", "slurm", "--devices", "cpu:1", "--no-wait", "--run-dir", "run", "p.py")
    assert muster_main(*words).stdout == "90\n"
    done = muster_main("resume", "run")
    assert done.returncode == 2 and "is a run of a program, and job 90 does it" in done.stderr
    queue.show("COMPLETED")
    done = muster_main("resume", "run")
    assert done.returncode == 2 and "muster cannot go on with by itself" in done.stderr


def test_a_node_of_a_job_does_not_start_what_was_begun_here_since(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    folder, options = RunFolder(tmp_path / "run"), GangOptions()
    typed = ("muster", "run", "--devices", "cpu:1", "p.py")
    renew = GangWork(folder=folder, program=Script(path="p.py")).renewal(options, typed)
    with open_run(folder, renew):
        pass
    done = muster_main("resume", "run", "--node-rank", "0")
    assert done.returncode == 2, done
    assert "was last started by: muster run --devices cpu:1 p.py" in done.stderr


REFUSAL = "sbatch: error: Batch job submission failed: Invalid qos specification"


def test_without_sbatch_no_record_is_left_behind(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stayed as one that had not begun."""
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(SetupError, match="There is no sbatch"):
        send(folder.path)
    assert not folder.exists()


def test_what_was_to_begin_anew_and_is_refused_stays_where_it_was(
    queue: Queue, tmp_path: Path
) -> None:
    send(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("earlier\n")
    queue.show("COMPLETED")
    queue.refuse(REFUSAL)
    with pytest.raises(SetupError, match="SLURM has refused the job"):
        send(tmp_path / "run", restart=True)
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "earlier\n"


SWEEP = ("sweep", "t.py:task", "--grid", "x=1,2,3,4,5,6", "--on", "slurm", "--run-dir", "run")


def test_a_refused_array_may_be_sent_in_other_parts(
    queue: Queue, tmp_path: Path, muster_main: MusterCli
) -> None:
    """--array 4, as the hint advises, was refused for the parts of the refused --array 5."""
    (tmp_path / "t.py").write_text("def task(x: int):\n    return x\n")
    run = tmp_path / "run"
    queue.refuse("sbatch: error: Batch job submission failed: Invalid job array specification")
    assert "lower --workers or --array" in muster_main(*SWEEP, "--array", "5").stderr
    assert not (run / "run.json").exists()
    Queue(tmp_path / "bin")
    assert muster_main(*SWEEP, "--array", "4").returncode == 0
    before = [(run / name).read_bytes() for name in ("run.json", "elements/array.json")]
    queue.refuse(REFUSAL)
    for more in ((), ("--restart",)):
        assert muster_main(*SWEEP, "--array", "4", *more, "--quiet").returncode == 3
        after = [(run / name).read_bytes() for name in ("run.json", "elements/array.json")]
        assert after == before
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_an_array_has_its_elements_and_is_sent_once(
    queue: Queue, tmp_path: Path, muster_main: MusterCli
) -> None:
    """Element 7 of 3 ran and was counted; retry and resume sent the whole array again."""
    (tmp_path / "t.py").write_text("def task(x: int):\n    return x\n")
    assert muster_main(*SWEEP, "--array", "3").returncode == 0
    for number in ("3", "7"):
        done = muster_main("resume", "run", "--element", number)
        assert done.returncode == 2 and f"has no element {number}" in done.stderr
    queue.squeue("90_0 COMPLETED 0 None", "90_[1-2] PENDING 0 Priority", "90_1 PENDING 0 Priority")
    waits = muster_main("resume", "run")
    assert waits.returncode == 2 and "run is an array, and job 90 does it" in waits.stderr
    queue.squeue("90_0 COMPLETED 0 None")
    again = muster_main("retry", "run")
    assert again.returncode == 2 and "muster retry run/elements/N" in again.stderr
    assert (tmp_path / "bin" / "sent").read_text() == "x\n"
    assert muster_main("resume", "run").returncode == 0
    assert (tmp_path / "bin" / "sent").read_text() == "x\nx\n"


def test_a_run_of_slurm_goes_on_here_without_what_only_slurm_is_asked(
    queue: Queue, tmp_path: Path, muster_main: MusterCli
) -> None:
    """--time was refused with "drop it", and it was in the record."""
    words = ("train", "digits", "--devices", "cpu:1", "--time", "10", "--no-wait", "--run-dir")
    assert muster_main(*words, "run", "--on", "slurm").stdout == "90\n"
    queue.show("COMPLETED")
    here = muster_main("resume", "run", "--on", "local", "--dry-run")
    assert here.returncode == 0, here.stderr
    typed = muster_main("resume", "run", "--on", "local", "--time", "10", "--dry-run")
    assert typed.returncode == 2 and "--time has no effect with --on local" in typed.stderr
