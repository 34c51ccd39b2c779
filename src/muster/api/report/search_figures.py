"""Pictures of a search: its history, rungs, what mattered, its settings, and the curves of trials.

Each is a small figure of its own, so that two stand side by side on a screen and each can be read
on a telephone. A trial's fate has a colour and a mark of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster import plotting
from muster.api.trackers.metrics import Series
from muster.plotting import safe, ticks

_WIDE, _HIGH = 3.8, 2.9
_MOST_LINES = 300
_MOST_SHOWN = 8
#: Where there are more rungs than this, their numbers are left out.
_MOST_NAMED = 10
#: What is said of a trial: colour, mark, and word.
_FATES = {
    "done": (plotting.BLUE, "o", "finished"),
    "running": (plotting.GREEN, "^", "running"),
    "stopped": (plotting.GREY, "x", "ended early"),
    "paused": (plotting.GREY, "x", "ended early"),
    "failed": (plotting.BLACK, "+", "failed"),
}

Rows = Sequence[Mapping[str, Any]]


def draw_history(rows: Rows, goals: Rows, at: int, path: Path) -> list[Path]:
    """The value of each trial in the order of their ends, and the best up to there."""
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, _HIGH))
        _points(axis, [(row["n"], row["values"][at], row["state"]) for row in rows])
        best = [(row["n"], row["bests"][at]) for row in rows if row["bests"][at] is not None]
        if best:
            axis.step(*zip(*best, strict=True), where="post", color=plotting.ORANGE, lw=1.6,
                      label="best so far")  # fmt: skip
        _scale(axis, "y", [row["values"][at] for row in rows])
        plotting.whole_numbers(axis.xaxis)
        plotting.dress(axis, x="trials, in the order of their ends", y=_goal(goals[at]))
        _legend_above(axis)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_rungs(rungs: Rows, path: Path) -> list[Path]:
    """How many trials came to each step where they were compared, and how many went on."""
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, _HIGH))
        places = range(len(rungs))
        went = [rung["promoted"] for rung in rungs]
        stayed = [rung["stopped"] for rung in rungs]
        axis.bar(places, went, color=plotting.BLUE, label="went on", width=0.7)
        axis.bar(places, stayed, bottom=went, color="#d9d9d9", edgecolor=plotting.GREY,
                 hatch="///", lw=0.5, label="ended there", width=0.7)  # fmt: skip
        for place, rung in zip(places, rungs, strict=True) if len(rungs) <= _MOST_NAMED else ():
            text, top = f"{rung['promoted']} of {rung['reached']}", (place, rung["reached"])
            axis.annotate(text, top, textcoords="offset points", xytext=(0, 2), ha="center")
        every = math.ceil(len(rungs) / _MOST_NAMED)
        axis.set_xticks(places[::every], [f"{rung['step']:g}" for rung in rungs[::every]])
        axis.margins(y=0.12)
        plotting.whole_numbers(axis.yaxis)
        plotting.dress(axis, x="step", y="trials", lines="y")
        _legend_above(axis)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_importance(rows: Rows, path: Path) -> list[Path]:
    """A bar for each parameter, the most important at the top."""
    shown = list(rows)[:_MOST_SHOWN]
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, max(1.3, 0.7 + 0.3 * len(shown))))
        places = range(len(shown))
        values = [row["value"] for row in shown]
        axis.barh(places, values, color=plotting.BLUE, height=0.65)
        for place, value in zip(places, values, strict=True):
            axis.annotate(f"{value:.0%}", (value, place), textcoords="offset points",
                          xytext=(3, 0), va="center", fontsize=7)  # fmt: skip
        axis.set_yticks(places, ticks([row["name"] for row in shown]))
        axis.invert_yaxis()
        axis.set_xlim(0, max(values) * 1.18 or 1)
        axis.set_xticks([])
        plotting.dress(axis, x="share of the variation", lines="x")
        axis.spines["bottom"].set_visible(False)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_parallel(
    dims: Rows, rows: Rows, goals: Rows, path: Path, best: Sequence[int]
) -> list[Path]:
    """A line for each trial through its parameters to its values, the better ones brighter.

    A trial without a parameter passes below its axis. ``rows``: of trials with values; ``best``:
    the numbers of the trials that are drawn in another colour.
    """
    ordered = sorted(
        rows, key=lambda row: row["values"][0], reverse=goals[0]["direction"] == "minimize"
    )
    kept = ordered[:: math.ceil(len(ordered) / _MOST_LINES) or 1]
    chosen = [*kept, *(row for row in ordered if row["trial"] in best and row not in kept)]
    shown = list(range(len(dims)))[:_MOST_SHOWN]
    ends = [_axis_of(goal, [row["values"][at] for row in rows]) for at, goal in enumerate(goals)]
    axes = [*(dims[at] for at in shown), *ends]
    lacks = any(row["cells"][at] is None for row in chosen for at in shown)
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE + 0.7 * max(0, len(axes) - 4), _HIGH))
        for place, row in enumerate(chosen):
            cells = [*(row["cells"][at] for at in shown), *row["values"]]
            heights = [_height(dim, cell) for dim, cell in zip(axes, cells, strict=True)]
            share = place / max(1, len(chosen) - 1)  # by rank, so that one outlier hides nothing
            is_best = row["trial"] in best
            axis.plot(
                range(len(cells)), heights, alpha=0.75, zorder=3 if is_best else 2,
                color=plotting.ORANGE if is_best else plotting.shade(share),
                lw=1.8 if is_best else 0.8,
            )  # fmt: skip
        for place, dim in enumerate(axes):
            axis.axvline(place, color=plotting.BLACK, lw=0.7, zorder=4)
            _mark_axis(axis, place, dim)
        names = [dim["name"] for dim in axes]
        axis.set_xticks(range(len(names)), ticks(names))
        axis.tick_params(length=0)
        if lacks:
            axis.axhline(_BELOW, color=plotting.GREY, lw=0.5, ls=":")
            axis.set_yticks([_BELOW], ["not there"])
        else:
            axis.set_yticks([])
        axis.set_xlim(-0.1, len(names) - 0.55)
        axis.set_ylim((_BELOW if lacks else 0) - 0.06, 1.06)
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_slice(dims: Rows, at: int, rows: Rows, goals: Rows, which: int, path: Path) -> list[Path]:
    """One goal of each trial over one parameter; ``at`` and ``which`` are their places."""
    dim = dims[at]
    found = [row for row in rows if row["cells"][at] is not None]
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, _HIGH))
        if dim["kind"] == "choice":
            names = dim["values"]
            spread = {name: place for place, name in enumerate(names)}
            counted: dict[str, int] = {}
            points = []
            for row in found:  # side by side, so that equal values do not hide each other
                cell = row["cells"][at]
                counted[cell] = counted.get(cell, 0) + 1
                aside = ((counted[cell] * 0.618) % 1 - 0.5) * 0.5
                points.append((spread[cell] + aside, row["values"][which], row["state"]))
            turned = 45 if len(names) > 4 else 0
            axis.set_xticks(range(len(names)), ticks(names), rotation=turned)
            axis.set_xlim(-0.6, len(names) - 0.4)
        else:
            points = [(row["cells"][at], row["values"][which], row["state"]) for row in found]
            if dim["log"]:
                axis.set_xscale("log")
        _points(axis, points)
        _scale(axis, "y", [row["values"][which] for row in found])
        plotting.dress(axis, x=safe(dim["name"]), y=_goal(goals[which]))
        _legend_above(axis)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_front(
    rows: Rows, goals: Rows, pair: tuple[int, int], front: Sequence[str], path: Path
) -> list[Path]:
    """Two goals of all trials, and a line through those that no other trial beats."""
    across, up = pair
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, _HIGH))
        _points(axis, [(row["values"][across], row["values"][up], row["state"]) for row in rows])
        best = sorted((row["values"][across], row["values"][up]) for row in rows
                      if row["task"] in front)  # fmt: skip
        if best:
            style = "-" if len(goals) == 2 else ""
            axis.plot(*zip(*best, strict=True), ls=style or "none", marker="o", ms=5, mfc="none",
                      color=plotting.ORANGE, lw=1.2, label="unbeaten")  # fmt: skip
        for which, number in (("x", across), ("y", up)):
            _scale(axis, which, [row["values"][number] for row in rows])
        plotting.dress(axis, x=_goal(goals[across]), y=_goal(goals[up]))
        _legend_above(axis)
        return plotting.save(figure, *plotting.png_and_pdf(path))


def draw_fates(
    series: Sequence[Series], fates: Mapping[str, str], best: Sequence[str],
    steps: Sequence[float], path: Path,
) -> list[Path]:  # fmt: skip
    """One metric of several trials over its steps, coloured by how they ended.

    ``fates``: the state of each task, by its key; ``best``: the tasks of the best trial; ``steps``:
    those at which trials were compared.
    """
    with plotting.small_letters():
        figure, (axis,) = plotting.panels(1, 1, (_WIDE, _HIGH))
        for step in steps if len(steps) <= _MOST_NAMED else ():
            axis.axvline(step, color=plotting.GREY, lw=0.6, ls=":", zorder=1)
        seen: set[str] = set()
        for one in series:
            is_best = one.task in best
            colour, _, word = _FATES[fates.get(one.task, "running")]
            colour, word = (plotting.ORANGE, "the best") if is_best else (colour, word)
            above = 4 if is_best else 2 if word == "ended early" else 3
            x, y = one.curve.step.tolist(), one.curve.value.tolist()
            axis.plot(
                x, y, color=colour, lw=1.8 if is_best else 0.9, alpha=1 if is_best else 0.6,
                zorder=above, label=None if word in seen else word,
                marker="." if len(x) == 1 else "",
            )  # fmt: skip
            if word == "ended early":
                axis.plot(x[-1:], y[-1:], "x", ms=3.5, color=colour, zorder=above)
            seen.add(word)
        _scale(axis, "y", [value for one in series for value in one.curve.value.tolist()])
        plotting.dress(axis, x="step", y=safe(series[0].name))
        is_few = 0 < len(steps) <= _MOST_NAMED
        if is_few and min(steps) > 0 and max(steps) / min(steps) >= 9:  # rungs at equal distances
            ends = max(float(one.curve.step[-1]) for one in series)
            marks = [*steps, ends] if ends > 1.5 * max(steps) else list(steps)
            plotting.log_ticks(axis, marks, [f"{mark:g}" for mark in marks])
        _legend_above(axis)
        return plotting.save(figure, *plotting.png_and_pdf(path))


# ---------------------------------------------------------------------- what they have in common

_BELOW = -0.16


def _points(axis: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """A mark for each (x, y, state), with one entry of the legend for each word."""
    by_word: dict[str, list[tuple[float, float]]] = {}
    styles = {}
    for x, y, state in points:
        colour, mark, word = _FATES[state]
        by_word.setdefault(word, []).append((x, y))
        styles[word] = (colour, mark)
    for word, found in by_word.items():
        colour, mark = styles[word]
        axis.plot(*zip(*found, strict=True), mark, color=colour, ms=3.5, alpha=0.75, label=word,
                  mew=1 if mark in "x+" else 0, rasterized=len(found) > _MOST_LINES)  # fmt: skip


def _goal(goal: Mapping[str, Any]) -> str:
    better = "higher" if goal["direction"] == "maximize" else "lower"
    return f"{safe(goal['name'])} ({better} is better)"


def _legend_above(axis: Any) -> None:
    """A legend above the picture, where it hides nothing."""
    count = len(axis.get_legend_handles_labels()[0])
    if count > 1:
        plotting.legend(axis, loc="lower left", bbox_to_anchor=(0, 1), ncols=count, fontsize=7,
                        borderaxespad=0.2, columnspacing=1.0, handletextpad=0.4)  # fmt: skip


def _is_wide(values: Iterable[float]) -> bool:
    """Whether these are positive numbers of several orders of magnitude."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) / min(known) >= 50


def _scale(axis: Any, which: str, values: Sequence[float]) -> None:
    if _is_wide(values):
        getattr(axis, f"set_{which}scale")("log")


def _height(dim: Mapping[str, Any], cell: Any) -> float:
    """Where a value stands on its axis: from 0 to 1, or below it where it is not there."""
    if cell is None:
        return _BELOW
    if dim["kind"] == "choice":
        places = dim["values"]
        return places.index(cell) / max(1, len(places) - 1) if len(places) > 1 else 0.5
    low, high = dim["range"]
    if dim["log"]:
        low, high, cell = math.log(low), math.log(high), math.log(cell)
    return (cell - low) / (high - low) if high > low else 0.5


def _axis_of(goal: Mapping[str, Any], values: Sequence[float]) -> dict[str, Any]:
    ends = [min(values), max(values)]
    return {"name": goal["name"], "kind": "float", "range": ends, "log": _is_wide(values)}


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _mark_axis(axis: Any, place: int, dim: Mapping[str, Any]) -> None:
    """The ends of an axis, or the names of its values, to the right of it."""
    if dim["kind"] == "choice":
        every = math.ceil(len(dim["values"]) / 10)
        marks = [(_height(dim, name), ticks([name])[0]) for name in dim["values"][::every]]
    else:
        low, high = dim["range"]
        middle = math.sqrt(low * high) if dim["log"] else (low + high) / 2
        middle = round(middle) if dim["kind"] == "int" else middle
        marks = [(_height(dim, value), _short(value)) for value in (low, middle, high)]
    for height, text in marks:
        axis.annotate(text, (place, height), textcoords="offset points", xytext=(3, 0), fontsize=7,
                      va="center", zorder=5,
                      bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.5})  # fmt: skip
