"""The figure of the recipe: loss against width, over seeds and seed by seed.

Matplotlib is imported in the functions that draw, and used without its global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster_recipes.ssm.config import SsmConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Look:
    label: str
    color: str
    marker: str
    dashes: tuple[float, ...] = ()
    shift: float = 0.0  # in widths of a marker, so that error bars do not hide each other


# Colours of Okabe and Ito (2008), which remain distinct to the colour-blind.
_LOOKS = {
    "gnc": _Look("Guess & Check", "#0072B2", "o", shift=-1.0),
    "gd": _Look("gradient descent", "#D55E00", "s", shift=1.0),
    "theory": _Look("theory (Gaussian)", "#009E73", "", (5, 2)),
    "prior": _Look("prior mean (exact)", "#777777", "", (1, 1.5)),
}
_ORDER = ("prior", "theory", "gnc", "gd")


def draw(config: SsmConfig, table: Sequence[Row], folder: Path) -> list[Path]:
    """Write ``loss_by_width_rank<R>.png`` and ``.pdf`` for every rank; return their paths.

    ``table`` is that of `summarise`. A cell without a value leaves a gap and is counted in the
    figure's last line. A rank without any value still gives a figure, with theory and prior.
    """
    paths = []
    for rank in config.teacher_ranks:
        figure = make_figure(config, [row for row in table if row["rank"] == rank], rank)
        for ending in ("png", "pdf"):
            path = folder / f"loss_by_width_rank{rank}.{ending}"
            # Without a date the same table gives the same bytes.
            extra = {"CreationDate": None} if ending == "pdf" else {}
            figure.savefig(path, dpi=160, metadata=extra)
            paths.append(path)
    return paths


def series(table: Sequence[Row], name: str) -> dict[int, dict[int, float]]:
    """Width → seed → value of one curve; what does not exist, or is not above 0, is left out."""
    found: dict[int, dict[int, float]] = {}
    for row in table:
        if name in ("gnc", "gd"):
            value = row["gen_loss"] if row["method"] == name else None
        else:
            value = row["theory" if name == "theory" else "prior_mean_exact"]
        if value is not None and math.isfinite(value) and value > 0:
            found.setdefault(row["dim"], {})[row["seed"]] = value
    return dict(sorted(found.items()))


def make_figure(config: SsmConfig, table: Sequence[Row], rank: int) -> Figure:
    """The figure of one rank, not yet written anywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    curves = {name: series(table, name) for name in _ORDER}
    for name in _ORDER:
        _draw_median(left, curves[name], _LOOKS[name])
        if name != "prior":
            _draw_seeds(right, curves[name], _LOOKS[name])
    seeds = len(config.seed_list)
    left.set_title(f"Median over {seeds} seeds, bars: quartiles" if seeds > 1 else "One seed")
    right.set_title("Seed by seed")
    left.set_ylabel(r"generalisation loss  $\|S\|^2$")
    for axes in (left, right):
        _dress(axes, config.student_dims)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False, fontsize=10
    )
    figure.suptitle(_headline(config, rank) + _gaps(table), fontsize=11)
    return figure


def _draw_median(axes: Axes, curve: Mapping[int, Mapping[int, float]], look: _Look) -> None:
    if not curve:
        return
    dims = np.array(list(curve), dtype=float)
    quartiles = np.array([np.quantile(list(v.values()), [0.25, 0.5, 0.75]) for v in curve.values()])
    low, middle, high = quartiles.T
    style: dict[str, Any] = {"color": look.color, "label": look.label, "linewidth": 1.8}
    if not look.marker:
        axes.fill_between(dims, low, high, color=look.color, alpha=0.13, linewidth=0)
        axes.plot(dims, middle, dashes=look.dashes, zorder=2, **style)
        return
    axes.errorbar(
        dims * 2.0 ** (0.05 * look.shift),
        middle,
        yerr=np.stack([middle - low, high - middle]),
        marker=look.marker,
        markersize=6,
        capsize=3.5,
        elinewidth=1.2,
        zorder=3,
        **style,
    )


def _draw_seeds(axes: Axes, curve: Mapping[int, Mapping[int, float]], look: _Look) -> None:
    seeds = sorted({seed for values in curve.values() for seed in values})
    # Many lines must stay readable as a cloud, few as lines.
    alpha = min(0.85, max(0.08, 4.0 / max(1, len(seeds))))
    for seed in seeds:
        # A gap in the line where a width has no value for this seed.
        values = [at_dim.get(seed, math.nan) for at_dim in curve.values()]
        style: dict[str, Any] = {"dashes": look.dashes} if look.dashes else {"marker": look.marker}
        axes.plot(
            list(curve), values, color=look.color, alpha=alpha, linewidth=1.1, markersize=3.5,
            **style,
        )  # fmt: skip


def _dress(axes: Axes, dims: Sequence[int]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    ticks = _ticks(sorted(dims))
    axes.set_xticks(ticks, [str(dim) for dim in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("student width  $d$")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.grid(True, which="minor", axis="y", color="#eeeeee", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(dims: Sequence[int]) -> list[int]:
    """The widths, without those so close to the one before that the labels would touch."""
    shown: list[int] = []
    for dim in dims:
        if not shown or dim >= 1.25 * shown[-1]:
            shown.append(dim)
    return shown


def _headline(config: SsmConfig, rank: int) -> str:
    parts = [
        f"teacher rank {rank}",
        f"sequence length {config.sequence_length}",
        f"{config.num_sequences} training sequence{'s' if config.num_sequences > 1 else ''}"
        + (" ($e_1$)" if config.input_e1 else ""),
    ]
    if config.gnc:
        parts.append(f"{config.gnc_num_samples:.3g} guesses per cell, eps {config.eps_train:g}")
    if config.gd:
        parts.append(f"{config.gd_optimizer} lr {config.gd_lr:g}, {config.gd_epochs} steps")
    return "  ·  ".join(parts)


def _gaps(table: Sequence[Row]) -> str:
    """A second line that counts the cells without a value, or nothing."""
    parts = []
    for method in ("gnc", "gd"):
        rows = [row for row in table if row["method"] == method]
        unfinished = sum(row["state"] != "complete" for row in rows)
        empty = sum(row["state"] == "complete" and row["gen_loss"] is None for row in rows)
        why = "none accepted" if method == "gnc" else "diverged"
        if unfinished:
            parts.append(f"{_LOOKS[method].label}: {unfinished} of {len(rows)} cells unfinished")
        if empty:
            parts.append(f"{_LOOKS[method].label}: {empty} of {len(rows)} cells {why}")
    return "\nnot shown: " + "; ".join(parts) if parts else ""
