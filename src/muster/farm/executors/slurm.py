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
from muster.farm.events import Event, Progress
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import look_every_s, needs_of_pilots
from muster.farm.executors.mailbox import boxes_of, has_assigned, read_beat, write_beat
from muster.farm.executors.slurm_script import job_name, path_for_output, submit
from muster.farm.executors.slurm_seat import Seat
from muster.farm.executors.slurm_states import Element, ending_of
from muster.farm.executors.slurm_watch import (
    Elements,
    JobWatch,
    cancel,
    elements_now,
    end_all,
    may_serve,
    preempted,
)
from muster.farm.model import Outcome, SlotSpec, Task
from muster.run.folder import RunFolder
from muster.slurm.commands import never_starts, why_never

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
        path_for_output(self._folder)  # refuses what SLURM cannot write to
        self._request = assignment.cluster
        self._name = job_name(self._folder)
        self._watch = JobWatch()
        self._seats: dict[int, Seat] = {}
        self._owners: dict[int, Seat] = {}  # by worker
        self._arrays: dict[int, int] = {}  # slot → the array whose element serves it, or will
        self._submitted_s: dict[int, float] = {}
        self._told: dict[int, str] = {}  # slot → why it waits, as last told
        self._retry_s = 0.0
        self._happened: list[Event] = []
        self._cancelled: dict[int, str] = {}  # slot → its last job, which somebody has cancelled
        self._never: dict[int, str] = {}  # slot → why its job can never start, by the last answer
        found = elements_now(self._name)
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
        seat = self._seat(slot.slot_id)
        seat.start(worker_id, slot)
        self._owners[worker_id] = seat
        self._told.pop(slot.slot_id, None)
        return self._folder.worker_log(slot.slot_id).name

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        self._order(worker_id, remote.send_command(worker_id, tasks, together=together))

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._order(worker_id, remote.share_command(worker_id, task_id, others))

    def revoke(self, worker_id: int) -> None:
        self._order(worker_id, remote.revoke_command(worker_id))

    def end(self, worker_id: int, *, kill: bool) -> None:
        seat = self._owners.get(worker_id)
        if seat is None or seat.worker_id != worker_id:
            return
        gone = seat.end_unplaced()
        self._happened += gone
        if not gone:
            self._order(worker_id, remote.end_command(worker_id, kill=kill))

    def poll(self, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._keep_beating(now)
            events, self._happened = self._happened, []
            for seat in self._seats.values():
                if seat.due_s <= now:
                    before = seat.box
                    events += seat.look(now)
                    if before is not None and (seat.leaving or seat.box != before):
                        self._watch.hurry(now)  # why it leaves is SLURM's to say
            events += self._watch_jobs(now)
            events += self._ask_for_pilots(now)
            if events or now >= deadline:
                return events
            due_s = min([deadline, self._beat_due_s, self._watch.due_s]
                        + [seat.due_s for seat in self._seats.values()])  # fmt: skip
            time.sleep(max(0.001, min(due_s, deadline) - now))

    def close(self) -> None:
        """Nothing of this run is left in the queue afterwards."""
        self._watch.close()
        if self._is_superseded():
            return  # the jobs are the other's now
        write_beat(self._folder, self._beat._replace(is_closed=True))
        for seat in self._seats.values():
            seat.close()
        if self._arrays or self._submitted_s:
            end_all(self._name, patience_s=_CLOSE_PATIENCE_S, limit_s=_CLOSE_LIMIT_S)

    # ------------------------------------------------------------------ seats

    def _seat(self, slot_id: int) -> Seat:
        if slot_id not in self._seats:
            every_s = look_every_s(self._request.num_workers)
            self._seats[slot_id] = Seat(self._folder, slot_id, self._beat.session, every_s)
        return self._seats[slot_id]

    def _order(self, worker_id: int, frames: bytes) -> None:
        seat = self._owners.get(worker_id)
        if seat is not None:
            seat.order(worker_id, frames)

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
            seat = self._seat(left.slot_id)
            seat.adopt(left)
            self._arrays[left.slot_id] = left.job_id
            if left.worker is not None:
                self._owners[left.worker.worker_id] = seat
        empty = [n for n in range(self._request.num_workers) if self._seat(n).box is None]
        for number in empty:  # of boxes whose pilot is gone, all news are old
            boxes = boxes_of(self._folder, number)
            gone = [box.age for box in boxes if not (fits and may_serve(box, found))]
            self._seats[number].pass_over(gone)
        there = sorted(key for key, item in found.items() if item.is_there)
        for array, number in there if fits else []:
            if number in empty and array >= self._seats[number].age[0]:
                self._arrays[number] = array  # the newest, as they are sorted
        unwanted = [(a, n) for a, n in there if self._arrays.get(n) != a]
        cancel([f"{a}_{n}" for a, n in unwanted])
        for array, number in unwanted:  # it may still begin to speak
            if number in empty and number not in self._arrays:
                self._seats[number].pass_over([(array, found[array, number].restarts)])

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
                element = Element("GONE")
            events += self._heed(self._seats[slot_id], array, element)
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
        never = {slot_id: why for slot_id, why in waiting.items() if why_never(why) is not None}
        is_hopeless = never and len(never) == len(jobs) and never == self._never
        self._never = never
        if is_hopeless and all(seat.box is None for seat in self._seats.values()):
            slot_id, reason = min(never.items())
            error = never_starts(jobs[slot_id], reason)
            assert error is not None
            raise error

    def _heed(self, seat: Seat, array: int, element: Element) -> list[Event]:
        """What the state of its job means for a slot."""
        job = f"{array}_{seat.slot_id}"
        if not element.is_there:
            del self._arrays[seat.slot_id]
            outcome, what = ending_of(element.state)
            if element.state == "CANCELLED":  # not by this coordinator
                self._note_cancelled(seat.slot_id, job)
            trace = self._last_words(job) if seat.box is None else ""
            return seat.lost(outcome, f"its job {job} {what}", trace)
        if seat.box is not None and element.restarts > seat.box.restart:
            outcome = Outcome.PREEMPTED if preempted(job) else Outcome.LOST
            what = "preempted and requeued" if outcome is Outcome.PREEMPTED else "requeued"
            return seat.lost(outcome, f"its job {job} was {what} by SLURM")
        if seat.has_waiting and seat.worker_id is not None:
            text = f"waits for SLURM: {element.reason or element.state.lower()} (job {job})"
            return self._tell(seat.slot_id, seat.worker_id, text)
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
            for slot_id, seat in self._seats.items()
            if seat.has_waiting and slot_id not in self._arrays
        ]
        if not slots or now < self._retry_s:
            return []
        try:
            array = submit(self._request, self._folder, slots)
        except SetupError as error:
            if not self._submitted_s:
                raise  # it has never worked
            self._retry_s = now + _RETRY_S
            events: list[Event] = []
            for slot_id in slots:
                worker_id = self._seats[slot_id].worker_id
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
            worker_id, text = self._seats[slot_id].worker_id, self._cancelled.pop(slot_id, "")
            if worker_id is not None and text:
                events += self._tell(slot_id, worker_id, f"asks for another job: {text}")
        return events


def _write_assignment(folder: RunFolder, assignment: Assignment) -> None:
    record = {
        "run_id": assignment.run_id,
        "patience_s": PATIENCE_S,
        "lead_s": float(assignment.cluster.warn_before_s),
        "look_every_s": look_every_s(assignment.cluster.num_workers),
        **needs_of_pilots(assignment.cluster, assignment.targets),
    }
    write_atomic(folder.pilot_assignment, orjson.dumps(record))
