"""Handing a gang in to SLURM: whose job is found again, and beginning anew.

SLURM's commands are small scripts that answer what a real one has answered; the real SLURM is in
tests/integration/test_slurm_gang.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from muster.api.earlier_work import move_aside
from muster.api.slurm_gang import NodeCommand, SlurmGang, SlurmJob, hand_in
from muster.base.errors import SetupError
from muster.run.folder import RunFolder
from muster.slurm.job import typed_for_job
from muster.slurm.request import JobRequest

ARGV = ("muster", "train", "har", "--on", "slurm")


class Queue:
    """Numbers the jobs that are sent to it from 90 on; all are in one state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        sent = folder / "sent"
        self._command("sbatch", f"echo x >> {sent}; echo $((89 + $(wc -l < {sent})))")
        self.show("PENDING")

    def show(self, state: str) -> None:
        self._command("scontrol", f"echo JobId=7 JobState={state} Restarts=0 ExitCode=0:0")

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


def send(path: Path, *, restart: bool = False) -> SlurmJob:
    folder = RunFolder(path)
    command = NodeCommand(head=["train", "har"], rest=["--run-dir", str(path)], cwd=path.parent)
    gang = SlurmGang(
        folder=folder, command=command, request=JobRequest(), kind="train", restart=restart
    )
    return hand_in(gang, ARGV)


def test_the_same_command_finds_the_job_that_lives(queue: Queue, tmp_path: Path) -> None:
    first, again = send(tmp_path / "run"), send(tmp_path / "run")
    assert (first.job_id, first.is_new) == ("90", True)
    assert (again.job_id, again.is_new, again.is_same_script) == ("90", False, True)
    queue.show("COMPLETED")
    assert send(tmp_path / "run").job_id == "91"


def test_a_copied_folder_does_not_follow_the_job_of_the_original(
    queue: Queue, tmp_path: Path
) -> None:
    send(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    assert typed_for_job(copy, "90") is None
    assert move_aside(copy, "train") is not None, "the original's job does not work on the copy"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert send(tmp_path / "copy").job_id == "91"
    assert typed_for_job(copy, "91") == ARGV
    assert send(tmp_path / "run").job_id == "90", "the original still has its own"
    assert typed_for_job(RunFolder(tmp_path / "run"), "90") == ARGV


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
