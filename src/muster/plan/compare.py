"""Predicted against measured: how wrong a plan was, so that the model's error is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.plan.units import Seconds


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
    """``error``: (predicted - measured) / measured; None where nothing was measured."""

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
    """``notes``: where the run was not what was planned, so that errors are not the model's."""

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
