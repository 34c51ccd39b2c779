"""The state of a run in one word, also where SLURM or the elements of an array know more of it.

Looking asks here, and every listing; `why` says more, and takes longer to load than to answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from muster.api.runs import Run, Status
from muster.base.errors import SetupError
from muster.run.state import Word, state_of_array
from muster.slurm.commands import living_job, read_job
from muster.slurm.states import JobStatus

if TYPE_CHECKING:
    from muster.api.slurm.array import ArrayProgress


def array_of(run: Run, *, asks_slurm: bool) -> ArrayProgress | None:
    """Of a run with --array, which has no coordinator; None for any other."""
    if not run.folder.elements_json.exists():
        return None
    from muster.api.slurm.array import array_progress

    return array_progress(run.folder, asks_slurm=asks_slurm)


def job_of(run: Run) -> tuple[str, JobStatus] | None:
    """Of a run that was handed in to SLURM, its job while that lives, as far as one can ask."""
    with suppress(SetupError):
        return living_job(run.folder)
    return None


def ended_job(run: Run, found: Status, job: tuple[str, JobStatus] | None) -> str | None:
    """The job that should have begun the run and does not live; None where one cannot tell."""
    with suppress(SetupError):
        if found.state == "not begun" and job is None and living_job(run.folder) is None:
            record = read_job(run.folder)
            return None if record is None else str(record["job_id"])
    return None


def word_of(
    found: Status, array: ArrayProgress | None, job: tuple[str, JobStatus] | None = None
) -> Word:
    """The state of a run, also where SLURM or the elements of an array know more than it does."""
    if job is not None and job[1].waits and found.state == "not begun":
        return "queued"
    if array is None:
        return found.state
    num_open = found.counts["waiting"] + found.counts["running"]
    return state_of_array(
        found.state, num_open=num_open, num_running=array.num_running, num_queued=array.num_queued
    )
