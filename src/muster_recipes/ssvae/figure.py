"""The pictures of a sweep: heat-maps and curves of the test accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster import plotting
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.plan import SUPERVISED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Table = Sequence[dict[str, Any]]

_WIDTH_INCH = 7.0  # with letters of 9 points: still legible when shown 700 pixels wide
_COLOURS = "viridis"  # even steps of lightness, which every kind of colour vision sees
#: A cell of a heat-map that has no result.
_MISSING: dict[str, Any] = {
    "facecolor": "#eeeeee", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0,
}  # fmt: skip
_LETTER_INCH, _LINE_INCH = 0.075, 0.16  # of a tick's label


class Axis(NamedTuple):
    """A column of the table: how its axis is labelled, and a single value of it."""

    column: str
    title: str
    value: str

    def of(self, value: float) -> str:
        """A value as a tick shows it; shares are per cent."""
        return f"{100 * value if self.column == 'corruption_rate' else value:g}"

    def named(self, value: float) -> str:
        """A value as a title or a legend shows it."""
        return self.value.format(self.of(value))


LABELS = Axis("n_labels", "labelled images", "{} labels")
RATES = Axis("corruption_rate", "wrong labels, %", "{} % wrong labels")
ALPHAS = Axis("alpha", "weight α", "α = {}")


def draw(config: SsvaeConfig, table: Table, folder: Path) -> list[Path]:
    """PNG and PDF of what varies; returns their paths.

    ``ssvae-heatmap``: labels × corruption for each α, and of the supervised baseline, where both
    vary. ``ssvae-corruption`` and ``ssvae-labels``: mean and SD over the seeds along the one that
    varies. ``ssvae-alpha`` where neither does. A cell without a result is hatched in a heat-map
    and left out of a curve. Nothing is drawn while no cell has a result.
    """
    if all(row["accuracy_mean"] is None for row in table):
        return []
    has_labels, has_rates = (len(_values(table, axis)) > 1 for axis in (LABELS, RATES))
    figures: dict[str, Figure] = {}
    if has_labels and has_rates:
        figures["heatmap"] = _heatmaps(table)
    if has_rates:
        figures["corruption"] = _curves(table, RATES, line=LABELS, panel=ALPHAS)
    if has_labels:
        figures["labels"] = _curves(table, LABELS, line=ALPHAS, panel=RATES)
    if not figures:
        figures["alpha"] = _by_alpha(table)
    paths: list[Path] = []
    for name, figure in figures.items():
        shown = "mean" if name == "heatmap" else "mean and SD"
        figure.suptitle(_title(config, table, shown), x=0.01, ha="left", fontsize=10)
        paths += plotting.save(figure, *plotting.png_and_pdf(folder / f"ssvae-{name}"))
    return paths


def _title(config: SsvaeConfig, table: Table, shown: str) -> str:
    """What is shown, over how many seeds, and what is missing."""
    counts = sorted({row["n"] for row in table if row["n"]})
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    over = "of one seed" if counts == [1] else f"{shown} over {seeds}"
    title = f"Test accuracy in % on {config.dataset}, {over}"
    num_missing = sum(row["expected"] - row["n"] for row in table)
    if not num_missing:
        return title
    num_failed = sum(row["failed"] for row in table)
    num_runs = sum(row["expected"] for row in table)
    return f"{title}\nwithout a result: {num_missing} of {num_runs} runs, {num_failed} failed"


def _values(table: Table, axis: Axis) -> list[float]:
    return sorted({row[axis.column] for row in table} - {None})


def _panels(titles: Sequence[str], height_inch: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, in two columns; a single panel has all the width."""
    num_columns = min(2, len(titles))
    num_rows = -(-len(titles) // num_columns)
    size = (_WIDTH_INCH, 0.5 + height_inch * num_rows)
    figure, grid = plotting.panels(num_rows, num_columns, size, used=len(titles))
    for axes, title in zip(grid, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=9)
    return figure, grid


# Heat-maps


def _heatmaps(table: Table) -> Figure:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    parts = {ALPHAS.named(alpha): [row for row in table if row["alpha"] == alpha]
             for alpha in _values(table, ALPHAS)}  # fmt: skip
    if baseline := [row for row in table if row["method"] == SUPERVISED]:
        parts["supervised only"] = baseline
    known = [100 * row["accuracy_mean"] for row in table if row["accuracy_mean"] is not None]
    low, high = min(known), max(known)
    if high - low < 1:  # all alike: differences of a tenth must not look like black and white
        low, high = low - 1, high + 1
    colours = ScalarMappable(Normalize(low, high), colormaps[_COLOURS])
    figure, grid = _panels(list(parts), 0.75 + 0.42 * len(_values(table, LABELS)))
    for axes, rows in zip(grid, parts.values(), strict=True):
        _heatmap(axes, rows, colours, _values(table, LABELS), _values(table, RATES))
    bar = figure.colorbar(colours, ax=grid, shrink=0.9, aspect=40, pad=0.02)
    bar.set_label("test accuracy, %", fontsize=9)
    bar.ax.tick_params(labelsize=9)
    return figure


def _heatmap(
    axes: Axes, rows: Table, colours: Any, labels: list[float], rates: list[float]
) -> None:
    from matplotlib.patches import Rectangle

    means = {(row["n_labels"], row["corruption_rate"]): row["accuracy_mean"] for row in rows}
    size = max(5.0, min(9.0, 54 / len(rates)))  # leaves room between neighbours' numbers
    for y, count in enumerate(labels):
        for x, rate in enumerate(rates):
            mean = means.get((count, rate))
            if mean is None:
                look = _MISSING
            else:
                look = {"facecolor": colours.to_rgba(100 * mean), "edgecolor": "white"}
                axes.text(
                    x, y, f"{100 * mean:.1f}", ha="center", va="center", fontsize=size,
                    color="black" if _lightness(look["facecolor"]) > 0.5 else "white",
                )  # fmt: skip
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
    axes.set(xlim=(-0.5, len(rates) - 0.5), ylim=(-0.5, len(labels) - 0.5))
    axes.set_xticks(range(len(rates)), [RATES.of(rate) for rate in rates])
    axes.set_yticks(range(len(labels)), [LABELS.of(count) for count in labels])
    axes.set_xlabel(RATES.title, fontsize=9)
    axes.set_ylabel(LABELS.title, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _lightness(colour: tuple[float, float, float, float]) -> float:
    """Perceived lightness from 0 to 1, by the luma of Rec. 709."""
    red, green, blue, _ = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# Curves


def _curves(table: Table, x: Axis, *, line: Axis, panel: Axis) -> Figure:
    """A panel for each value of ``panel``, a line for each of ``line``, the baseline dashed."""
    from matplotlib.lines import Line2D

    panels, lines = _values(table, panel), _values(table, line)
    figure, grid = _panels(
        [panel.named(value) for value in panels], 2.7 if len(panels) > 1 else 3.4
    )
    for axes, value in zip(grid, panels, strict=True):
        for place, (rows, style) in enumerate(_series(table, line, panel, value)):
            _line(axes, rows, x, style, place, 2 * len(lines))
        _finish(axes, x, _values(table, x), 2.9 if len(panels) > 1 else 6.2)
    low = min(axes.get_ylim()[0] for axes in grid)
    high = max(axes.get_ylim()[1] for axes in grid)
    for axes in grid:
        axes.set_ylim(low, high)
    seen = [pair for axes in grid for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in seen}
    if panel is ALPHAS and any(row["method"] == SUPERVISED for row in table):
        # One entry for all baselines, whatever their colour.
        handles["supervised only"] = Line2D([], [], color="black", ls="--", marker="o", mfc="white")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", frameon=False,
                  ncols=min(5, len(handles)), fontsize=9)  # fmt: skip
    return figure


def _series(
    table: Table, line: Axis, panel: Axis, panel_value: float
) -> list[tuple[Table, dict[str, Any]]]:
    """The rows of every line of a panel and how the line looks; the baseline knows no α."""
    from matplotlib import colormaps

    lines = _values(table, line)
    series: list[tuple[Table, dict[str, Any]]] = []
    for place, value in enumerate(lines):
        # Not up to the end of the map: its yellow is hard to see on white.
        colour = colormaps[_COLOURS](0.8 * place / max(1, len(lines) - 1))
        look = {"color": colour, "marker": plotting.MARKS[place % len(plotting.MARKS)]}
        mine = [row for row in table if row[line.column] == value]
        rows = [row for row in mine if row[panel.column] == panel_value]
        series.append((rows, {**look, "label": line.named(value)}))
        if panel is ALPHAS:
            rows = [row for row in mine if row["method"] == SUPERVISED]
            series.append((rows, {**look, "linestyle": "--", "mfc": "white"}))
    if line is ALPHAS:
        rows = [row for row in table if row["method"] == SUPERVISED]
        rows = [row for row in rows if row[panel.column] == panel_value]
        look = {"color": "black", "marker": "s", "mfc": "white", "linestyle": "--"}
        series.append((rows, {**look, "label": "supervised only"}))
    return series


def _line(
    axes: Axes, rows: Table, x: Axis, style: dict[str, Any], place: int, num_lines: int
) -> None:
    points = sorted((row[x.column], row["accuracy_mean"], row["accuracy_sd"]) for row in rows
                    if row["accuracy_mean"] is not None)  # fmt: skip
    if not points:
        return
    shift = place - (num_lines - 1) / 2  # keeps the bars of different lines apart
    span = max(row[x.column] for row in rows) - min(row[x.column] for row in rows)
    xs = [value * 1.012**shift if x is LABELS else value + 0.004 * span * shift
          for value, _, _ in points]  # fmt: skip
    axes.errorbar(
        xs, [100 * mean for _, mean, _ in points], yerr=[_percent(sd) for _, _, sd in points],
        markersize=5, capsize=2.5, linewidth=1.4, elinewidth=1, **style,
    )  # fmt: skip


def _percent(deviation: float | None) -> float:
    """As a bar: none (NaN) where one seed has no deviation."""
    return math.nan if deviation is None else 100 * deviation


def _finish(axes: Axes, x: Axis, values: list[float], width_inch: float) -> None:
    texts = _tick_labels(axes, x, values, width_inch)
    if x is LABELS:
        plotting.log_ticks(axes, values, texts)
    else:
        axes.set_xticks(values, texts)
    plotting.dress(axes, x=x.title, y="test accuracy, %")


def _tick_labels(axes: Axes, x: Axis, values: list[float], width_inch: float) -> list[str]:
    """The values, turned upright where they would touch, and empty where they still would."""
    texts = [x.of(value) for value in values]
    places = [math.log(value) if x is LABELS else value for value in values]
    inches = [width_inch * (place - places[0]) / (places[-1] - places[0]) for place in places]
    gap = min(late - early for early, late in pairwise(inches))
    if gap > _LETTER_INCH * (1 + max(map(len, texts))):
        return texts
    axes.tick_params(axis="x", labelrotation=90)
    last = -math.inf
    for place, inch in enumerate(inches):
        if inch - last < _LINE_INCH:
            texts[place] = ""
        else:
            last = inch
    return texts


def _by_alpha(table: Table) -> Figure:
    """One number of labels and one rate: a point for each α, and one for the baseline."""
    title = f"{LABELS.named(_values(table, LABELS)[0])}, {RATES.named(_values(table, RATES)[0])}"
    figure, (axes,) = _panels([title], 3.2)
    known = [row for row in table if row["accuracy_mean"] is not None]
    for place, row in enumerate(known):
        look: dict[str, Any] = {"color": plotting.BLUE, "marker": "o"}
        if row["method"] == SUPERVISED:
            look = {"color": plotting.BLACK, "marker": "s", "mfc": "white"}
        mean, sd = 100 * row["accuracy_mean"], _percent(row["accuracy_sd"])
        axes.errorbar([place], [mean], yerr=[sd], capsize=3, **look)
    names = ["supervised only" if row["alpha"] is None else ALPHAS.named(row["alpha"])
             for row in known]  # fmt: skip
    axes.set_xticks(range(len(known)), names)
    axes.set_xlim(-0.6, len(known) - 0.4)
    plotting.dress(axes, y="test accuracy, %", lines="y")
    return figure
