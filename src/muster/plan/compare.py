"""Predicted against measured: how wrong a plan was, so that the model's error is known.

The plan stands in the folder of the run it was made for, beside what the run then took.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from muster.base.atomic_files import explain_os_error
from muster.base.codec import read_json, read_record, write_json
from muster.base.errors import MusterError, SetupError
from muster.base.journal import read_journal
from muster.plan.units import Seconds
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A finished training. ``step``: the median; ``wall``: all steps together, without the rest."""

    num_ranks: int
    global_batch: int
    strategy: str
    num_steps: int
    step: Seconds
    mean_step: Seconds
    wall: Seconds
    loading_share: float | None
    communication_share: float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A predicted value beside the measured one.

    ``error``: (predicted - measured) / measured; None where nothing was measured.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    origin: str

    @property
    def error(self) -> float | None:
        return None if self.measured == 0 else (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside its run. ``notes``: where the run was not the planned one, so that errors are
    not the model's.
    """

    num_devices: int
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        lines = [{**vars(line), "error": line.error} for line in self.lines]
        return {"num_devices": self.num_devices, "lines": lines, "notes": list(self.notes)}


def compare(plan: Mapping[str, Any], run: MeasuredRun) -> Comparison | None:
    """The row of a stored plan for the run's number of ranks beside what it took.

    None where the plan has no such row.
    """
    rows = [row for row in plan["predictions"] if row["num_devices"] == run.num_ranks]
    if not rows:
        return None
    row = rows[0]
    lines = [
        _line("step (median)", row["step"], run.step.value, "s"),
        _line("step (mean)", row["step"], run.mean_step.value, "s"),
        _line("samples per s", row["samples_per_s"], run.global_batch / run.step.value, "1/s"),
    ]
    if run.communication_share is not None:
        waited_s = run.mean_step.value * run.communication_share
        lines.append(_line("exposed communication", row["exposed"], waited_s, "s"))
    if run.loading_share is not None:
        loaded_s = run.mean_step.value * run.loading_share
        lines.append(_line("waiting for data", row["loading"], loaded_s, "s"))
    if row["wall"] is not None:
        lines.append(_line("all steps", row["wall"], run.wall.value, "s"))
    return Comparison(num_devices=run.num_ranks, lines=tuple(lines), notes=tuple(_notes(plan, run)))


def _line(name: str, figure: Mapping[str, Any], measured: float, unit: str) -> Line:
    return Line(
        name=name,
        predicted=float(figure["value"]),
        measured=measured,
        unit=unit,
        origin=str(figure["origin"]),
    )


def _notes(plan: Mapping[str, Any], run: MeasuredRun) -> list[str]:
    notes = []
    if plan["global_batch"] != run.global_batch:
        notes.append(
            f"planned with a global batch of {plan['global_batch']}, run with {run.global_batch}"
        )
    if run.num_ranks > 1 and plan["strategy"] != run.strategy:
        notes.append(f"planned with {plan['strategy']}, run with {run.strategy}")
    planned = plan.get("num_steps")
    if planned is not None and planned != run.num_steps:
        notes.append(f"planned for {planned:,} steps, run for {run.num_steps:,}")
    return notes


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
    return folder.plan_json.is_file()


def write_comparison(folder: RunFolder) -> Comparison | None:
    """Predicted against measured of a finished training, written to plan_error.json.

    None where no plan was made for the folder, the training has not finished, or it ran on a
    number of devices that the plan does not have.
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
    """Compare for ``muster plan RUN``. Raises SetupError that says what is missing."""
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


def step_seconds(folder: RunFolder) -> list[float]:
    """The duration of every recorded optimizer step, in order; torn lines are left out."""
    lines = read_journal(folder.metrics)
    return [float(line["seconds"]) for line in lines if line.get("kind") == "train"]
