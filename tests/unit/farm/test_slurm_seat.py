"""What a new coordinator makes of the mailboxes and jobs of the one before.

SLURM's commands are small scripts here that answer what a real one has answered, so that every
state of the queue can be met; the real SLURM is in tests/integration/test_slurm_farm.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from muster.base.errors import UsageError
from muster.base.journal import read_journal
from muster.base.run_folder import RunFolder
from muster.farm import wire
from muster.farm.events import Event, Progress, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import ClusterRequest, needs_of_pilots
from muster.farm.executors.mailbox import BYE, HELLO, LEAVING, PilotBox, pilot_box
from muster.farm.executors.slurm import SlurmExecutor, script
from muster.farm.executors.slurm_seat import Seat
from muster.farm.executors.slurm_states import Element
from muster.farm.executors.slurm_watch import may_serve
from muster.farm.model import Outcome, SlotSpec

REQUEST = ClusterRequest(num_workers=2)
SLOT = SlotSpec(slot_id=0, label="slurm/0", devices=())
_LIMIT_S = 20.0


class Queue:
    """SLURM's commands, with what they answer and what they were told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown = folder / "shown"
        self.show()
        self._command("squeue", f"cat {self._shown}")
        self._command("scancel", f'echo "$@" >> {folder / "cancelled"}')
        self._command("sbatch", f"echo x >> {folder / 'sent'}; echo Submitted batch job 90")
        self._command("srun", "true")
        self._command("scontrol", "true")

    def _command(self, name: str, line: str) -> None:
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def show(self, **elements: str) -> None:
        """Elements such as ``_12_0="RUNNING"``."""
        lines = [f"{name[1:]} {state} 0 None\n" for name, state in elements.items()]
        self._shown.write_text("".join(lines))

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
    folder.pilot_assignment.write_bytes(orjson.dumps(needs_of_pilots(request, {})))


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


def test_a_seat_enters_no_pilot_that_it_was_told_to_pass_over(folder: RunFolder) -> None:
    seat = Seat(folder, 0, session=2, least_s=0.004)
    speak(folder, 5, [LEAVING, Outcome.LOST])
    seat.pass_over([(5, 0)])
    seat.pass_over([])
    seat.start(1, SLOT)
    assert seat.look(time.monotonic()) == []
    assert seat.has_waiting
    newer = speak(folder, 6)
    time.sleep(0.05)
    seat.look(time.monotonic())
    assert seat.box == newer


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
        (Element("RUNNING"), (), True),
        (Element("RUNNING"), ([BYE, "closed"],), False),
        (Element("PENDING", restarts=1), (), False),
        (Element("CANCELLED"), (), False),
        (None, (), False),
    ],
)
def test_a_pilot_may_serve_while_its_element_is_there(
    folder: RunFolder, element: Element | None, frames: tuple[Sequence[object], ...], answer: bool
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


# ------------------------------------------------------------------ names of folders


def test_a_percent_sign_in_the_run_folder_begins_no_field_of_slurm(tmp_path: Path) -> None:
    text = script(REQUEST, RunFolder(tmp_path / "50%j"), [0])
    assert f"#SBATCH --output={tmp_path}/50%%j/pilots/jobs/%A_%a.out" in text.splitlines()
    assert f"--output {tmp_path}/50%%j/pilots/jobs/%A_%a.out" in text
    assert f"{tmp_path}/50%j" in text.splitlines()[-1], "the pilot is told the name as it is"


def test_a_backslash_in_the_run_folder_is_refused(queue: Queue, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a\\b")
    with pytest.raises(UsageError, match="SLURM cannot write below a backslash"):
        script(REQUEST, folder, [0])
    with pytest.raises(UsageError, match="backslash"):
        executor(folder)
