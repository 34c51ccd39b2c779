"""A gang on SLURM: submit its job once, stay with it, say how it ended.

What the job runs is written down in the run folder before it is submitted, and read from there by
the launchers on its nodes (``muster resume RUN --node-rank I``).
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from muster.api.start.earlier_work import move_aside, put_back
from muster.api.start.options import GangOptions
from muster.base.atomic_files import explain_os_error, write_atomic
from muster.base.code import Code, changed_files
from muster.base.codec import to_json
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SOME_FAILED,
    PlanMismatchError,
    SetupError,
    UsageError,
)
from muster.base.journal import Tail
from muster.base.settings import read_settings
from muster.run.folder import RunFolder
from muster.run.record import Kind, read_run, write_run
from muster.run.session import Renew, open_run
from muster.run.state import last_ending
from muster.slurm.commands import RefusedError, living_job, read_job, submit, write_job
from muster.slurm.follow import follow_job
from muster.slurm.request import JobRequest, with_defaults
from muster.slurm.script import gang_script
from muster.slurm.states import SENTENCES, JobStatus

_LOOK_S, _FILE_S = 0.2, 10.0


@dataclass(frozen=True, kw_only=True)
class SlurmGang:
    """What a gang asks of SLURM, the folder of its run, and the record that its nodes start from.

    ``restart``: what the folder holds is moved aside before the job is submitted. ``of``: see
    `gang_script`.
    """

    folder: RunFolder
    request: JobRequest
    kind: Kind
    renew: Renew
    restart: bool = False
    of: str = ""

    def script(self) -> str:
        """Exactly what would be sent. It changes nothing."""
        request = with_defaults(self.request, read_settings())
        return gang_script(request, self.folder, Path.cwd(), self.of)

    def make_ready(self) -> Path:
        """Write down what a script that is sent by hand will run; returns where its output goes.

        Raises UsageError while a job of this folder has not ended.
        """
        if self.restart:
            move_aside(self.folder, self.kind)
        with suppress(SetupError):  # no SLURM here
            if (job := living_job(self.folder)) is not None:
                raise UsageError(
                    f"{self.folder.path} is the folder of job {job[0]}, which has not ended.",
                    hint="wait for it, end it with scancel, or choose another --run-dir.",
                )
        self.write_down()
        return self.folder.slurm

    def write_down(self) -> None:
        """Write the record, and make the folder without which SLURM ends a job and says nothing."""
        with open_run(self.folder, self.renew):
            self.folder.slurm.mkdir(exist_ok=True)


class NodeStart(NamedTuple):
    """One node of a job.

    ``place``: its number and where the nodes meet, as options of a gang. ``argv``: the command that
    was handed in.
    """

    place: Mapping[str, Any]
    argv: tuple[str, ...]


def options_on_node(
    node: NodeStart, folder: RunFolder, options: GangOptions, code: Code
) -> GangOptions:
    """The options of the launcher on a node, made from the ``options`` of the job.

    Raises PlanMismatchError where the program is no longer the one that was handed in.
    """
    assert options.slurm is not None
    changed = [] if options.allow_changed_code else changed_files(read_run(folder).code, code)
    if changed:
        raise PlanMismatchError(
            f"The code has changed since {folder.path} was submitted to SLURM: "
            f"{', '.join(changed[:8])}. The job would run another program.",
            hint=f"submit it again: {shlex.join(node.argv)}; with --allow-changed-code a job runs "
            "what it finds when it starts.",
        )
    return dataclasses.replace(
        options, slurm=None, num_nodes=options.slurm.num_nodes, restart=False, **node.place
    )


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of this run folder.

    ``is_new``: it was submitted by this call. ``aside``: where the run before it is kept.
    """

    folder: RunFolder
    job_id: str
    is_new: bool
    is_same: bool = True
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


def hand_in(gang: SlurmGang) -> SlurmJob:
    """Submit the gang's job, or find the one of this folder that still lives.

    Two such calls at once submit one job. Raises SetupError when SLURM refuses the job, and for
    ``restart`` while a job of the folder lives.
    """
    folder, text = gang.folder, gang.script()
    asked = gang.renew(None)
    # Where it runs and its folder are in the script's text; older records have no such options.
    how = {name: v for name, v in asked.options.items() if name not in ("executor", "run_dir")}
    digest = sha256(text.encode() + to_json([asked.spec, how])).hexdigest()
    aside: Path | None = None
    try:
        aside = move_aside(folder, gang.kind) if gang.restart else None
        folder.slurm.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.slurm / "submit.lock"):
            if (job := living_job(folder)) is not None:
                known = read_job(folder) or {}
                is_same = "argv" in known or known["script"] == digest  # older records have an argv
                return SlurmJob(folder=folder, job_id=job[0], is_new=False, is_same=is_same)
            before = read_run(folder) if folder.exists() else None
            # The job may start before sbatch has returned, so its record is there before, and the
            # run's lock, which the first node takes, is free again.
            gang.write_down()
            write_atomic(folder.slurm_script, text.encode())
            try:
                job_id = submit(folder.slurm_script, Path.cwd())
            except RefusedError:  # after any other error the job may be there all the same
                if before is None:
                    folder.run_json.unlink()
                else:
                    write_run(folder, before)
                raise
            write_job(folder, job_id, digest)
    except RefusedError:
        if aside is not None:
            put_back(aside, folder)
        raise
    except OSError as error:
        raise explain_os_error(error, "use the run folder", folder.path) from error
    return SlurmJob(folder=folder, job_id=job_id, is_new=True, aside=aside)


def follow(job: SlurmJob, hear: Callable[[str], None], say: Callable[[str], None]) -> JobEnd:
    """Stay with the job to its end: ``hear`` gets what it prints, ``say`` what becomes of it.

    A KeyboardInterrupt leaves the job as it is. Raises SetupError for a job that can never start.
    """
    # A job that was submitted just now may already have printed, or be over.
    tail = Tail(job.log, hear, start=0 if job.is_new else None)
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
        end = "left no exit code" if last is None else f"ended with exit code {last}"
        words = f"is not known to SLURM any more; its launcher {end}"
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
