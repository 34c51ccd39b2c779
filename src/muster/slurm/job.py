"""The job that a run folder was handed in as: ``slurm/job.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.base.codec import read_record, write_json
from muster.run.folder import RunFolder
from muster.run.folder_id import known_id, own_id


def write_job(
    folder: RunFolder, job_id: str, *, script: str, argv: Sequence[str], cwd: Path
) -> None:
    """Only one at a time may call this."""
    values = {"job_id": job_id, "script": digest_of(script), "argv": list(argv), "cwd": str(cwd)}
    write_json(folder.slurm_job, {**values, "folder": own_id(folder).text})


def read_job(folder: RunFolder) -> Mapping[str, Any] | None:
    """The record; None where there is none, or where the folder is a copy of the job's."""
    if not folder.slurm_job.exists():
        return None
    shape = {"job_id": str, "script": str, "argv": list}
    record = read_record(folder.slurm_job, "record of the SLURM job", shape)
    is_ours = record.get("folder") in (None, known_id(folder))  # older records name no folder
    return record if is_ours else None


def typed_for_job(folder: RunFolder, job_id: str | None) -> tuple[str, ...] | None:
    """What was typed to submit this job, None when the folder's job is another one."""
    record = None if job_id is None else read_job(folder)
    return tuple(record["argv"]) if record is not None and record["job_id"] == job_id else None


def digest_of(script: str) -> str:
    return sha256(script.encode()).hexdigest()
