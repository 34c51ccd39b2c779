"""The picture: generalisation loss against width, over the seeds and for each seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from muster import plotting
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import FEW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES = {
    "gnc": ("Guess & Check", plotting.BLUE, "o"),
    "gd": ("gradient descent", plotting.ORANGE, "s"),
    "theory": ("theory for Guess & Check", plotting.GREEN, "^"),
    "prior": ("prior mean", plotting.GREY, "v"),
}


def draw(config: SsmConfig, table: list[dict[str, Any]], folder: Path) -> list[Path]:
    """``ssm.png`` and ``ssm.pdf``: a row of two panels for each teacher rank."""
    ranks = sorted({row["rank"] for row in table}) or [1]
    figure, axes = plotting.panels(len(ranks), 2, (11, 4.2 * len(ranks)), sharex=True)
    for left, right, rank in zip(axes[::2], axes[1::2], ranks, strict=True):
        rows = [row for row in table if row["rank"] == rank]
        _medians(left, rows)
        _lines(right, rows)
        seeds = len({row["seed"] for row in rows})
        of = f"{seeds} seed{'s' * (seeds > 1)}"
        dims = sorted({row["dim"] for row in rows})
        _finish(left, dims, f"teacher rank {rank}: median and quartiles of {of}")
        _finish(right, dims, f"teacher rank {rank}: each seed")
    figure.suptitle(_title(table), fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return plotting.save(figure, *plotting.png_and_pdf(folder / "ssm"))


def _title(table: list[dict[str, Any]]) -> str:
    """What is shown, and how much is missing, as medians are over the seeds that have a loss."""
    title = "Generalisation loss against student width (lower is better)"
    missing = sum(row["loss"] is None for row in table)
    notes = []
    if missing:
        notes.append(f"cells without a loss, left out: {missing} of {len(table)}")
    if missing or any(_is_poor(row) for row in table):
        notes.append(
            "hollow, dotted: a median over some of the seeds only (number/all), or fewer than "
            f"{FEW} guesses accepted"
        )
    return "\n".join([title, *notes])


class _Point(NamedTuple):
    """The values of one series at one width, of the seeds that have one.

    ``is_weak``: seeds are missing, or one of them has accepted fewer guesses than ``FEW``.
    """

    dim: int
    values: list[float]
    is_weak: bool


def points_of(rows: list[dict[str, Any]], name: str) -> list[_Point]:
    """One point per width of ``rows``, also where there is no value."""
    num_seeds = len({row["seed"] for row in rows})
    found = []
    for dim in sorted({row["dim"] for row in rows}):
        values = _values(rows, name, dim)
        few = any(_is_poor(row) for row in rows if row["dim"] == dim and row["method"] == name)
        found.append(_Point(dim, values, few or len(values) < num_seeds))
    return found


def _is_poor(row: dict[str, Any]) -> bool:
    accepted = row.get("num_accepted")
    return _drawable(row["loss"]) and accepted is not None and accepted < FEW


def _medians(axis: Axes, rows: list[dict[str, Any]]) -> None:
    num_seeds = len({row["seed"] for row in rows})
    series = {name: points_of(rows, name) for name in _SERIES}
    present = [name for name, points in series.items() if any(point.values for point in points)]
    for place, name in enumerate(present):
        points, (label, colour, marker) = series[name], _SERIES[name]
        # A small shift on the logarithmic axis keeps the bars of different series apart.
        shift = 1.0 + 0.03 * (place - (len(present) - 1) / 2)
        x = [point.dim * shift for point in points]
        # A NaN, where there is no value, breaks the lines.
        spread = [_quartiles(point.values or [math.nan]) for point in points]
        middles = [middle for _, middle, _ in spread]
        bars = [[y - low for low, y, _ in spread], [high - y for _, y, high in spread]]
        axis.errorbar(
            x, middles, yerr=bars, label=label, color=colour, marker=marker, markersize=5,
            capsize=3, linestyle="none",
        )  # fmt: skip
        sure = [math.nan if p.is_weak else y for p, y in zip(points, middles, strict=True)]
        axis.plot(x, sure, color=colour, linewidth=1.5)
        axis.plot(x, middles, color=colour, linewidth=1.0, linestyle=":")
        weak = _hollow(axis, points, x, middles, name, 6)
        counts = [f"{len(points[i].values)}/{num_seeds}" for i in weak]
        plotting.note_counts(axis, [(x[i], middles[i]) for i in weak], counts, colour)


def _lines(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for name in ("gnc", "gd"):
        label, colour, marker = _SERIES[name]
        for seed in sorted({row["seed"] for row in rows}):
            points = points_of([row for row in rows if row["seed"] == seed], name)
            if not any(point.values for point in points):
                continue
            x = [point.dim for point in points]
            y = [point.values[0] if point.values else math.nan for point in points]
            axis.plot(
                x, y, color=colour, marker=marker, markersize=3, linewidth=0.8, alpha=0.7,
                label=label,
            )  # fmt: skip
            _hollow(axis, points, x, y, name, 4)
            label = "_nolegend_"


def _hollow(
    axis: Axes,
    points: Sequence[_Point],
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    size: float,
) -> list[int]:
    """Draw weak points of a series hollow, over their marks; returns which they are."""
    weak = [i for i, point in enumerate(points) if point.is_weak and point.values]
    _, colour, marker = _SERIES[name]
    axis.plot(
        [x[i] for i in weak], [y[i] for i in weak], linestyle="none", marker=marker,
        markersize=size, markerfacecolor="white", markeredgecolor=colour, zorder=5,
        label="_nolegend_",
    )  # fmt: skip
    return weak


def _finish(axis: Axes, dims: list[int], title: str) -> None:
    # Not on y: within a decade the minor marks hold the labels.
    plotting.log_ticks(axis, dims, [str(dim) for dim in dims])
    axis.set_yscale("log")
    if dims:  # of the widths and not of the shifted points: a single width stays in the middle
        axis.set_xlim(min(dims) / 1.2, max(dims) * 1.2)
    if len(dims) > 8:
        axis.tick_params(axis="x", labelrotation=45)
    plotting.dress(axis, title=title, x="student width d", y="generalisation loss ‖S‖²")


def _values(rows: list[dict[str, Any]], name: str, dim: int) -> list[float]:
    """One value per seed that has one; a missing loss is left out, never drawn as 0."""
    here = [row for row in rows if row["dim"] == dim]
    if name in ("gnc", "gd"):
        found = [row["loss"] for row in here if row["method"] == name]
    else:
        by_seed = {row["seed"]: row[name] for row in here}
        found = list(by_seed.values())
    return [value for value in found if _drawable(value)]


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high
