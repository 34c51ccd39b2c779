"""Pictures that no recipe draws: results over parameters, what a training measured, confusions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster import plotting
from muster.api.report.content import Block, Text, as_given
from muster.api.report.groups import Group, Groups, as_number
from muster.api.trackers.metrics import Series
from muster.plotting import safe, ticks

_MOST_METRICS = 6
_MOST_SETTINGS = 500
_MOST_ROWS, _MOST_COLUMNS = 3, 5
_MOST_TICKS = 24
_MOST_POINTS = 1500
#: The fields of an evaluation's line that are not results.
COUNTERS = ("kind", "step", "epoch", "samples", "seconds", "update", "episodes")


def drawn(draw: Callable[[], list[Path]]) -> tuple[list[Path], list[Block]]:
    """What was drawn, or a sentence instead where matplotlib is missing."""
    paths: list[Path] = []
    remarks: list[Block] = []
    with plotting.or_remark(lambda text: remarks.append(Text(text))):
        paths = draw()
    return paths, remarks


def why_no_picture(found: Groups) -> str | None:
    """Why there is nothing to be seen in a picture of these groups; None where there is."""
    if not found.metrics:
        return "no result is a number"
    if not found.varying:
        return "all tasks have the same parameters, apart from their seeds"
    return None


def _is_many(found: Groups) -> bool:
    """Whether this is more than lines or a map can show: each parameter then has a panel."""
    return len(found.varying) > 2 or len(found.groups) > _MOST_SETTINGS


def draw_groups(found: Groups, path: Path, title: str) -> list[Path]:
    """A panel per result: mean and standard deviation over the seeds, as PNG and PDF.

    One parameter goes to the right. A second one is a line per value where it has at most eight
    values, else both are the axes of a map of colours. Of more parameters, or hundreds of settings,
    each parameter has a panel of its own, with a point per setting.
    """
    if _is_many(found):
        return _draw_each_parameter(found, path, title)
    across, lines = _axes_of(found)
    metrics = found.metrics[:_MOST_METRICS]
    figure, axes = plotting.grid(len(metrics), 2, (6.2, 3.8))
    for axis, metric in zip(axes, metrics, strict=True):
        if lines is not None and len(_values(found, lines)) > len(plotting.COLOURS):
            _map(figure, axis, found, (across, lines), metric)
        else:
            _lines(axis, found, across, lines, metric)
        axis.set_title(safe(metric), loc="left", fontsize=10)
    figure.suptitle(safe(title), fontsize=10)
    return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_curves(chosen: Mapping[str, Sequence[Series]], path: Path, title: str) -> list[Path]:
    """A panel per metric, a line per task, named by its number where there are few; PNG and PDF."""
    names = list(chosen)[:_MOST_METRICS]
    figure, axes = plotting.grid(len(names), 2, (6.2, 3.8))
    for axis, name in zip(axes, names, strict=True):
        lines = chosen[name]
        for number, series in enumerate(lines):
            x, y = _thin(series.curve.step.tolist(), series.curve.value.tolist())
            few = len(lines) <= len(plotting.COLOURS)
            colour = plotting.COLOURS[number] if few else plotting.BLUE
            label = f"task {series.label.split()[0]}" if few and series.label else None
            mark = "." if len(x) == 1 else ""
            axis.plot(x, y, lw=1.1, marker=mark, alpha=1 if few else 0.4, color=colour, label=label)
        plotting.dress(axis, title=safe(name), x="step")
        plotting.legend(axis, fontsize=7)
    figure.suptitle(safe(title), fontsize=10)
    return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_measured(lines: Sequence[Mapping[str, Any]], path: Path, monitor: str) -> list[Path]:
    """What the curves of a training leave out: other metrics, the gradient's norm, throughput.

    Nothing is drawn, and no file is made, where none of it was recorded.
    """
    panels = _measured_panels(lines, monitor)
    if not panels:
        return []
    is_agent = any(line.get("kind") == "update" for line in lines)
    unit = "environment steps, all ranks" if is_agent else "optimizer step"
    figure, axes = plotting.grid(len(panels), 3, (3.9, 3.0))
    for axis, (name, x, y, style) in zip(axes, panels, strict=True):
        axis.plot(x, y, style, ms=3, lw=1.2, color=plotting.BLUE)
        plotting.dress(axis, title=safe(name), x=unit)
    return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_confusion(
    counts: Sequence[Sequence[float]], names: Sequence[str], path: Path, title: str
) -> list[Path]:
    """Draw a confusion matrix, coloured by the share of each row.

    ``counts`` has a row for each true class and a column for each predicted one; ``names``: of the
    classes, in that order.
    """
    size = min(12.0, 2.6 + 0.45 * len(counts))
    figure, (axis,) = plotting.panels(1, 1, (size + 0.6, size))
    shares = [[value / max(1.0, float(sum(row))) for value in row] for row in counts]
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axis, label="share of the true class", shrink=0.8)
    if len(counts) <= 20:
        for i, row in enumerate(counts):
            for j, value in enumerate(row):
                ink = "white" if shares[i][j] > 0.5 else "black"
                axis.text(j, i, f"{value:,.0f}", ha="center", va="center", color=ink, fontsize=8)
    axis.set_xticks(range(len(names)), ticks(names), rotation=90)
    axis.set_yticks(range(len(names)), ticks(names))
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    axis.set_title(title, loc="left", fontsize=10)
    return plotting.save(figure, *plotting.png_and_pdf(path))


# ---------------------------------------------------------------------- results over parameters


def _draw_each_parameter(found: Groups, path: Path, title: str) -> list[Path]:
    """A row per result, a column per parameter, a point per setting."""
    metrics, names = found.metrics[:_MOST_ROWS], found.varying[:_MOST_COLUMNS]
    size = (3.4 * len(names) + 0.6, 2.8 * len(metrics) + 0.5)
    figure, axes = plotting.panels(len(metrics), len(names), size, sharey="row")
    for row, metric in enumerate(metrics):
        groups = [group for group in found.groups if metric in group.results]
        for column, name in enumerate(names):
            axis, places = axes[row * len(names) + column], _places(found, name)
            axis.plot(
                [places[_given(group, name)] for group in groups],
                [group.results[metric].mean for group in groups],
                "o", ms=2.5, alpha=0.4, mew=0, color=plotting.COLOURS[0], rasterized=True,
            )  # fmt: skip
            _label_across(axis, found, name, places)
            plotting.dress(axis)
        axes[row * len(names)].set_ylabel(safe(metric))
    figure.suptitle(title, fontsize=10)
    return plotting.save(figure, *plotting.png_and_pdf(path))


def _axes_of(found: Groups) -> tuple[str, str | None]:
    """The parameter that goes to the right, and the other one, if any.

    A numeric parameter goes to the right before others, and one with more values before one with
    fewer.
    """
    if len(found.varying) == 1:
        return found.varying[0], None
    first, second = sorted(
        found.varying, key=lambda n: (not _is_numeric(found, n), -len(_values(found, n)))
    )
    return first, second


def _lines(axis: Any, found: Groups, across: str, lines: str | None, metric: str) -> None:
    places = _places(found, across)
    settings = [None] if lines is None else _values(found, lines)
    for number, setting in enumerate(settings):
        groups = [
            group
            for group in found.groups
            if metric in group.results and (lines is None or _given(group, lines) == setting)
        ]
        points = sorted((places[_given(group, across)], group.results[metric]) for group in groups)
        if not points:
            continue
        axis.errorbar(
            [x for x, _ in points],
            [moments.mean for _, moments in points],
            yerr=[moments.sd or 0.0 for _, moments in points],
            color=plotting.COLOURS[number % len(plotting.COLOURS)],
            marker=plotting.MARKS[number % len(plotting.MARKS)],
            ls="-" if _is_numeric(found, across) else "none",
            ms=4, lw=1.2, capsize=3,
            label=None if lines is None else f"{safe(lines)} = {safe(str(setting))}",
        )  # fmt: skip
    _label_across(axis, found, across, places)
    plotting.dress(axis)
    plotting.legend(axis)


def _map(figure: Any, axis: Any, found: Groups, names: tuple[str, str], metric: str) -> None:
    across, up = ({v: i for i, v in enumerate(_values(found, name))} for name in names)
    grid = [[float("nan")] * len(across) for _ in up]
    for group in found.groups:
        if metric in group.results:
            row, column = up[_given(group, names[1])], across[_given(group, names[0])]
            grid[row][column] = group.results[metric].mean
    image = axis.imshow(grid, cmap="viridis", aspect="auto", origin="lower")
    figure.colorbar(image, ax=axis, label="mean")
    for which, name, values in (("x", names[0], across), ("y", names[1], up)):
        every = max(1, len(values) // 12)
        places = list(range(0, len(values), every))
        texts = ticks(list(values))[::every]
        getattr(axis, f"set_{which}ticks")(places, texts)
        getattr(axis, f"set_{which}label")(safe(name))


def _label_across(axis: Any, found: Groups, across: str, places: Mapping[str, float]) -> None:
    axis.set_xlabel(safe(across))
    if not _is_numeric(found, across):
        every = math.ceil(len(places) / _MOST_TICKS)
        texts = ticks(list(places))[::every]
        rotation = 90 if len(texts) > 6 else 0
        axis.set_xticks(list(places.values())[::every], texts, rotation=rotation)
    elif min(places.values()) > 0 and max(places.values()) / min(places.values()) >= 50:
        axis.set_xscale("log")


def _places(found: Groups, name: str) -> dict[str, float]:
    """Where each value of a parameter stands: at its number, or one after the other."""
    values = _values(found, name)
    if not _is_numeric(found, name):
        return {value: float(place) for place, value in enumerate(values)}
    return {_given(g, name): as_number(g.params[name]) or 0.0 for g in found.groups}


def _values(found: Groups, name: str) -> list[str]:
    """The values of a parameter as texts: numbers in their order, others in that of the plan."""
    if _is_numeric(found, name):
        known = {_given(g, name): as_number(g.params[name]) or 0.0 for g in found.groups}
        return sorted(known, key=lambda text: known[text])
    return list(dict.fromkeys(_given(group, name) for group in found.groups))


def _is_numeric(found: Groups, name: str) -> bool:
    numbers = [as_number(group.params.get(name)) for group in found.groups]
    return all(number is not None and math.isfinite(number) for number in numbers)


def _given(group: Group, name: str) -> str:
    return as_given(group.params.get(name))


# ---------------------------------------------------------------------- trainings


def _measured_panels(
    lines: Sequence[Mapping[str, Any]], monitor: str
) -> list[tuple[str, list[float], list[float], str]]:
    """Title, steps, values and style of each panel."""
    steps = [line for line in lines if line.get("kind") in ("train", "update")]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    drawn = {monitor, "loss", "return", *COUNTERS}
    if monitor == "loss":  # the curves show the first other metric beside it
        drawn.update([name for line in evaluations[:1] for name in line if name not in drawn][:1])
    panels = []
    for name in dict.fromkeys(name for line in evaluations for name in line):
        if name not in drawn:
            x, y = _known(evaluations, name)
            if len(y) > 1:
                panels.append((f"validation {name}", x, y, "o-"))
    for name, (x, y) in {
        "norm of the gradient": _known(steps, "grad_norm"),
        "samples per second": _throughput(steps),
        "environment steps per second": _known(steps, "steps_per_s"),
    }.items():
        if len(y) > 1:
            panels.append((name, *_thin(x, y), "-"))
    return panels


def _known(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    found = [
        (float(line["step"]), float(line[name]))
        for line in lines
        if isinstance(line.get(name), int | float) and not isinstance(line[name], bool)
    ]
    return [x for x, _ in found], [y for _, y in found]


def _throughput(steps: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Steps, and samples per second of each; the first step of an epoch or a start is left out."""
    x, y = [], []
    for before, line in itertools.pairwise(steps):
        samples = line.get("samples", 0) - before.get("samples", 0)
        seconds = line.get("seconds")
        if line.get("step") == before.get("step", 0) + 1 and samples > 0 and seconds:
            x.append(float(line["step"]))
            y.append(samples / seconds)
    return x, y


def _thin(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Means over equal numbers of points, at most ``_MOST_POINTS`` of them."""
    size = math.ceil(len(x) / _MOST_POINTS)
    if size <= 1:
        return x, y
    starts = range(0, len(x), size)
    return (
        [sum(x[i : i + size]) / len(x[i : i + size]) for i in starts],
        [sum(y[i : i + size]) / len(y[i : i + size]) for i in starts],
    )
