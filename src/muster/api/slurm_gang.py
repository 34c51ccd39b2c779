"""A gang on SLURM: submit its job once, stay with it, say how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from muster.api.earlier_work import move_aside
from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.codec import write_json
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SOME_FAILED, SetupError
from muster.base.settings import read_settings
from muster.base.tail import Tail
from muster.run.folder import RunFolder
from muster.run.record import Kind, read_job
from muster.run.state import last_ending
from muster.slurm.commands import JobStatus, cancel_job, job_status, never_starts, submit
from muster.slurm.gang import GangRequest, NodeCommand, gang_script
from muster.slurm.site import read_site

__all__ = ["GangRequest", "NodeCommand", "SlurmGang", "SlurmJob", "follow", "hand_in"]

_LOOK_S = 0.2
#: The controller of a large cluster is asked more and more seldom by one who waits.
_ASK_S, _ASK_LATER_S = 1.0, 60.0
_FILE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class SlurmGang:
    """What runs on the nodes, what it asks of SLURM, and the folder of its run.

    ``restart``: what the folder holds is moved aside before the job is submitted.
    """

    folder: RunFolder
    command: NodeCommand
    request: GangRequest
    kind: Kind
    restart: bool = False

    def script(self) -> str:
        """Exactly what would be sent. Changes nothing."""
        site = read_site(read_settings())
        return gang_script(self.request, site, self.command, self.folder).text()

    def make_ready(self) -> Path:
        """Make the folder of its output, without which SLURM ends a job and says nothing."""
        self.folder.slurm.mkdir(parents=True, exist_ok=True)
        return self.folder.slurm


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of this run folder. ``is_new``: it was submitted by this call."""

    folder: RunFolder
    job_id: str
    is_new: bool
    is_same_script: bool = True

    @property
    def log(self) -> Path:
        return self.folder.slurm_log(self.job_id)


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job ended, as a sentence and as the command's exit code."""

    job: SlurmJob
    state: str
    exit_code: int
    sentence: str


def hand_in(gang: SlurmGang, argv: Sequence[str]) -> SlurmJob:
    """Submit the gang's job, or find the one of this folder that still lives.

    Two such calls at once submit one job. Raises SetupError when SLURM refuses the job.
    """
    folder, text = gang.folder, gang.script()
    try:
        if gang.restart:
            move_aside(folder, gang.kind)
        folder.slurm.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.slurm / "submit.lock"):
            if (before := _living(folder, text)) is not None:
                return before
            write_atomic(folder.slurm_script, text.encode())
            job_id = submit(folder.slurm_script, gang.command.cwd)
            record = {"job_id": job_id, "script": _digest(text), "argv": list(argv)}
            write_json(folder.slurm_job, {**record, "cwd": str(gang.command.cwd)})
    except OSError as error:
        raise explain_os_error(error, "use the run folder", folder.path) from error
    return SlurmJob(folder=folder, job_id=job_id, is_new=True)


def follow(job: SlurmJob, hear: Callable[[str], None], say: Callable[[str], None]) -> JobEnd:
    """Stay with the job to its end: ``hear`` gets what it prints, ``say`` what becomes of it.

    A KeyboardInterrupt leaves the job as it is. Raises SetupError for a job that can never start.
    """
    tail = Tail(job.log, hear, lambda: None)
    began_s = asked_s = time.monotonic()
    status, told, is_certain = job_status(job.job_id), "", False
    while True:
        if (now := _news(status)) != told:
            say(f"job {job.job_id}: {now}")
            told = now
        if not status.is_alive and is_certain:
            break
        # A job on its way back into the queue may look as if it had ended.
        is_certain = not status.is_alive
        while time.monotonic() < asked_s + _pause_s(asked_s - began_s):
            time.sleep(_LOOK_S)
            tail.read()
        last, status, asked_s = status, _asked(job, status), time.monotonic()
        _check_hope(job, status, last)
    _read_rest(job, tail)
    return _end_of(job, status)


def _living(folder: RunFolder, text: str) -> SlurmJob | None:
    if not folder.slurm_job.exists():
        return None
    record = read_job(folder)
    job_id = str(record["job_id"])
    if not job_status(job_id).is_alive:
        return None
    is_same = record["script"] == _digest(text)
    return SlurmJob(folder=folder, job_id=job_id, is_new=False, is_same_script=is_same)


def _asked(job: SlurmJob, before: JobStatus) -> JobStatus:
    try:
        return job_status(job.job_id)
    except SetupError:  # a controller that restarts; the job does not mind
        return before


def _news(status: JobStatus) -> str:
    again = f", started again {status.restarts}×" if status.restarts else ""
    if status.state == "PENDING":
        return f"PENDING ({status.reason or 'no reason given'}){again}"
    on = f" on {status.nodes}" if status.state == "RUNNING" and status.nodes else ""
    return f"{status.state}{on}{again}"


def _pause_s(waited_s: float) -> float:
    """A twentieth of what it has taken so far, and never more than a minute."""
    return min(_ASK_LATER_S, max(_ASK_S, waited_s / 20))


def _check_hope(job: SlurmJob, status: JobStatus, last: JobStatus) -> None:
    """SetupError, and the job cancelled, when two answers say that it can never start."""
    if status.state != "PENDING" or (last.state, last.reason) != (status.state, status.reason):
        return
    error = never_starts(job.job_id, status.reason)
    if error is not None:
        cancel_job(job.job_id)
        raise error


def _read_rest(job: SlurmJob, tail: Tail) -> None:
    """The log's end may come later than the job's, over a network file system."""
    deadline = time.monotonic() + (_FILE_S if job.is_new else 0.0)
    while not job.log.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    tail.read(is_last=True)


_SENTENCES = {
    "CANCELLED": "was cancelled; the same command submits it again and goes on",
    "TIMEOUT": "has reached its time limit; ask for more with --time, the same command goes on",
    "DEADLINE": "has reached its deadline",
    "OUT_OF_MEMORY": "used more host memory than it was given; ask for more with --mem",
    "NODE_FAIL": "has lost a node; the same command submits it again and goes on",
    "PREEMPTED": "gave way to a job of higher priority; the same command submits it again",
    "BOOT_FAIL": "was given a node that does not start",
}


def _end_of(job: SlurmJob, status: JobStatus) -> JobEnd:
    state, code = status.state, status.exit_code
    if state == "UNKNOWN":  # SLURM has forgotten it; the run folder has not
        last = last_ending(job.folder)
        code = EXIT_SOME_FAILED if last is None else last
        words = f"is not known to SLURM any more; its launcher ended with {last}"
    elif state == "COMPLETED":
        words = "has ended well"
    elif state in _SENTENCES:
        words = _SENTENCES[state]
        code = EXIT_INTERRUPTED if state == "CANCELLED" else code or EXIT_SOME_FAILED
    else:
        words = f"has {_failure(status)}; {_what_it_printed(job)}"
        code = code or EXIT_SOME_FAILED
    code = EXIT_OK if state == "COMPLETED" else code
    return JobEnd(job=job, state=state, exit_code=code, sentence=f"SLURM job {job.job_id} {words}.")


def _failure(status: JobStatus) -> str:
    if status.exit_code:
        return f"failed with exit code {status.exit_code}"
    if status.signal:
        return f"been ended by signal {status.signal}"
    return f"ended in the state {status.state} ({status.reason or 'SLURM gives no reason'})"


def _what_it_printed(job: SlurmJob) -> str:
    return f"what it printed: {job.log}" if job.log.exists() else "it has printed nothing"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
