"""Workers in jobs of SLURM: pilots as elements of an array, reached through a shared folder.

One array is submitted for all workers that are wanted at a time; element i serves slot i. A pilot
that is lost is replaced by its own job when SLURM requeues it, else by another submission.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import orjson

from muster.base.atomic_files import write_atomic
from muster.base.clock import SystemClock
from muster.base.errors import SetupError, UsageError
from muster.base.journal import Journal
from muster.base.run_folder import RunFolder
from muster.base.sbatch import further_options
from muster.base.settings import kept_environment, read_settings, variable
from muster.base.slurm_commands import advice
from muster.base.slurm_site import read_site
from muster.farm.events import Event, Progress
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import (
    ClusterRequest,
    look_every_s,
    needs_of_pilots,
    with_site,
)
from muster.farm.executors.mailbox import boxes_of, has_assigned, read_beat, write_beat
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

#: How long pilots wait for a coordinator that has gone silent.
PATIENCE_S = 120.0
_BEAT_EVERY_S = 2.0
#: How long a job that was just submitted may be missing in squeue.
_UNSEEN_S = 30.0
_RETRY_S = 15.0
_CLOSE_PATIENCE_S, _CLOSE_LIMIT_S = 5.0, 60.0
#: Variables that say which cluster is meant.
_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_HOW_TO_END = "Ctrl-C or `muster cancel` ends the whole run"
_TAIL_BYTES = 4000


class SlurmExecutor:
    def __init__(self, assignment: Assignment) -> None:
        self._folder = RunFolder(assignment.folder.path.absolute())
        _path_for_output(self._folder)  # refuses what SLURM cannot write to
        self._request = assignment.cluster
        self._name = job_name(self._folder)
        self._watch = JobWatch(self._name)
        self._seats: dict[int, Seat] = {}
        self._owners: dict[int, Seat] = {}  # by worker
        self._arrays: dict[int, int] = {}  # slot → the array whose element serves it, or will
        self._submitted_s: dict[int, float] = {}
        self._told: dict[int, str] = {}  # slot → why it waits, as last told
        self._retry_s = 0.0
        self._happened: list[Event] = []
        self._cancelled: dict[int, str] = {}  # slot → its last job, which somebody has cancelled
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
                    events += seat.look(now)
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
        waiting = any(seat.has_waiting or seat.leaving for seat in self._seats.values())
        answer = self._watch.look(now, is_busy=waiting)
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
        return events

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


# ---------------------------------------------------------------------- what is submitted


def array_name(folder: RunFolder) -> str:
    """Names the array without a coordinator of this folder: no coordinator ends its elements."""
    return f"{job_name(folder)}-array"


def job_name(folder: RunFolder) -> str:
    """Names the pilots' jobs of this run folder and of no other; squeue filters by it."""
    path = str(folder.path.absolute())
    shown = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.path.absolute().name)[:24]
    return f"muster-{shown}-{sha256(path.encode()).hexdigest()[:10]}"


def script(request: ClusterRequest, folder: RunFolder, slots: Sequence[int], line: str = "") -> str:
    """The text that is handed to sbatch for these slots. Nothing is written or sent.

    ``line``: what each element runs, a line of bash; a pilot when there is none.
    """
    folder = RunFolder(folder.path.absolute())
    from_submitit = _submitit().slurm.slurm._make_sbatch_string
    parameters = _parameters(request, folder, slots, is_pilot=not line)
    command = line or pilot_command(folder)
    return str(from_submitit(command=command, folder=folder.job_files, **parameters))


def submit(request: ClusterRequest, folder: RunFolder, slots: Sequence[int], line: str = "") -> int:
    """Submit what ``script`` shows; the array's id.

    Raises SetupError with what sbatch said.
    """
    submitit = _submitit()
    folder = RunFolder(folder.path.absolute())
    folder.job_files.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.SlurmExecutor(folder=folder.job_files)
        executor.update_parameters(**_parameters(request, folder, slots, is_pilot=not line))
        with _outside_of_jobs(submitit):
            job = executor._submit_command(line or pilot_command(folder))
    except (RuntimeError, OSError) as error:
        raise SetupError(
            f"SLURM did not take the job: {_said(error)}",
            hint=advice(_said(error)),
        ) from None
    return int(job.job_id)


@contextmanager
def _outside_of_jobs(submitit: Any) -> Iterator[None]:
    """This may itself be a job, whose limits sbatch would take over; the cluster stays the same."""
    found = {name: value for name in _CLUSTER if (value := variable(name)) is not None}
    with submitit.helpers.clean_env(), kept_environment(found):
        yield


def pilot_command(folder: RunFolder) -> str:
    words = [sys.executable, "-m", "muster.farm.pilot", str(folder.path.absolute())]
    return shlex.join(words)


def _parameters(
    request: ClusterRequest, folder: RunFolder, slots: Sequence[int], *, is_pilot: bool
) -> dict[str, Any]:
    """As submitit names them, with what the site file adds."""
    request = with_site(request, read_site(read_settings()))
    output = f"{_path_for_output(folder)}/%A_%a.out"
    further = {name: value or True for name, value in further_options(request.slurm_args).items()}
    more: dict[str, Any] = {"array": _ranges(slots), "output": output, "requeue": True}
    if not is_pilot:  # a program that knows TERM: it finishes what it is at
        more["signal"] = f"TERM@{request.warn_before_s}"
    return {
        "job_name": job_name(folder) if is_pilot else array_name(folder),
        "partition": request.partition,
        "account": request.account,
        "time": request.time_limit,
        "cpus_per_task": request.cpus_per_worker,
        "gpus_per_node": request.gpus_per_worker or None,
        "mem": request.memory,
        "ntasks_per_node": 1,
        "setup": list(request.setup_lines) or None,
        "signal_delay_s": request.warn_before_s,
        "stderr_to_stdout": True,
        "wckey": None,
        "srun_args": ["--output", output, f"--cpus-per-task={request.cpus_per_worker}"],
        "additional_parameters": {**more, **further},
    }


def _path_for_output(folder: RunFolder) -> str:
    """The folder of the jobs' outputs as sbatch and srun read it, where % begins a field.

    Raises UsageError for a backslash, which tells them to replace no fields at all.
    """
    path = str(folder.job_files)
    if "\\" in path:
        raise UsageError(
            f"--run-dir {folder.path}: SLURM cannot write below a backslash.",
            hint="name another run folder.",
        )
    return path.replace("%", "%%")


def _ranges(slots: Sequence[int]) -> str:
    """Numbers as sbatch writes them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for number in sorted(slots):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _said(error: Exception) -> str:
    """The last line of what sbatch wrote, without submitit's words around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    from_sbatch = [line for line in lines if "sbatch: error:" in line]
    text = (from_sbatch or lines or [type(error).__name__])[0]
    return text.rpartition("sbatch: error:")[2].strip()


def _submitit() -> Any:
    try:
        import submitit
        import submitit.helpers
        import submitit.slurm.slurm
    except ImportError as error:
        raise SetupError(
            f"--on slurm needs submitit, which cannot be imported: {error}.",
            hint="pip install 'muster-gpu[slurm]'",
        ) from None
    return submitit
