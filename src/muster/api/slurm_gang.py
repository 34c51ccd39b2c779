"""A gang on SLURM: submit its job once, stay with it, say how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from muster.api.earlier_work import move_aside
from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SOME_FAILED
from muster.base.settings import read_settings
from muster.base.tail import Tail
from muster.run.folder import RunFolder
from muster.run.record import Kind
from muster.run.state import last_ending
from muster.slurm.commands import job_status, submit
from muster.slurm.follow import follow_job
from muster.slurm.job import digest_of, read_job, write_job
from muster.slurm.request import JobRequest
from muster.slurm.script import NodeCommand, gang_script
from muster.slurm.site import with_defaults
from muster.slurm.states import SENTENCES, JobStatus

__all__ = ["NodeCommand", "SlurmGang", "SlurmJob", "follow", "hand_in"]

_LOOK_S, _FILE_S = 0.2, 10.0


@dataclass(frozen=True, kw_only=True)
class SlurmGang:
    """What runs on the nodes, what it asks of SLURM, and the folder of its run.

    ``restart``: what the folder holds is moved aside before the job is submitted.
    """

    folder: RunFolder
    command: NodeCommand
    request: JobRequest
    kind: Kind
    restart: bool = False

    def script(self) -> str:
        """Exactly what would be sent. Changes nothing."""
        request = with_defaults(self.request, read_settings())
        return gang_script(request, self.command, self.folder)

    def make_ready(self) -> Path:
        """Make the folder of its output, without which SLURM ends a job and says nothing."""
        self.folder.slurm.mkdir(parents=True, exist_ok=True)
        return self.folder.slurm


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of this run folder.

    ``is_new``: it was submitted by this call. ``aside``: where the run before it is kept.
    """

    folder: RunFolder
    job_id: str
    is_new: bool
    is_same_script: bool = True
    aside: Path | None = None

    @property
    def log(self) -> Path:
        return self.folder.slurm_log(self.job_id)


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job ended, as a sentence and as the command's exit code."""

    state: str
    exit_code: int
    sentence: str


def hand_in(gang: SlurmGang, argv: Sequence[str]) -> SlurmJob:
    """Submit the gang's job, or find the one of this folder that still lives.

    Two such calls at once submit one job. Raises SetupError when SLURM refuses the job, and for
    ``restart`` while a job of the folder lives.
    """
    folder, text = gang.folder, gang.script()
    try:
        aside = move_aside(folder, gang.kind) if gang.restart else None
        with FileLock(gang.make_ready() / "submit.lock"):
            record = read_job(folder)
            if record is not None and job_status(record["job_id"]).is_alive:
                is_same, job_id = record["script"] == digest_of(text), record["job_id"]
                return SlurmJob(folder=folder, job_id=job_id, is_new=False, is_same_script=is_same)
            write_atomic(folder.slurm_script, text.encode())
            cwd = gang.command.cwd
            job_id = submit(folder.slurm_script, cwd)
            write_job(folder, job_id, script=text, argv=argv, cwd=cwd)
    except OSError as error:
        raise explain_os_error(error, "use the run folder", folder.path) from error
    return SlurmJob(folder=folder, job_id=job_id, is_new=True, aside=aside)


def follow(job: SlurmJob, hear: Callable[[str], None], say: Callable[[str], None]) -> JobEnd:
    """Stay with the job to its end: ``hear`` gets what it prints, ``say`` what becomes of it.

    A KeyboardInterrupt leaves the job as it is. Raises SetupError for a job that can never start.
    """
    tail = Tail(job.log, hear, lambda: None)
    status = follow_job(job.job_id, tail.read, say)
    # The log's end may come later than the job's, over a network file system.
    deadline = time.monotonic() + (_FILE_S if job.is_new else 0.0)
    while not job.log.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    tail.read(is_last=True)
    code, words = _how_it_ended(job, status)
    sentence = f"SLURM job {job.job_id} {words}."
    return JobEnd(state=status.state, exit_code=code, sentence=sentence)


def _how_it_ended(job: SlurmJob, status: JobStatus) -> tuple[int, str]:
    """The command's exit code, and what the job has done."""
    failed = status.exit_code or EXIT_SOME_FAILED
    if status.state == "UNKNOWN":  # SLURM has forgotten it; the run folder has not
        last = last_ending(job.folder)
        words = f"is not known to SLURM any more; its launcher ended with {last}"
        return EXIT_SOME_FAILED if last is None else last, words
    if status.state in SENTENCES:
        codes = {"COMPLETED": EXIT_OK, "CANCELLED": EXIT_INTERRUPTED}
        return codes.get(status.state, failed), SENTENCES[status.state]
    printed = f"what it printed: {job.log}" if job.log.exists() else "it has printed nothing"
    return failed, f"has {_failure(status)}; {printed}"


def _failure(status: JobStatus) -> str:
    if status.exit_code:
        return f"failed with exit code {status.exit_code}"
    if status.signal:
        return f"been ended by signal {status.signal}"
    return f"ended in the state {status.state} ({status.reason or 'SLURM gives no reason'})"
