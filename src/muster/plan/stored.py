"""A plan in the folder of the run it was made for, and what the run then took."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from muster.base.atomic_files import explain_os_error
from muster.base.codec import read_json, read_record, write_json
from muster.base.errors import MusterError, SetupError
from muster.plan.calibrate import step_seconds
from muster.plan.compare import Comparison, MeasuredRun, compare
from muster.plan.units import Seconds
from muster.run.folder import RunFolder


def store_plan(folder: RunFolder, record: Mapping[str, Any]) -> Path:
    """Write plan.json into the folder of a run that may not have begun."""
    path = folder.plan_json
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(record))
    except OSError as error:
        raise explain_os_error(error, "write the plan into", folder.path) from None
    return path


def has_plan(folder: RunFolder) -> bool:
    return (folder.plan_json).is_file()


def write_comparison(folder: RunFolder) -> Comparison | None:
    """Predicted against measured of a finished training, written to plan_error.json.

    None where no plan was made for the folder, the training has not finished, or it ran on a
    number of devices that the plan has not.
    """
    if not has_plan(folder) or not folder.training_results.is_file():
        return None
    with suppress(MusterError, OSError, LookupError, TypeError, ValueError, AttributeError):
        plan = read_json(folder.plan_json, "plan")
        found = compare(plan, measured_run(folder))
        if found is not None:
            write_json(folder.plan_error_json, found.record())
        return found
    return None


def compare_run(folder: RunFolder) -> Comparison:
    """The same for ``muster plan RUN``; an error says what is missing."""
    if not folder.training_results.is_file():
        raise SetupError(
            f"{folder.name} has a plan, but its training has not finished.",
            hint="ask again when it has.",
        )
    found = write_comparison(folder)
    if found is None:
        what = "results of the training"
        ranks = read_record(folder.training_results, what, {}).get("num_ranks")
        raise SetupError(
            f"The plan in {folder.plan_json} cannot be compared: it has no row for "
            f"{ranks} devices, or the results lack their times.",
            hint="make a new plan: muster plan TASK --devices … --for-run RUN.",
        )
    return found


def measured_run(folder: RunFolder) -> MeasuredRun:
    """What a finished training took, from its results and the times of its steps."""
    results = read_json(folder.training_results, "results of the training")
    seconds = step_seconds(folder)
    if not seconds:
        raise SetupError(f"{folder.name} has recorded no step.")
    counted = seconds[3:] or seconds
    found = results["measured"]
    return MeasuredRun(
        num_ranks=int(results["num_ranks"]),
        global_batch=int(results["global_batch"]),
        strategy=str(results["strategy"]),
        num_steps=int(results["steps"]),
        step=Seconds(median(counted)),
        mean_step=Seconds(sum(counted) / len(counted)),
        wall=Seconds(sum(seconds)),
        loading_share=found.get("data_wait_share"),
        communication_share=found.get("communication_share"),
    )
