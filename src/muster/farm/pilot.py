"""A pilot: the process of a cluster job that serves one slot to a coordinator elsewhere.

``python -m muster.farm.pilot RUN_FOLDER``, in an element of a SLURM array (its number is the
slot), or with ``SLOT JOB RESTART`` behind it as a plain process.

It holds a local executor with one slot. Its inbox says what the coordinator wants, its outbox what
came of it; results wait there when no coordinator is alive, and the next one reads them.

It ends when the coordinator closes the run; when no coordinator has shown itself for
``patience_s`` and its worker has finished what it held; and, after SLURM's warning, once what has
not begun is handed back and the running task has ended or saved its state. Then its job is put
back into the queue.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import orjson

from muster.base.clock import Rhythm
from muster.base.codec import decode
from muster.base.settings import job_place
from muster.farm import wire
from muster.farm.events import Event, Results, Returned, WorkerDied
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.executors.mailbox import (
    BYE,
    HELLO,
    LEAVING,
    Heartbeat,
    PilotBox,
    Reader,
    Writer,
    pilot_box,
    read_heartbeat,
)
from muster.farm.executors.remote import CommandReader, pack_event
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder
from muster.slurm.commands import requeue, show_job
from muster.slurm.states import why_warned

_HEARTBEAT_EVERY_S = 1.0
_WRITE_LIMIT_S = 60.0  # how long the shared folder may refuse our words
_KILL_MARGIN_S = 10.0  # before SLURM kills: time to say how it went
_ASK_LIMIT_S = 10.0
_WARNINGS = (signal.SIGTERM, signal.SIGUSR2)


class Pilot:
    def __init__(
        self,
        folder: RunFolder,
        box: PilotBox,
        executor: LocalExecutor,
        *,
        job_id: str | None,
        patience_s: float,
        lead_s: float,
        look_every_s: float,
    ) -> None:
        """``lead_s``: how long before the time limit SLURM warns; ``job_id``: None outside."""
        self._folder = folder
        self._box = box
        self._executor = executor
        self._job_id = job_id
        self._patience_s = patience_s
        self._lead_s = lead_s
        self._out = Writer(box.outbox, durable=True)
        self._heartbeat = Heartbeat()
        now = time.monotonic()
        self._heartbeat_seen_s = now
        self._heartbeat_due_s = now
        self._rhythm = Rhythm(now, least_s=look_every_s)
        self._inbox: Reader | None = None
        self._gate = _Gate(executor)
        self._commands = CommandReader(self._gate)
        self._is_deserted = False
        self._signal = 0
        self._leaving: Outcome | None = None
        self._kill_at_s = 0.0
        self._refused_since_s: float | None = None

    def warn(self, number: int, frame: FrameType | None) -> None:
        """The handler of SLURM's signals."""
        self._signal = number

    def serve(self) -> None:
        """Serve until nothing is left to do here; nothing of the worker is left afterwards."""
        try:
            self._work()
        finally:
            self._executor.close()
        self._out.add(wire.pack([BYE, self._leaving or "closed"]))
        self._flush(time.monotonic())
        if self._job_id and self._leaving in (Outcome.PREEMPTED, Outcome.JOB_TIMEOUT):
            # Does not come back when it works: SLURM ends this job to start it again.
            requeue(self._job_id, limit_s=_ASK_LIMIT_S)

    def _work(self) -> None:
        self._out.add(wire.pack([HELLO, socket.gethostname(), os.getpid()]))
        while True:
            now = time.monotonic()
            if self._signal and self._leaving is None:
                self._leave(now)
            self._hear(now)
            if self._is_over(now):
                return
            for event in self._executor.poll(self._patience(now)):
                self._tell(event)
            self._flush(time.monotonic())

    # ------------------------------------------------------------------ hearing

    def _hear(self, now: float) -> None:
        if now >= self._heartbeat_due_s:
            self._heartbeat_due_s = now + _HEARTBEAT_EVERY_S
            self._hear_coordinator(now)
        if self._inbox is None or now < self._rhythm.due_s:
            return
        frames = self._inbox.receive()
        if frames:
            self._rhythm.happened(now)
            self._commands.apply(frames)
            for event in self._gate.refused():
                self._tell(event)
        self._rhythm.looked(now)

    def _hear_coordinator(self, now: float) -> None:
        heartbeat = read_heartbeat(self._folder)
        # An older coordinator that wakes up after a pause of its host is none: its inbox has been
        # read, and going back to it would mean to read the present one's twice.
        if heartbeat == self._heartbeat or heartbeat.session < self._heartbeat.session:
            if now - self._heartbeat_seen_s > self._patience_s and not self._is_deserted:
                self._is_deserted = True
                self._end_workers()
            return
        if heartbeat.session != self._heartbeat.session:
            if self._inbox is not None:
                self._commands.apply(self._inbox.receive())  # what the one before still said
            self._inbox = Reader(self._box.inbox(heartbeat.session))
            self._commands = CommandReader(self._gate)
            self._rhythm.happened(now)
        self._heartbeat, self._heartbeat_seen_s, self._is_deserted = heartbeat, now, False

    def _patience(self, now: float) -> float:
        due_s = self._heartbeat_due_s
        if self._inbox is not None:
            due_s = min(due_s, self._rhythm.due_s)
        return max(0.0, due_s - now)

    def _is_over(self, now: float) -> bool:
        if self._heartbeat.is_closed or self._commands.is_closed:
            return True
        if self._leaving is not None:
            if self._kill_at_s and now > self._kill_at_s:
                for worker_id in self._executor.worker_ids:
                    self._executor.end(worker_id, kill=True)
            return not self._executor.worker_ids
        return self._is_deserted and not self._executor.worker_ids

    # ------------------------------------------------------------------ telling

    def _tell(self, event: Event) -> None:
        if isinstance(event, Results) and self._leaving is not None:
            finished = [_not_to_blame(item, self._leaving) for item in event.finished]
            event = event._replace(finished=finished)
        elif isinstance(event, WorkerDied) and self._leaving is not None:
            event = event._replace(outcome=self._leaving)
        self._out.add(pack_event(event))
        self._rhythm.happened(time.monotonic())

    def _flush(self, now: float) -> None:
        """Write; a full disk or a server that is away for a moment does not cost results."""
        try:
            self._out.flush()
            self._refused_since_s = None
        except FileNotFoundError:
            raise  # the run folder is gone: nobody will read this
        except OSError:
            self._refused_since_s = self._refused_since_s or now
            if now - self._refused_since_s > _WRITE_LIMIT_S:
                raise

    # ------------------------------------------------------------------ leaving

    def _leave(self, now: float) -> None:
        """SLURM takes this place away: hand waiting tasks back, let the running one save."""
        shown = show_job(self._job_id, limit_s=_ASK_LIMIT_S) if self._job_id else ""
        self._leaving = Outcome(why_warned(self._signal, shown))
        if self._leaving is Outcome.JOB_TIMEOUT:
            self._kill_at_s = now + max(self._lead_s / 2, self._lead_s - _KILL_MARGIN_S)
        self._out.add(wire.pack([LEAVING, self._leaving]))
        self._gate.is_shut = True
        for worker_id in self._executor.worker_ids:
            self._executor.revoke(worker_id)
            self._executor.warn(worker_id)
        self._end_workers()

    def _end_workers(self) -> None:
        for worker_id in self._executor.worker_ids:
            self._executor.end(worker_id, kill=False)


class _Gate:
    """Commands pass to the executor until this is shut; then new tasks are handed back."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self._refused: list[Event] = []
        self.is_shut = False

    def refused(self) -> list[Event]:
        refused, self._refused = self._refused, []
        return refused

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        return "" if self.is_shut else self._executor.start(worker_id, slot)

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        if self.is_shut:
            self._refused.append(Returned(worker_id, [task.task_id for task in tasks]))
        else:
            self._executor.send(worker_id, tasks, together=together)

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._executor.share(worker_id, task_id, others)

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        self._executor.stop_task(worker_id, task_id, pauses=pauses)

    def revoke(self, worker_id: int) -> None:
        self._executor.revoke(worker_id)

    def confirm(self, worker_id: int, serial: int) -> None:
        self._executor.confirm(worker_id, serial)

    def end(self, worker_id: int, *, kill: bool) -> None:
        self._executor.end(worker_id, kill=kill)


def _not_to_blame(finished: Finished, leaving: Outcome) -> Finished:
    """SLURM's signals also reach what a task has started: its crash is then not its fault."""
    if finished.outcome is Outcome.CRASH and finished.signal in (*_WARNINGS, signal.SIGKILL):
        return finished._replace(outcome=leaving)
    if finished.outcome is Outcome.PREEMPTED:
        return finished._replace(outcome=leaving)
    return finished


def main(argv: list[str]) -> int:
    folder = RunFolder(Path(argv[0]))
    place = job_place() if len(argv) == 1 else None
    if place is not None:
        box = pilot_box(folder, place.element, place.array_id, place.restart)
    else:
        slot_id, job_id, restart = map(int, argv[1:4])
        box = pilot_box(folder, slot_id, job_id, restart)
    record = orjson.loads(folder.pilot_assignment.read_bytes())
    box.folder.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(
        folder=folder,
        # A name of its own: an executor ends what earlier ones of that name have left, and
        # several pilots of a run may share a host.
        run_id=f"pilot-{box.slot_id}-{record['run_id']}",
        targets={int(i): decode(TargetSpec, spec) for i, spec in record["targets"].items()},
        is_piloted=True,
    )
    pilot = Pilot(
        folder,
        box,
        LocalExecutor(assignment),
        job_id=place.job_id if place else None,
        patience_s=record["patience_s"],
        lead_s=record["lead_s"],
        look_every_s=record["look_every_s"],
    )
    for number in _WARNINGS:
        signal.signal(number, pilot.warn)
    pilot.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
