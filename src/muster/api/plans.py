"""The run folder of a plan: choosing it, writing ``run.json``, refusing another plan."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.api.options import SweepOptions
from muster.api.runs import Run
from muster.api.stored import StoredRun, check_same_plan, read_stored, write_stored
from muster.api.workload import Workload
from muster.base.errors import PlanMismatchError
from muster.base.run_folder import RunFolder
from muster.base.settings import job_place
from muster.farm.identity import name_with_hash
from muster.farm.model import TaskState


def choose_folder(workload: Workload, options: SweepOptions) -> RunFolder:
    """``--run-dir``, or ``runs/<name>-<hash of what may not change>``.

    In an element of a SLURM array its number follows: the elements run at the same time, and one
    process works on a folder.
    """
    if options.run_dir is not None:
        return RunFolder(options.run_dir)
    name = name_with_hash(options.name or workload.name, workload.digest)
    place = job_place()
    return RunFolder(Path("runs") / (name if place is None else f"{name}-{place.element}"))


def open_plan(
    workload: Workload, options: SweepOptions, folder: RunFolder, argv: Sequence[str]
) -> StoredRun:
    """Write ``run.json`` of a new run, or make sure that the one there means the same."""
    if not folder.exists():
        if folder.ledger.exists():
            raise PlanMismatchError(
                f"{folder.path} holds a ledger but no run.json, so what it belongs to is unknown.",
                hint="choose another --run-dir, or restore run.json from a copy.",
            )
        stored = _new_stored(workload, options, folder, argv)
        write_stored(folder, stored)
        return stored
    stored = read_stored(folder)
    with_results = folder.ledger.exists() and Run(folder.path).counts()[TaskState.DONE] > 0
    # A map's chunks keep the rows that are done before the chunk is.
    with_results = with_results or folder.parts.exists()
    check_same_plan(stored, workload, options, has_results=with_results)
    renewed = dataclasses.replace(
        stored,
        spec=workload.spec,
        code=dict(workload.code),
        options=_options_record(options),
        argv=tuple(argv) or stored.argv,
    )
    if renewed != stored:
        write_stored(folder, renewed)
    return renewed


def _new_stored(
    workload: Workload, options: SweepOptions, folder: RunFolder, argv: Sequence[str]
) -> StoredRun:
    return StoredRun(
        run_id=uuid.uuid4().hex,
        name=folder.name,
        kind=workload.kind,
        created_s=time.time(),
        targets=tuple(dataclasses.asdict(spec) for spec in workload.targets),
        spec=workload.spec,
        fixed=workload.fixed,
        code=dict(workload.code),
        options=_options_record(options),
        argv=tuple(argv),
        cwd=str(Path.cwd()),
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """What ran this: enough to set it up again."""
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("muster-gpu", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _options_record(options: SweepOptions) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
