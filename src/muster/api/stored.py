"""``run.json``: what a run folder was made for, and whether a command means the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.api.options import SweepOptions
from muster.api.workload import Workload
from muster.base.errors import PlanMismatchError, SetupError
from muster.base.records import read_json, to_json, write_json
from muster.base.run_folder import RunFolder

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    run_id: str
    name: str
    created_s: float
    targets: tuple[dict[str, Any], ...]
    spec: Mapping[str, Any]
    fixed: Mapping[str, Any]
    code: dict[str, str]
    options: dict[str, Any]
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    format: int = FORMAT


def write_stored(folder: RunFolder, stored: StoredRun) -> None:
    write_json(folder.run_json, stored)


def read_stored(folder: RunFolder) -> StoredRun:
    record = read_json(folder.run_json, "run.json")
    if not isinstance(record, dict) or "run_id" not in record:
        raise SetupError(f"{folder.run_json} is not a run.json of muster.")
    if record.get("format", 0) > FORMAT:
        raise SetupError(
            f"{folder.run_json} was written by a newer muster (format {record['format']}).",
            hint="upgrade muster: pip install --upgrade muster-gpu.",
        )
    names = {field.name for field in dataclasses.fields(StoredRun)}
    values = {name: value for name, value in record.items() if name in names}
    values["targets"] = tuple(values["targets"])
    values["argv"] = tuple(values["argv"])
    return StoredRun(**values)


def typed_for_job(folder: RunFolder, job_id: str | None) -> tuple[str, ...] | None:
    """What was typed to submit this job, None when the folder's job is another one."""
    if job_id is None or not folder.slurm_job.exists():
        return None
    record = read_json(folder.slurm_job, "record of the SLURM job")
    return tuple(record["argv"]) if record["job_id"] == job_id else None


def check_same_plan(
    stored: StoredRun, workload: Workload, options: SweepOptions, *, has_results: bool
) -> None:
    """PlanMismatchError when the folder was made for something else, with the difference.

    More seeds (and what a recipe calls extendable) are no difference: they only add tasks.
    Changed source is one as soon as there are results of the old source.
    """
    if _plain(stored.fixed) != _plain(workload.fixed):
        lines = workload.difference(stored.fixed) or ["the plan"]
        raise PlanMismatchError(
            "This run folder was made for another plan:\n  " + "\n  ".join(lines),
            hint="choose another --run-dir or --name for the new plan; this one is untouched.",
        )
    changed = [
        name
        for name, digest in workload.code.items()
        if stored.code.get(name) not in (None, "", digest)
    ]
    if changed and has_results and not options.allow_changed_code:
        raise PlanMismatchError(
            f"The source of {', '.join(changed)} has changed since this run began, and the run "
            "holds results of the old source: old and new would be mixed in one table.",
            hint="use another --run-dir to start afresh, or --allow-changed-code to go on.",
        )


def _plain(value: Any) -> Any:
    return json.loads(to_json(value))
