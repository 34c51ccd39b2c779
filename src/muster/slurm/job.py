"""Which SLURM job runs a run folder, as ``slurm/job.json`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.base.codec import read_record, write_json
from muster.run.folder import RunFolder
from muster.run.record import known_id, own_id
from muster.slurm.commands import job_status
from muster.slurm.states import JobStatus


def write_job(folder: RunFolder, job_id: str, digest: str) -> None:
    """Only one process at a time may call this. ``digest``: a hash of all that was submitted."""
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


def typed_for_job(folder: RunFolder, job_id: str | None) -> tuple[str, ...] | None:
    """What was typed to submit this job, if an older muster did so; None for any other job.

    The script of such a job holds the whole command and does not start from the run's record.
    """
    record = None if job_id is None else read_job(folder)
    if record is None or record["job_id"] != job_id or not isinstance(record.get("argv"), list):
        return None
    return tuple(map(str, record["argv"]))
