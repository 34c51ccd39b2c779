"""SLURM's commands: submit a script, ask how a job is, end one; and which job runs a run folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.base.codec import read_record, write_json
from muster.base.errors import SetupError
from muster.base.settings import child_environment, kept_environment, variable
from muster.run.folder import RunFolder
from muster.run.record import known_id, own_id
from muster.slurm.request import CORES_PER_GPU
from muster.slurm.script import outside_of_jobs
from muster.slurm.states import (
    SQUEUE,
    Elements,
    JobStatus,
    read_sacct,
    read_scontrol,
    read_squeue,
)

_LIMIT_S = 60.0
#: Variables that say which cluster is meant.
_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")


class RefusedError(SetupError):
    """SLURM has not taken a job, for certain."""


# ---------------------------------------------------------------- sending


def submit(script: Path, cwd: Path) -> str:
    """Send a batch script from the folder ``cwd``; returns the job's id.

    Raises RefusedError with sbatch's own words, and SetupError where SLURM does not answer.
    """
    done = run_command("sbatch", "--parsable", str(script), cwd=cwd)
    if done.returncode:
        if _has_no_controller(done.stderr):
            raise no_answer(done.stderr, "sbatch")
        words = _plain(done.stderr, "sbatch")
        raise RefusedError(f"SLURM has refused the job: {words}", hint=_advice(words))
    return done.stdout.strip().partition(";")[0]


def submit_array(text: str, folder: RunFolder) -> int:
    """Send an array's script and keep it beside the outputs; returns the array's id.

    Raises RefusedError with sbatch's own words, and SetupError where SLURM does not answer: the
    array may have been taken all the same, so its script stays.
    """
    folder = RunFolder(folder.path.absolute())
    folder.job_files.mkdir(parents=True, exist_ok=True)
    path = folder.job_files / f"submission-{os.getpid()}.sh"
    path.write_text(text)
    cluster = {name: value for name in _CLUSTER if (value := variable(name)) is not None}
    try:
        with outside_of_jobs(), kept_environment(cluster):
            job_id = submit(path, Path.cwd())
    except RefusedError:
        path.unlink()
        raise
    path.rename(folder.job_files / f"{job_id}_submission.sh")
    return int(job_id)


def cancel(*jobs: str) -> None:
    """End these jobs, such as ``812_3``; those that have ended are no error."""
    if jobs:
        run_command("scancel", "--quiet", *sorted(jobs))


# ---------------------------------------------------------------- asking


def job_status(job_id: str) -> JobStatus:
    """How the job is now, as SLURM's controller says, else its accounting; else UNKNOWN.

    Raises SetupError when the controller does not answer.
    """
    done = run_command("scontrol", "-o", "show", "job", job_id)
    if done.returncode == 0:
        return read_scontrol(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise no_answer(done.stderr, "scontrol")
    words = ("-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode")
    kept = run_command("sacct", *words) if shutil.which("sacct") else None
    if kept is None or kept.returncode or not kept.stdout.strip():
        return JobStatus("UNKNOWN")
    return read_sacct(kept.stdout)


def elements_of(name: str) -> Elements:
    """The elements of all jobs of this name.

    Raises SetupError where SLURM cannot be asked.
    """
    done = run_command(*SQUEUE, f"--name={name}", limit_s=30.0)
    if done.returncode:
        raise no_answer(done.stderr, "squeue")
    return read_squeue(done.stdout)


def show_job(job: str, *, limit_s: float) -> str:
    """What ``scontrol show job`` prints; nothing when SLURM does not answer within the limit."""
    return _try("scontrol", "show", "job", job, limit_s=limit_s)


def requeue(job: str, *, limit_s: float) -> None:
    """Send a job back into the queue, if SLURM answers; SLURM then ends its processes."""
    _try("scontrol", "requeue", job, limit_s=limit_s)


def _try(*words: str, limit_s: float) -> str:
    try:
        return run_command(*words, limit_s=limit_s).stdout
    except (SetupError, OSError):
        return ""


def run_command(
    *words: str, cwd: Path | None = None, limit_s: float = _LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands, whatever its exit code, in the folder ``cwd``.

    Raises RefusedError where there is no such command, and SetupError where it does not end within
    the limit.
    """
    try:
        return subprocess.run(
            words,
            cwd=cwd,
            env=child_environment({"SLURM_TIME_FORMAT": "standard"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except FileNotFoundError:
        raise RefusedError(
            f"There is no {words[0]} on this machine.",
            hint="--on slurm is for a machine with SLURM's commands: a cluster's login node.",
        ) from None
    except subprocess.TimeoutExpired:
        raise no_answer(f"{words[0]} has waited for {limit_s:g} s", words[0]) from None


# ---------------------------------------------------------------- what went wrong

#: What a command prints when slurmctld cannot be reached.
_NO_CONTROLLER = (
    "unable to contact slurm controller", "connection refused", "connection failure",
    "socket timed out", "unable to establish configuration source", "communication connection",
    "zero bytes were transmitted", "no route to host",
)  # fmt: skip


def _has_no_controller(stderr: str) -> bool:
    return any(words in stderr.lower() for words in _NO_CONTROLLER)


def no_answer(stderr: str, command: str) -> SetupError:
    """The one error for a cluster that cannot be asked, whichever command noticed it."""
    return SetupError(
        f"SLURM does not answer: {_plain(stderr, command)}",
        hint="`scontrol ping` says whether its controller is up; when it is, run the same command "
        "again: it goes on where it was.",
    )


def _advice(words: str) -> str:
    """What to do about a refusal that says ``words``."""
    small = words.lower()
    if "array" in small:
        config = run_command("scontrol", "show", "config").stdout
        most = re.search(r"MaxArraySize\s*=\s*(\d+)", config)
        limit = f"at most {most[1]} elements" if most else "a limit (scontrol show config)"
        return (
            f"an array has {limit} here (MaxArraySize): lower --workers or --array, as each worker "
            "takes many tasks; or split the run."
        )
    if "partition" in small:
        known = run_command("sinfo", "-h", "-o", "%R").stdout.split()
        return f"use --partition NAME; the partitions here are {', '.join(sorted(set(known)))}."
    if "account" in small:
        return "use --account NAME; `sacctmgr show associations user=$USER` lists yours."
    if "node configuration" in small or "cpu count" in small:
        return (
            f"no node has that much. {CORES_PER_GPU} cores are asked for with each GPU unless "
            "--cpus-per-worker N or --cpus-per-node N says otherwise; `sinfo -o '%P %c %m %G'` "
            "shows the nodes."
        )
    return "--dry-run shows the script that is sent; `sinfo` shows what there is."


def _plain(text: str, command: str) -> str:
    """What a command printed, in one line: ``sbatch: error: no`` becomes ``no``."""
    lines: Sequence[str] = [
        line.removeprefix(f"{command}: ").removeprefix("error: ").strip()
        for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line) or "it gave no reason"


# ---------------------------------------------------------------- the job of a run folder


def write_job(folder: RunFolder, job_id: str, digest: str) -> None:
    """Write ``slurm/job.json``; one process at a time may call this.

    ``digest``: a hash of all that was submitted.
    """
    values = {"job_id": job_id, "script": digest, "folder": own_id(folder).text}
    write_json(folder.slurm_job, values)


def read_job(folder: RunFolder) -> Mapping[str, Any] | None:
    """The record; None where there is none, or where the job works on the original of this copy."""
    if not folder.slurm_job.exists():
        return None
    shape = {"job_id": str, "script": str}
    record = read_record(folder.slurm_job, "record of the SLURM job", shape)
    is_ours = record.get("folder") in (None, known_id(folder))  # older records name no folder
    return record if is_ours else None


def living_job(folder: RunFolder) -> tuple[str, JobStatus] | None:
    """The folder's job and how it is, while it waits, runs or will run again.

    Raises SetupError where SLURM cannot be asked.
    """
    record = read_job(folder)
    if record is None:
        return None
    status = job_status(record["job_id"])
    return (record["job_id"], status) if status.is_alive else None


def jobs_at_work(folder: RunFolder) -> list[str]:
    """The jobs that may still write to the folder, also those that wait; none without SLURM."""
    found: list[str] = []
    with suppress(SetupError):  # no SLURM here
        for name in (folder.job_name, folder.array_name) if folder.job_files.exists() else ():
            found += [f"{a}_{n}" for (a, n), item in elements_of(name).items() if item.is_alive]
        if (job := living_job(folder)) is not None:
            found.append(job[0])
    return found


def typed_for_job(folder: RunFolder, job_id: str | None) -> tuple[str, ...] | None:
    """The words with which an older muster submitted this job; None for any other job.

    The script of such a job holds the whole command and does not start from the run's record.
    """
    record = None if job_id is None else read_job(folder)
    if record is None or record["job_id"] != job_id or not isinstance(record.get("argv"), list):
        return None
    return tuple(map(str, record["argv"]))
