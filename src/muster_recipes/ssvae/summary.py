"""Make the table from runs: one row per (method, labels, alpha, corruption). Missing is None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.plan import SSVAE, SUPERVISED

Row = Mapping[str, Any]

METRICS = ("accuracy", "elbo_nats", "calibration_error", "style_leakage")
#: Only there when they were asked for.
FACTOR_SCORES = ("beta_vae_score", "factor_vae_score", "mutual_information_gap")
_OF_BASELINE = ("accuracy", "calibration_error")
_PROBED = ("style_leakage", "beta_vae_score")


class Cell(NamedTuple):
    """The settings whose seeds make one row; the baseline has no alpha."""

    method: str
    n_labels: int
    alpha: float | None
    corruption_rate: float


def summarise(config: SsvaeConfig, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A row for every cell that ``config`` asks for, also one without any run, or that has runs.

    Earlier commands on the same run folder may have asked for other cells and seeds. ``n`` counts
    the seeds that are done, ``failed`` those that failed, of ``expected``: the seeds that
    ``config`` asks for in this cell, and the others that have a row. Every metric has a mean and a
    sample standard deviation (ddof 1) over the seeds that have it; both are None where no seed has
    it, and the deviation also where only one has. ``note`` says when and why a metric is missing
    for some of the n. ``accuracy_gain`` is the accuracy less that of the supervised baseline with
    the same labels, corruption and seed, over ``accuracy_gain_n`` such pairs.
    """
    seeds = frozenset(config.all_seeds)
    asked = frozenset(cells(config))
    found: dict[Cell, dict[int, Row]] = {cell: {} for cell in asked}
    for row in rows:
        found.setdefault(cell_of(row), {})[row["seed"]] = row
    has_scores = any(name in row for mine in found.values() for row in mine.values()
                     for name in FACTOR_SCORES)  # fmt: skip
    metrics = METRICS + (FACTOR_SCORES if has_scores else ())
    table = []
    for cell in sorted(found, key=_place):
        mine, is_baseline = found[cell], cell.method == SUPERVISED
        done, failed = _in_state(mine, "done"), _in_state(mine, "failed")
        # A baseline gains nothing over itself.
        baseline = {} if is_baseline else _in_state(found.get(_baseline(cell), {}), "done")
        entry: dict[str, Any] = {
            **cell._asdict(),
            "n": len(done),
            "failed": len(failed),
            "expected": len(seeds | mine.keys() if cell in asked else mine),
        }
        for name in metrics:
            entry |= _mean_and_sd(name, _values(done, name))
        entry |= _gain(done, baseline)
        entry["note"] = _note(done, failed, _OF_BASELINE if is_baseline else metrics)
        table.append(entry)
    return table


def _place(cell: Cell) -> tuple[bool, float, int, float]:
    """Orders the table: the baseline last."""
    return cell.method == SUPERVISED, cell.alpha or 0, cell.n_labels, cell.corruption_rate


def cells(config: SsvaeConfig) -> Iterator[Cell]:
    """The cells of a configuration in the order of the table."""
    labels, rates = sorted(set(config.n_labels)), sorted(set(config.corruption_rates))
    for alpha in sorted(set(config.alpha_values)):
        yield from (Cell(SSVAE, count, alpha, rate) for count in labels for rate in rates)
    if config.supervised:
        yield from (Cell(SUPERVISED, count, None, rate) for count in labels for rate in rates)


def cell_of(row: Row) -> Cell:
    """The cell of a run; whatever alpha is noted for a baseline does not count."""
    alpha = None if row["method"] == SUPERVISED else row["alpha"]
    return Cell(row["method"], row["n_labels"], alpha, row["corruption_rate"])


def _baseline(cell: Cell) -> Cell:
    return Cell(SUPERVISED, cell.n_labels, None, cell.corruption_rate)


def _in_state(rows: Mapping[int, Row], state: str) -> dict[int, Row]:
    """The rows in this state by seed, in the order of the seeds."""
    return {seed: row for seed, row in sorted(rows.items()) if row["state"] == state}


def _values(done: Mapping[int, Row], name: str) -> list[float]:
    found = (_number(row, name) for row in done.values())
    return [value for value in found if value is not None]


def _note(done: Mapping[int, Row], failed: Mapping[int, Row], metrics: Sequence[str]) -> str | None:
    """Why runs of a row failed or lack some of ``metrics``, which the numbers do not say."""
    notes = []
    if failed:
        first = next(iter(failed.values()))
        notes.append(f"{len(failed)} failed: {first['error'] or 'no message'}")
    for name in metrics:
        if (count := len(_values(done, name))) < len(done):
            why = "the probe did not converge" if name in _PROBED else "not a finite number"
            notes.append(f"{name} over {count} of {len(done)}: {why}")
    return "; ".join(notes) or None


def _gain(done: Mapping[int, Row], baseline: Mapping[int, Row]) -> dict[str, Any]:
    """The differences to the baseline, in pairs of runs with the same seed."""
    both = [(_number(done[seed], "accuracy"), _number(baseline[seed], "accuracy"))
            for seed in done if seed in baseline]  # fmt: skip
    gains = [mine - theirs for mine, theirs in both if mine is not None and theirs is not None]
    return {**_mean_and_sd("accuracy_gain", gains), "accuracy_gain_n": len(gains)}


def _mean_and_sd(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_mean": mean(values) if values else None,
        f"{name}_sd": stdev(values) if len(values) > 1 else None,
    }


def _number(row: Row, name: str) -> float | None:
    """A metric of a run; one that is not finite is as missing as one that is not there."""
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None
