"""What a new coordinator makes of the mailboxes and jobs of the one before.

SLURM's commands are small scripts here that answer what a real one has answered, so that every
state of the queue can be met; the real SLURM is in tests/integration/test_slurm_farm.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from muster.base.errors import SetupError, UsageError
from muster.base.journal import read_journal
from muster.farm import wire
from muster.farm.events import Event, Progress, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.cluster_slot import ClusterSlot
from muster.farm.executors.mailbox import BYE, HELLO, LEAVING, PilotBox, pilot_box, read_heartbeat
from muster.farm.executors.slurm import SlurmExecutor, may_serve
from muster.farm.task import Outcome, SlotSpec
from muster.run.folder import RunFolder
from muster.slurm.script import array_script
from muster.slurm.states import JobStatus, never_starts

REQUEST = ClusterRequest(num_workers=2)
SLOT = SlotSpec(slot_id=0, label="slurm/0", devices=())
_LIMIT_S = 300.0


class Queue:
    """SLURM's commands, with what they answer and what they were told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown = folder / "shown"
        self.show()
        self._command("squeue", f"cat {self.shown}")
        self._command("scancel", f'echo "$@" >> {folder / "cancelled"}')
        self._command("sbatch", f"echo x >> {folder / 'sent'}; echo 90")
        self._command("srun", "true")
        self._command("scontrol", "true")

    def _command(self, name: str, line: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def show(self, **elements: str) -> None:
        """Elements such as ``_12_0="RUNNING"``."""
        lines = [f"{name[1:]} {state} 0 None\n" for name, state in elements.items()]
        self.shown.write_text("".join(lines))

    def show_waiting(self, reason: str, *elements: str) -> None:
        self.shown.write_text("".join(f"{name} PENDING 0 {reason}\n" for name in elements))

    def break_squeue(self) -> None:
        self._command("squeue", "exit 1")

    def mend_squeue(self) -> None:
        self._command("squeue", f"cat {self.shown}")

    @property
    def num_sent(self) -> int:
        path = self._folder / "sent"
        return len(path.read_text().split()) if path.exists() else 0

    @property
    def cancelled(self) -> list[str]:
        path = self._folder / "cancelled"
        words = path.read_text().split() if path.exists() else []
        return [word for word in words if word != "--quiet"]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    folder = tmp_path / "bin"
    folder.mkdir()
    queue = Queue(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return queue


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.pilots.mkdir()
    return folder


def speak(folder: RunFolder, job: int, *frames: Sequence[object], slot_id: int = 0) -> PilotBox:
    """The outbox of a pilot that has said this."""
    box = pilot_box(folder, slot_id, job, 0)
    box.folder.mkdir(parents=True)
    said = ([HELLO, "host", 1], *frames)
    box.outbox.write_bytes(b"".join(wire.pack(list(frame)) for frame in said))
    return box


def asked_before(folder: RunFolder, request: ClusterRequest) -> None:
    folder.pilot_assignment.write_bytes(orjson.dumps(request.needs_of_pilots({})))


def executor(folder: RunFolder) -> SlurmExecutor:
    return SlurmExecutor(Assignment(folder=folder, run_id="r", targets={}, cluster=REQUEST))


def poll_until_sent(executor: SlurmExecutor, queue: Queue, num_sent: int = 1) -> list[Event]:
    deadline = time.monotonic() + _LIMIT_S
    events: list[Event] = []
    while queue.num_sent < num_sent:
        assert time.monotonic() < deadline, "nothing is submitted"
        events += executor.poll(0.05)
    return events + executor.poll(0.0)


def close(executor: SlurmExecutor, queue: Queue) -> None:
    queue.show()
    executor.close()


# ------------------------------------------------------------------ old mailboxes


def test_a_slot_enters_no_pilot_that_it_was_told_to_pass_over(folder: RunFolder) -> None:
    slot = ClusterSlot(folder, 0, session=2, least_s=0.004)
    speak(folder, 5, [LEAVING, Outcome.LOST])
    slot.pass_over([(5, 0)])
    slot.pass_over([])
    slot.start(1, SLOT)
    assert slot.look(time.monotonic()) == []
    assert slot.has_waiting
    newer = speak(folder, 6)
    time.sleep(0.05)
    slot.look(time.monotonic())
    assert slot.box == newer


@pytest.mark.parametrize(
    "last",
    [(), ([LEAVING, Outcome.LOST],), ([LEAVING, Outcome.PREEMPTED], [BYE, Outcome.PREEMPTED])],
    ids=["killed", "killed while leaving", "preempted"],
)
def test_pilots_of_jobs_that_are_gone_are_not_heard_again(
    queue: Queue, folder: RunFolder, last: tuple[Sequence[object], ...]
) -> None:
    """Else the worker waited for ever in one's mailbox, or died of what was said there."""
    asked_before(folder, REQUEST)
    speak(folder, 5, *last)
    there = executor(folder)
    there.start(1, SLOT)
    events = poll_until_sent(there, queue)
    assert [event for event in events if isinstance(event, WorkerDied)] == []
    close(there, queue)


@pytest.mark.parametrize(
    ("element", "frames", "answer"),
    [
        (JobStatus("RUNNING"), (), True),
        (JobStatus("RUNNING"), ([BYE, "closed"],), False),
        (JobStatus("PENDING", restarts=1), (), False),
        (JobStatus("CANCELLED"), (), False),
        (None, (), False),
    ],
)
def test_a_pilot_may_serve_while_its_element_is_there(
    folder: RunFolder, element: JobStatus | None, frames: tuple[Sequence[object], ...], answer: bool
) -> None:
    box = speak(folder, 5, *frames)
    assert may_serve(box, {} if element is None else {(5, 0): element}) is answer


# ------------------------------------------------------------------ old jobs


def test_jobs_that_wait_with_the_same_resources_are_kept(queue: Queue, folder: RunFolder) -> None:
    asked_before(folder, REQUEST)
    queue.show(_12_0="PENDING", _12_1="PENDING", _12_2="PENDING")
    there = executor(folder)
    there.start(1, SLOT)
    for _ in range(5):
        there.poll(0.05)
    assert queue.num_sent == 0, "the job that waits will serve it"
    assert queue.cancelled == ["12_2"], "there are only two slots now"
    close(there, queue)


def test_jobs_that_wait_with_other_resources_are_cancelled(queue: Queue, folder: RunFolder) -> None:
    asked_before(folder, ClusterRequest(num_workers=2, memory="200M"))
    queue.show(_12_0="PENDING", _12_1="RUNNING")
    there = executor(folder)
    assert queue.cancelled == ["12_0", "12_1"]
    speak(folder, 12, slot_id=1)  # it was just beginning
    there.start(1, SLOT)
    there.start(2, SlotSpec(slot_id=1, label="slurm/1", devices=()))
    poll_until_sent(there, queue)
    assert not list(folder.pilots.glob("1/12.0/inbox-*")), "nothing is given to it"
    close(there, queue)


def test_a_job_older_than_the_last_pilot_that_is_gone_is_cancelled(
    queue: Queue, folder: RunFolder
) -> None:
    asked_before(folder, REQUEST)
    speak(folder, 15, [BYE, "closed"])
    queue.show(_12_0="PENDING")
    there = executor(folder)
    assert queue.cancelled == ["12_0"]
    close(there, queue)


def test_a_job_that_somebody_cancels_is_told_and_written_down(
    queue: Queue, folder: RunFolder
) -> None:
    asked_before(folder, REQUEST)
    queue.show(_12_0="PENDING")
    there = executor(folder)
    there.start(1, SLOT)
    queue.show(_12_0="CANCELLED")
    deadline = time.monotonic() + _LIMIT_S
    events: list[Event] = []
    while not any(isinstance(event, WorkerDied) for event in events):
        assert time.monotonic() < deadline
        events += there.poll(0.1)
    there.start(2, SLOT)  # as the scheduler does
    events = poll_until_sent(there, queue)
    text = "job 12_0 was cancelled with scancel; Ctrl-C or `muster cancel` ends the whole run"
    assert Progress(2, 0, f"asks for another job: {text}") in events
    [line] = read_journal(folder.events)
    assert (line["event"], line["text"]) == ("job_cancelled", text)
    close(there, queue)


def test_a_pilot_that_appears_is_heard_although_squeue_is_not_asked_again(
    queue: Queue, folder: RunFolder
) -> None:
    asked_before(folder, REQUEST)
    queue.show(_12_0="PENDING")
    there = executor(folder)
    there.start(1, SLOT)
    until(there, lambda event: event == Progress(1, 0, "waits for SLURM: pending (job 12_0)"))
    queue.break_squeue()
    speak(folder, 12)
    until(there, lambda event: event == Progress(1, 0, ""))
    queue.mend_squeue()
    close(there, queue)


def until(executor: SlurmExecutor, found: Callable[[Event], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not any(found(event) for event in executor.poll(0.1)):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("reason", "says", "hint"),
    [
        ("PartitionConfig", "no nodes such as it asks for", "sinfo"),
        ("PartitionNodeLimit", "more nodes than its partition gives", "--nodes"),
        ("PartitionTimeLimit", "more time than its partition allows", "--time"),
        ("PartitionDown", "its partition is down", "--partition"),
        ("BadConstraints", "no node has what it asks for", "--slurm-arg"),
        ("QOSMaxWallDurationPerJobLimit", "more than its account or QOS allows", "sacctmgr"),
    ],
)
def test_a_job_that_can_never_start_ends_the_run_with_the_reason(
    queue: Queue, folder: RunFolder, reason: str, says: str, hint: str
) -> None:
    asked_before(folder, REQUEST)
    queue.show_waiting(reason, "12_0", "12_1")
    there = executor(folder)
    there.start(1, SLOT)
    there.start(2, SlotSpec(slot_id=1, label="slurm/1", devices=()))
    with pytest.raises(SetupError) as caught:
        until(there, lambda event: False)
    assert "SLURM will never start job 12_0: " in str(caught.value)
    assert says in str(caught.value) and f"({reason})" in str(caught.value)
    assert hint in str(caught.value)
    close(there, queue)


@pytest.mark.parametrize("reason", ["Priority", "Resources", "BeginTime", "QOSMaxJobsPerUserLimit",
                                    "ReqNodeNotAvail, UnavailableNodes:n1", "JobHeldUser",
                                    "AssocGrpCPUMinutesLimit", "Dependency"])  # fmt: skip
def test_a_job_that_may_start_is_waited_for(reason: str) -> None:
    assert never_starts("7", reason) is None


@pytest.mark.thorough
def test_workers_that_are_there_go_on_when_others_can_never_start(
    queue: Queue, folder: RunFolder
) -> None:
    asked_before(folder, REQUEST)
    queue.show_waiting("PartitionDown", "12_1")
    with queue.shown.open("a") as file:
        file.write("12_0 RUNNING 0 None\n")
    speak(folder, 12)
    there = executor(folder)
    there.start(1, SLOT)
    there.start(2, SlotSpec(slot_id=1, label="slurm/1", devices=()))
    end_s = time.monotonic() + 4.0
    while time.monotonic() < end_s:
        there.poll(0.1)
    close(there, queue)


# ------------------------------------------------------------------ two coordinators


def test_an_older_coordinator_that_wakes_up_ends_and_leaves_the_jobs_to_the_newer(
    queue: Queue, folder: RunFolder
) -> None:
    """Its host was held up, and the run was gone on with meanwhile."""
    asked_before(folder, REQUEST)
    queue.show(_12_0="RUNNING")
    box = speak(folder, 12)
    older = executor(folder)
    older.start(1, SLOT)
    until(older, lambda event: event == Progress(1, 0, ""))
    newer = executor(folder)
    beat, orders = read_heartbeat(folder), box.inbox(1).read_bytes()
    with pytest.raises(SetupError, match="Another coordinator has gone on with") as caught:
        until(older, lambda event: False)
    assert "The jobs go on with the other." in str(caught.value)
    older.close()
    assert queue.cancelled == [] and read_heartbeat(folder) == beat, "the newer one's are untouched"
    assert box.inbox(1).read_bytes() == orders, "the pilot was not told to end"
    close(newer, queue)


# ------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("values", "lines", "absent"),
    [
        ({}, ["--cpus-per-task=1"], ["--gpus", "--gres"]),
        ({"gpus_per_worker": 1}, ["--gpus-per-node=1", "--cpus-per-task=4"], []),
        ({"gpus_per_worker": 2}, ["--gpus-per-node=2", "--cpus-per-task=8"], []),
        ({"gpus_per_worker": 2, "cpus_per_worker": 3}, ["--cpus-per-task=3"], []),
        (
            {"gpus_per_worker": 2, "slurm_args": ("gres=gpu:a100:2",)},
            ["--gres=gpu:a100:2", "--cpus-per-task=8"],
            ["--gpus-per-node"],
        ),
        (
            {"slurm_args": ("gpus=v100:1",)},
            ["--gpus=v100:1", "--cpus-per-task=4"],
            ["--gpus-per-node"],
        ),
        (
            {"gpus_per_worker": 1, "slurm_args": ("cpus-per-gpu=6",)},
            ["--gpus-per-node=1", "--cpus-per-gpu=6"],
            ["cpus-per-task"],
        ),
    ],
)
def test_cores_follow_gpus_and_gpus_are_asked_for_once(
    tmp_path: Path, values: dict[str, Any], lines: list[str], absent: list[str]
) -> None:
    request = ClusterRequest(**values).on_slurm()
    text = array_script(request, RunFolder(tmp_path / "run"), [0])
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for line in lines:
        assert f"#SBATCH {line}" in asked
    for word in absent:
        assert word not in "\n".join(asked)


def test_a_part_of_a_gpu_is_not_asked_of_slurm() -> None:
    with pytest.raises(UsageError, match="SLURM gives whole GPUs"):
        ClusterRequest(gpus_per_worker=0.5).on_slurm()


# ------------------------------------------------------------------ names of folders


def test_a_percent_sign_in_the_run_folder_begins_no_field_of_slurm(tmp_path: Path) -> None:
    text = array_script(REQUEST.on_slurm(), RunFolder(tmp_path / "50%j"), [0])
    assert f"#SBATCH --output={tmp_path}/50%%j/pilots/jobs/%A_%a.out" in text.splitlines()
    assert f"--output {tmp_path}/50%%j/pilots/jobs/%A_%a.out" in text
    assert f"{tmp_path}/50%j" in text.splitlines()[-1], "the pilot is told the name as it is"


def test_a_backslash_in_the_run_folder_is_refused(queue: Queue, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a\\b")
    with pytest.raises(UsageError, match="SLURM cannot write below a backslash"):
        array_script(REQUEST.on_slurm(), folder, [0])
    with pytest.raises(UsageError, match="backslash"):
        executor(folder)


@pytest.mark.parametrize("least_s", [0.004, 5.0])
def test_a_pilot_is_sought_no_more_often_than_it_will_be_heard(
    folder: RunFolder, least_s: float
) -> None:
    slot = ClusterSlot(folder, 0, 1, least_s)
    slot.start(1, SLOT)
    for seconds in (0.0, 100.0, 200.0):
        now = time.monotonic() + seconds
        slot.look(now)
        assert least_s <= slot.due_s - now <= max(2.0, least_s)
