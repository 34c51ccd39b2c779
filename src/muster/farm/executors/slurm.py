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
from muster.farm.events import Event, Progress
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import look_every_s, needs_of_pilots
from muster.farm.executors.cluster_slot import ClusterSlot
from muster.farm.executors.mailbox import PilotBox, boxes_of, has_assigned, read_beat, write_beat
from muster.farm.task import Outcome, SlotSpec, Task
from muster.run.folder import RunFolder
from muster.slurm.commands import cancel, elements_of, show_job, submit_array
from muster.slurm.follow import JobWatch, end_all
from muster.slurm.script import array_script, job_name
from muster.slurm.site import with_defaults
from muster.slurm.states import Elements, JobStatus, ending_of, never_starts, was_preempted

#: How long pilots wait for a coordinator that has gone silent.
PATIENCE_S = 120.0
_BEAT_EVERY_S = 2.0
#: How long a job that was just submitted may be missing in squeue.
_UNSEEN_S = 30.0
_RETRY_S = 15.0
_CLOSE_PATIENCE_S, _CLOSE_LIMIT_S = 5.0, 60.0
_HOW_TO_END = "Ctrl-C or `muster cancel` ends the whole run"
_TAIL_BYTES = 4000


class SlurmExecutor:
    def __init__(self, assignment: Assignment) -> None:
        self._folder = RunFolder(assignment.folder.path.absolute())
        self._request = assignment.cluster
        self._job_request = with_defaults(assignment.cluster.on_slurm(), read_settings())
        array_script(self._job_request, self._folder, [0])  # refuses what SLURM cannot do
        self._name = job_name(self._folder)
        self._watch = JobWatch(time.monotonic())
        self._slots: dict[int, ClusterSlot] = {}
        self._owners: dict[int, ClusterSlot] = {}  # by worker
        self._arrays: dict[int, int] = {}  # slot → the array whose element serves it, or will
        self._submitted_s: dict[int, float] = {}
        self._told: dict[int, str] = {}  # slot → why it waits, as last told
        self._retry_s = 0.0
        self._happened: list[Event] = []
        self._cancelled: dict[int, str] = {}  # slot → its last job, which somebody has cancelled
        self._never: dict[int, str] = {}  # slot → why its job can never start, by the last answer
        found = elements_of(self._name)
        self._beat = read_beat(self._folder)._replace(is_closed=False)
        self._beat = self._beat._replace(session=self._beat.session + 1)
        self._beat_due_s = 0.0
        self._folder.job_files.mkdir(parents=True, exist_ok=True)
        needs = needs_of_pilots(assignment.cluster, assignment.targets)
        self._take_over(assignment, found, fits=has_assigned(self._folder, needs))
        # Last: should this be killed before, the next one still sees what does not fit.
        _write_assignment(self._folder, assignment)
        self._keep_beating(time.monotonic())

    # ------------------------------------------------------------------ the questions

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        place = self._slot(slot.slot_id)
        place.start(worker_id, slot)
        self._owners[worker_id] = place
        self._told.pop(slot.slot_id, None)
        return self._folder.worker_log(slot.slot_id).name

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self._order(worker_id, remote.send_command(worker_id, tasks, together=together))

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._order(worker_id, remote.share_command(worker_id, task_id, others))

    def revoke(self, worker_id: int) -> None:
        self._order(worker_id, remote.revoke_command(worker_id))

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
            self._keep_beating(now)
            events, self._happened = self._happened, []
            for slot in self._slots.values():
                if slot.due_s <= now:
                    before = slot.box
                    events += slot.look(now)
                    if before is not None and (slot.leaving or slot.box != before):
                        self._watch.hurry(now)  # why it leaves is SLURM's to say
            events += self._watch_jobs(now)
            events += self._ask_for_pilots(now)
            if events or now >= deadline:
                return events
            due_s = min([deadline, self._beat_due_s, self._watch.due_s]
                        + [slot.due_s for slot in self._slots.values()])  # fmt: skip
            time.sleep(max(0.001, min(due_s, deadline) - now))

    def close(self) -> None:
        """Nothing of this run is left in the queue afterwards."""
        self._watch.close()
        if self._is_superseded():
            return  # the jobs are the other's now
        write_beat(self._folder, self._beat._replace(is_closed=True))
        for slot in self._slots.values():
            slot.close()
        if self._arrays or self._submitted_s:
            end_all(self._name, patience_s=_CLOSE_PATIENCE_S, limit_s=_CLOSE_LIMIT_S)

    # ------------------------------------------------------------------ slots

    def _slot(self, slot_id: int) -> ClusterSlot:
        if slot_id not in self._slots:
            every_s = look_every_s(self._request.num_workers)
            self._slots[slot_id] = ClusterSlot(self._folder, slot_id, self._beat.session, every_s)
        return self._slots[slot_id]

    def _order(self, worker_id: int, frames: bytes) -> None:
        slot = self._owners.get(worker_id)
        if slot is not None:
            slot.order(worker_id, frames)

    def _keep_beating(self, now: float) -> None:
        if now >= self._beat_due_s:
            self._beat_due_s = now + _BEAT_EVERY_S
            if self._is_superseded():
                raise SetupError(
                    f"Another coordinator has gone on with {self._folder.path} while this one was "
                    "held up, so this one ends. The jobs go on with the other.",
                    hint=f"watch it with `muster status {self._folder.path}`.",
                )
            self._beat = self._beat._replace(number=self._beat.number + 1)
            write_beat(self._folder, self._beat)

    def _is_superseded(self) -> bool:
        return read_beat(self._folder).session > self._beat.session

    def _take_over(self, assignment: Assignment, found: Elements, *, fits: bool) -> None:
        """Go on with what an earlier coordinator has left; what does not fit is cancelled.

        ``fits``: the jobs there were asked for with the same resources and targets.
        """
        for left in assignment.left:
            slot = self._slot(left.slot_id)
            slot.adopt(left)
            self._arrays[left.slot_id] = left.job_id
            if left.worker is not None:
                self._owners[left.worker.worker_id] = slot
        empty = [n for n in range(self._request.num_workers) if self._slot(n).box is None]
        for number in empty:  # of boxes whose pilot is gone, all news are old
            boxes = boxes_of(self._folder, number)
            gone = [box.age for box in boxes if not (fits and may_serve(box, found))]
            self._slots[number].pass_over(gone)
        there = sorted(key for key, item in found.items() if item.is_alive)
        for array, number in there if fits else []:
            if number in empty and array >= self._slots[number].age[0]:
                self._arrays[number] = array  # the newest, as they are sorted
        unwanted = [(a, n) for a, n in there if self._arrays.get(n) != a]
        cancel(*(f"{a}_{n}" for a, n in unwanted))
        for array, number in unwanted:  # it may still begin to speak
            if number in empty and number not in self._arrays:
                self._slots[number].pass_over([(array, found[array, number].restarts)])

    # ------------------------------------------------------------------ jobs

    def _watch_jobs(self, now: float) -> list[Event]:
        answer = self._watch.look(now, set(self._arrays.values()))
        if answer is None:
            return []
        asked_s, elements = answer
        events: list[Event] = []
        for slot_id, array in list(self._arrays.items()):
            element = elements.get((array, slot_id))
            if element is None:
                if asked_s < self._submitted_s.get(array, 0.0) + _UNSEEN_S:
                    continue
                element = JobStatus("GONE")
            events += self._heed(self._slots[slot_id], array, element)
        self._give_up_hope(elements)
        return events

    def _give_up_hope(self, elements: Elements) -> None:
        """SetupError when no worker is there and the jobs that would bring one can never start.

        Two answers in a row must say so: a partition may be reconfigured between them.
        """
        jobs = {slot_id: f"{array}_{slot_id}" for slot_id, array in self._arrays.items()}
        waiting = {
            slot_id: element.reason
            for slot_id, array in self._arrays.items()
            if (element := elements.get((array, slot_id))) is not None and element.waits
        }
        errors = {slot_id: never_starts(jobs[slot_id], why) for slot_id, why in waiting.items()}
        never = {slot_id: waiting[slot_id] for slot_id, error in errors.items() if error}
        is_hopeless = never and len(never) == len(jobs) and never == self._never
        self._never = never
        error = errors[min(never)] if is_hopeless else None
        if error is not None and all(slot.box is None for slot in self._slots.values()):
            raise error

    def _heed(self, slot: ClusterSlot, array: int, element: JobStatus) -> list[Event]:
        """What the state of its job means for a slot."""
        job = f"{array}_{slot.slot_id}"
        if not element.is_alive:
            del self._arrays[slot.slot_id]
            ending, what = ending_of(element.state)
            if element.state == "CANCELLED":  # not by this coordinator
                self._note_cancelled(slot.slot_id, job)
            trace = self._last_words(job) if slot.box is None else ""
            return slot.lost(Outcome(ending), f"its job {job} {what}", trace)
        if slot.box is not None and element.restarts > slot.box.restart:
            if was_preempted(show_job(job, limit_s=5.0)):
                why = f"its job {job} was preempted and requeued by SLURM"
                return slot.lost(Outcome.PREEMPTED, why)
            return slot.lost(Outcome.LOST, f"its job {job} was requeued by SLURM")
        if slot.has_waiting and slot.worker_id is not None:
            text = f"waits for SLURM: {element.reason or element.state.lower()} (job {job})"
            return self._tell(slot.slot_id, slot.worker_id, text)
        return []

    def _tell(self, slot_id: int, worker_id: int, text: str) -> list[Event]:
        if self._told.get(slot_id) == text:
            return []
        self._told[slot_id] = text
        return [Progress(worker_id, 0, text)]

    def _note_cancelled(self, slot_id: int, job: str) -> None:
        """Said in the journal now, and on the screen when another job is asked for."""
        text = f"job {job} was cancelled with scancel; {_HOW_TO_END}"
        self._cancelled[slot_id] = text
        journal = Journal(self._folder.events, SystemClock())
        journal.write("job_cancelled", text=text)
        journal.close()

    def _last_words(self, job: str) -> str:
        try:
            data = (self._folder.job_files / f"{job}.out").read_bytes()
        except OSError:
            return ""
        return data[-_TAIL_BYTES:].decode("utf-8", "replace")

    def _ask_for_pilots(self, now: float) -> list[Event]:
        """One array for all slots whose worker has no pilot and no job that will bring one."""
        slots = [
            slot_id
            for slot_id, slot in self._slots.items()
            if slot.has_waiting and slot_id not in self._arrays
        ]
        if not slots or now < self._retry_s:
            return []
        try:
            array = submit_array(array_script(self._job_request, self._folder, slots), self._folder)
        except SetupError as error:
            if not self._submitted_s:
                raise  # it has never worked
            self._retry_s = now + _RETRY_S
            events: list[Event] = []
            for slot_id in slots:
                worker_id = self._slots[slot_id].worker_id
                assert worker_id is not None
                events += self._tell(slot_id, worker_id, str(error).split("\n", 1)[0])
            return events
        self._submitted_s[array] = now
        self._arrays.update(dict.fromkeys(slots, array))
        self._watch.hurry(now)
        return self._say_why_again(slots)

    def _say_why_again(self, slots: Sequence[int]) -> list[Event]:
        """That these slots ask for a job because somebody has cancelled the one they had."""
        events: list[Event] = []
        for slot_id in slots:
            worker_id, text = self._slots[slot_id].worker_id, self._cancelled.pop(slot_id, "")
            if worker_id is not None and text:
                events += self._tell(slot_id, worker_id, f"asks for another job: {text}")
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
        **needs_of_pilots(assignment.cluster, assignment.targets),
    }
    write_atomic(folder.pilot_assignment, orjson.dumps(record))
