"""Workers in jobs of SLURM: pilots as elements of an array, reached through a shared folder.

One array is submitted for all workers that are wanted at a time; element i serves slot i. A pilot
that is lost is replaced by its own job when SLURM requeues it, else by another submission.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from muster.base.atomic_files import write_atomic
from muster.base.clock import SystemClock
from muster.base.errors import SetupError
from muster.base.journal import Journal
from muster.base.settings import read_settings
from muster.base.shown_text import shell_word
from muster.farm.events import Event
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import look_every_s
from muster.farm.executors.cluster_slot import ClusterSlot
from muster.farm.executors.mailbox import (
    Heartbeat,
    PilotBox,
    boxes_of,
    has_assigned,
    read_heartbeat,
    write_heartbeat,
)
from muster.farm.task import Outcome, SlotSpec, Task
from muster.run.folder import RunFolder
from muster.slurm.commands import cancel, elements_of, show_job, submit_array
from muster.slurm.follow import JobWatch, end_all
from muster.slurm.request import with_defaults
from muster.slurm.script import array_script
from muster.slurm.states import Elements, JobStatus, ending_of, never_starts, was_preempted

#: How long pilots wait for a coordinator that has gone silent.
PATIENCE_S = 120.0
_HEARTBEAT_EVERY_S = 2.0
#: How long a job that was just submitted may be missing in squeue.
_UNSEEN_S = 30.0
_RETRY_S = 15.0
_CLOSE_PATIENCE_S, _CLOSE_LIMIT_S = 5.0, 60.0
_HOW_TO_END = "Ctrl-C or `muster cancel` ends the whole run"
_TAIL_BYTES = 4000
#: How often all slots are gone through in the time between two looks at a mailbox.
_LOOKS_AT_ALL = 50


class SlurmExecutor:
    def __init__(self, assignment: Assignment) -> None:
        self._folder = RunFolder(assignment.folder.path.absolute())
        self._request = assignment.cluster
        self._job_request = with_defaults(assignment.cluster.on_slurm(), read_settings())
        array_script(self._job_request, self._folder, [0])  # refuses what SLURM cannot do
        self._name = self._folder.job_name
        self._watch = JobWatch(time.monotonic())
        self._slots: dict[int, ClusterSlot] = {}
        self._owners: dict[int, ClusterSlot] = {}  # by worker
        self._submitted_s: dict[int, float] = {}  # by array
        self._retry_s = 0.0
        # A look at thousands of slots, most of which have nothing to say, takes milliseconds.
        self._pause_s = look_every_s(assignment.cluster.num_workers) / _LOOKS_AT_ALL
        self._look_s = 0.0
        self._happened: list[Event] = []
        self._never: dict[int, str] = {}  # slot → why its job can never start, by the last answer
        found = elements_of(self._name)
        before = read_heartbeat(self._folder)
        self._heartbeat = Heartbeat(before.session + 1, before.number)
        self._heartbeat_due_s = 0.0
        self._folder.job_files.mkdir(parents=True, exist_ok=True)
        needs = assignment.cluster.needs_of_pilots(assignment.targets)
        self._take_over(assignment, found, fits=has_assigned(self._folder, needs))
        # Last: should this be killed before, the next one still sees what does not fit.
        _write_assignment(self._folder, assignment)
        self._renew_heartbeat(time.monotonic())

    # ------------------------------------------------------------------ the questions

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        place = self._slot(slot.slot_id)
        place.start(worker_id, slot)
        self._owners[worker_id] = place
        return self._folder.worker_log(slot.slot_id).name

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self._order(worker_id, remote.send_command(worker_id, tasks, together=together))

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._order(worker_id, remote.share_command(worker_id, task_id, others))

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        self._order(worker_id, remote.stop_task_command(worker_id, task_id, pauses=pauses))

    def revoke(self, worker_id: int) -> None:
        self._order(worker_id, remote.revoke_command(worker_id))

    def confirm(self, worker_id: int, serial: int) -> None:
        self._order(worker_id, remote.confirm_command(worker_id, serial))

    def end(self, worker_id: int, *, kill: bool) -> None:
        slot = self._owners.get(worker_id)
        if slot is None or slot.worker_id != worker_id:
            return
        gone = slot.end_unplaced()
        self._happened += gone
        if not gone:
            self._order(worker_id, remote.end_command(worker_id, kill=kill))

    def poll(self, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._renew_heartbeat(now)
            events, self._happened = self._happened, []
            if now >= self._look_s:
                events += self._look(now)
                self._look_s = time.monotonic() + self._pause_s
            if events or now >= deadline:
                return events
            due_s = min([self._heartbeat_due_s, self._watch.due_s]
                        + [slot.due_s for slot in self._slots.values()])  # fmt: skip
            time.sleep(max(0.001, min(max(due_s, self._look_s), deadline) - now))

    def _look(self, now: float) -> list[Event]:
        events: list[Event] = []
        for slot in self._slots.values():
            if slot.due_s <= now:
                before = slot.box
                events += slot.look(now)
                if before is not None and (slot.leaving or slot.box != before):
                    self._watch.hurry(now)  # why it leaves is SLURM's to say
        return events + self._watch_jobs(now) + self._ask_for_pilots(now)

    def close(self) -> None:
        """Nothing of this run is left in the queue afterwards."""
        self._watch.close()
        if self._is_superseded():
            return  # the jobs are the other's now
        write_heartbeat(self._folder, self._heartbeat._replace(is_closed=True))
        for slot in self._slots.values():
            slot.close()
        if self._submitted_s or self._with_jobs():
            end_all(self._name, patience_s=_CLOSE_PATIENCE_S, limit_s=_CLOSE_LIMIT_S)

    # ------------------------------------------------------------------ slots

    def _slot(self, slot_id: int) -> ClusterSlot:
        if slot_id not in self._slots:
            every_s = look_every_s(self._request.num_workers)
            self._slots[slot_id] = ClusterSlot(
                self._folder, slot_id, self._heartbeat.session, every_s
            )
        return self._slots[slot_id]

    def _order(self, worker_id: int, frames: bytes) -> None:
        slot = self._owners.get(worker_id)
        if slot is not None:
            slot.order(worker_id, frames)

    def _renew_heartbeat(self, now: float) -> None:
        if now >= self._heartbeat_due_s:
            self._heartbeat_due_s = now + _HEARTBEAT_EVERY_S
            if self._is_superseded():
                raise SetupError(
                    f"Another coordinator has gone on with {self._folder.path} while this one was "
                    "held up, so this one ends. The jobs go on with the other.",
                    hint=f"watch it with `muster status {shell_word(self._folder.path)}`.",
                )
            self._heartbeat = self._heartbeat._replace(number=self._heartbeat.number + 1)
            write_heartbeat(self._folder, self._heartbeat)

    def _is_superseded(self) -> bool:
        return read_heartbeat(self._folder).session > self._heartbeat.session

    def _take_over(self, assignment: Assignment, found: Elements, *, fits: bool) -> None:
        """Go on with what an earlier coordinator has left; what does not fit is cancelled.

        ``fits``: the jobs there were asked for with the same resources and targets.
        """
        for left in assignment.left:
            slot = self._slot(left.slot_id)
            slot.adopt(left)
            if left.worker is not None:
                self._owners[left.worker.worker_id] = slot
        every = [self._slot(number) for number in range(self._request.num_workers)]
        empty = {slot.slot_id: slot for slot in every if slot.box is None}
        for number, slot in empty.items():  # of boxes whose pilot is gone, all news are old
            boxes = boxes_of(self._folder, number)
            slot.pass_over(box.age for box in boxes if not (fits and may_serve(box, found)))
        there = sorted(key for key, item in found.items() if item.is_alive)
        for array, number in there if fits else []:
            if number in empty and array >= empty[number].age[0]:
                empty[number].array = array  # the newest, as they are sorted
        wanted = {(slot.array, slot.slot_id) for slot in self._with_jobs()}
        unwanted = [key for key in there if key not in wanted]
        cancel(*(f"{array}_{number}" for array, number in unwanted))
        for array, number in unwanted:  # it may still begin to speak
            if number in empty and empty[number].array is None:
                empty[number].pass_over([(array, found[array, number].restarts)])

    # ------------------------------------------------------------------ jobs

    def _with_jobs(self) -> list[ClusterSlot]:
        return [slot for slot in self._slots.values() if slot.array is not None]

    def _watch_jobs(self, now: float) -> list[Event]:
        arrays = {slot.array for slot in self._slots.values() if slot.array is not None}
        answer = self._watch.look(now, arrays)
        if answer is None:
            return []
        asked_s, elements = answer
        events: list[Event] = []
        for slot in self._with_jobs():
            assert slot.array is not None
            element = elements.get((slot.array, slot.slot_id))
            if element is not None:
                events += self._apply(slot, element)
            elif asked_s >= self._submitted_s.get(slot.array, 0.0) + _UNSEEN_S:
                events += self._apply(slot, JobStatus("GONE"))
        self._check_hope(elements)
        return events

    def _check_hope(self, elements: Elements) -> None:
        """SetupError when no worker is there and the jobs that would bring one can never start.

        Two answers in a row must say so: a partition may be reconfigured between them.
        """
        slots = self._with_jobs()
        errors = {}
        for slot in slots:
            assert slot.array is not None
            element = elements.get((slot.array, slot.slot_id))
            if element is not None and element.waits:
                errors[slot.slot_id] = never_starts(slot.job, element.reason)
        never = {slot_id: str(error) for slot_id, error in errors.items() if error is not None}
        is_hopeless = never and len(never) == len(slots) and never == self._never
        self._never = never
        error = errors[min(never)] if is_hopeless else None
        if error is not None and all(slot.box is None for slot in self._slots.values()):
            raise error

    def _apply(self, slot: ClusterSlot, status: JobStatus) -> list[Event]:
        """Report what the state of its job means for a slot."""
        job = slot.job
        if not status.is_alive:
            slot.array = None
            ending, what = ending_of(status.state)
            if status.state == "CANCELLED":  # not by this coordinator
                self._note_cancelled(slot, job)
            trace = self._end_of_output(job) if slot.box is None else ""
            return slot.lost(Outcome(ending), f"its job {job} {what}", trace)
        if slot.box is not None and status.restarts > slot.box.restart:
            if was_preempted(show_job(job, limit_s=5.0)):
                why = f"its job {job} was preempted and requeued by SLURM"
                return slot.lost(Outcome.PREEMPTED, why)
            return slot.lost(Outcome.LOST, f"its job {job} was requeued by SLURM")
        if slot.has_waiting:
            why = status.reason or status.state.lower()
            return slot.tell(f"waits for SLURM: {why} (job {job})")
        return []

    def _note_cancelled(self, slot: ClusterSlot, job: str) -> None:
        """Write it to the journal now; the screen shows it once another job is asked for."""
        slot.cancelled = f"job {job} was cancelled with scancel; {_HOW_TO_END}"
        journal = Journal(self._folder.events, SystemClock())
        journal.write("job_cancelled", text=slot.cancelled)
        journal.close()

    def _end_of_output(self, job: str) -> str:
        try:
            data = (self._folder.job_files / f"{job}.out").read_bytes()
        except OSError:
            return ""
        return data[-_TAIL_BYTES:].decode("utf-8", "replace")

    def _ask_for_pilots(self, now: float) -> list[Event]:
        """One array for all slots whose worker has no pilot and no job that will bring one."""
        slots = [slot for slot in self._slots.values() if slot.has_waiting and slot.array is None]
        if not slots or now < self._retry_s:
            return []
        numbers = [slot.slot_id for slot in slots]
        events: list[Event] = []
        try:
            text = array_script(self._job_request, self._folder, numbers)
            array = submit_array(text, self._folder)
        except SetupError as error:
            if not self._submitted_s:
                raise  # it has never worked
            self._retry_s = now + _RETRY_S
            for slot in slots:
                events += slot.tell(str(error).split("\n", 1)[0])
            return events
        self._submitted_s[array] = now
        self._watch.hurry(now)
        for slot in slots:
            slot.array = array
            if slot.cancelled:
                events += slot.tell(f"asks for another job: {slot.cancelled}")
                slot.cancelled = ""
        return events


def may_serve(box: PilotBox, found: Elements) -> bool:
    """Whether the pilot of this box may be at work, by what SLURM shows of its element."""
    element = found.get((box.job_id, box.slot_id))
    if element is None or not element.is_alive or element.restarts > box.restart:
        return False
    return not box.is_over  # what is at its end is still shown


def _write_assignment(folder: RunFolder, assignment: Assignment) -> None:
    record = {
        "run_id": assignment.run_id,
        "patience_s": PATIENCE_S,
        "lead_s": float(assignment.cluster.warn_before_s),
        "look_every_s": look_every_s(assignment.cluster.num_workers),
        **assignment.cluster.needs_of_pilots(assignment.targets),
    }
    write_atomic(folder.pilot_assignment, orjson.dumps(record))
