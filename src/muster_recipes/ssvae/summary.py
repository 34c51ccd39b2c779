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
    by_cell = {cell: found[cell] for cell in sorted(found, key=_place)}
    has_scores = any(name in row for mine in by_cell.values() for row in mine.values()
                     for name in FACTOR_SCORES)  # fmt: skip
    metrics = METRICS + (FACTOR_SCORES if has_scores else ())
    return [
        {
            **cell._asdict(),
            "n": len(_done(mine)),
            "failed": len(_failed(mine)),
            "expected": len(seeds | mine.keys() if cell in asked else mine),
            **_statistics(mine, metrics),
            **_gain(mine, by_cell.get(_baseline(cell), {}), is_baseline=cell == _baseline(cell)),
            "note": _note(mine, metrics if cell.method == SSVAE else _OF_BASELINE),
        }
        for cell, mine in by_cell.items()
    ]


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


def _done(rows: Mapping[int, Row]) -> dict[int, Row]:
    return {seed: row for seed, row in sorted(rows.items()) if row["state"] == "done"}


def _failed(rows: Mapping[int, Row]) -> list[Row]:
    return [row for _, row in sorted(rows.items()) if row["state"] == "failed"]


def _values(rows: Mapping[int, Row], name: str) -> list[float]:
    found = (_number(row, name) for row in _done(rows).values())
    return [value for value in found if value is not None]


def _statistics(rows: Mapping[int, Row], metrics: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in metrics:
        result |= _mean_and_sd(name, _values(rows, name))
    return result


def _note(rows: Mapping[int, Row], metrics: Sequence[str]) -> str | None:
    """Why runs of a row failed or lack some of ``metrics``, which the numbers do not say."""
    num_done = len(_done(rows))
    notes = [
        f"{name} over {count} of {num_done}: "
        + ("the probe did not converge" if name in _PROBED else "not a finite number")
        for name in metrics
        if (count := len(_values(rows, name))) < num_done
    ]
    if failed := _failed(rows):
        notes.insert(0, f"{len(failed)} failed: {failed[0]['error'] or 'no message'}")
    return "; ".join(notes) or None


def _gain(
    rows: Mapping[int, Row], baseline: Mapping[int, Row], *, is_baseline: bool
) -> dict[str, Any]:
    """The paired difference; a baseline has none to itself."""
    pairs = []
    if not is_baseline:
        mine, theirs = _done(rows), _done(baseline)
        both = ((_number(mine[seed], "accuracy"), _number(theirs[seed], "accuracy"))
                for seed in mine if seed in theirs)  # fmt: skip
        pairs = [a - b for a, b in both if a is not None and b is not None]
    return {**_mean_and_sd("accuracy_gain", pairs), "accuracy_gain_n": len(pairs)}


def _mean_and_sd(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_mean": mean(values) if values else None,
        f"{name}_sd": stdev(values) if len(values) > 1 else None,
    }


def _number(row: Row, name: str) -> float | None:
    """A metric of a run; one that is not finite is as missing as one that is not there."""
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None
