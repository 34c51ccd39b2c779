"""What a report says about a search: how it went, what mattered, and which trials were the best."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from muster.api.report.content import Block, Facts, Listing, Picture, Table, Text, table_of
from muster.api.report.figures import drawn
from muster.api.runs import Run
from muster.api.sweeps.search_state import SearchState, again
from muster.api.sweeps.search_view import importance, view
from muster.api.trackers.metrics import Series
from muster.base.clock import human_duration, iso_utc
from muster.base.errors import how_to_install
from muster.base.shown_text import command_line, count, is_secret_name
from muster.run.folder import RunFolder

_MOST_CURVES = 60
_MOST_METRICS = 4
_MOST_SLICES = 8
_MOST_PAIRS = 3
_MOST_GOALS = 3
_MOST_BEST = 20


def search_blocks(
    run: Run, state: SearchState, place: RunFolder
) -> tuple[list[Block], list[Block | None], list[Path]]:
    """Draw a search into ``place``: pictures, tables, and the files that were made."""
    found = view(state)
    weights = importance(state) if len(state.spec.space.axes) > 1 else None
    place.figures.mkdir(exist_ok=True)
    files: list[Path] = []
    pictures: list[Block] = []
    taken: dict[str, int] = {}
    for name, caption, draw in _figures(run, state, found, weights):
        number = taken.setdefault(name, 0)
        taken[name] += 1  # two metrics may differ in what no file name can hold
        path = place.figures / (f"{name}-{number + 1}" if number else name)
        made, remarks = drawn(partial(draw, path=path))
        if remarks:  # matplotlib is missing: this is said once
            return remarks, _tables(run, state, found), []
        files += made
        names = ", ".join(file.name for file in made)
        pictures.append(Picture(made[0], caption, f"{caption} ({names})", is_small=True))
    if not found["history"]:
        pictures.append(Text("No trial has a value yet, so there is little to show."))
    elif weights is None and len(state.spec.space.axes) > 1:
        pictures.append(Text(_no_importance(state)))
    return pictures, _tables(run, state, found), files


def search_lead(state: SearchState, target: str) -> str:
    spec = state.spec
    goals = ", ".join(f"{goal.direction} {goal.name}" for goal in spec.objectives)
    rule = "" if spec.stopping.rule == "none" else f", early stopping {spec.stopping.rule}"
    seeds = "" if spec.seeds is None else f", {count(len(spec.seeds), 'seed')} each"
    trials = count(len(state.search.trials), "trial")
    return f"A search of {target}: {trials}{seeds}, to {goals}; sampler {spec.sampler}{rule}."


# ---------------------------------------------------------------------- pictures

Drawing = tuple[str, str, Callable[..., list[Path]]]


def _figures(
    run: Run, state: SearchState, found: Mapping[str, Any], weights: Mapping[str, Any] | None
) -> Iterator[Drawing]:
    """The name of each picture, what it shows, and the function that draws it."""
    from muster.api.report import search_figures as draw

    rows, goals, rungs = found["history"], found["goals"], found["rungs"]
    dims = found["parallel"]["dims"]
    best = [standing.trial for standing in state.unbeaten()]
    keys = [key for number in best for key in state.tasks.get(number, ())]
    steps = [rung["step"] for rung in rungs]
    for at, goal in enumerate(goals[:_MOST_GOALS] if rows else ()):
        yield (
            f"history-{_file_name(goal['name'])}",
            f"{goal['name']} of each trial in the order of their ends, and the best so far.",
            partial(draw.draw_history, rows, goals, at),
        )
    for name, series in _curves(run, state, best).items():
        compared = "; dotted: where trials are compared" if steps else ""
        yield (
            f"trials-{_file_name(name)}",
            f"{name} over the steps of {_which(state, series)}{compared}.",
            partial(draw.draw_fates, series, _fates(state), keys, steps),
        )
    if rungs:
        yield (
            "rungs",
            "How many trials came to each step where they are compared, and how many went on.",
            partial(draw.draw_rungs, rungs),
        )
    if weights is not None:
        at_step = "" if weights["step"] is None else f" at step {weights['step']:g}"
        yield (
            "importance",
            f"How much of the variation of {goals[0]['name']}{at_step} each parameter explains "
            f"(fANOVA over {count(weights['trials'], 'trial')}).",
            partial(draw.draw_importance, weights["values"]),
        )
    lines = _with_values(found)
    if lines and dims:
        yield (
            "parallel",
            f"The settings of the trials, each a line to its {goals[0]['name']}: the brighter the "
            "better, the best in orange.",
            partial(draw.draw_parallel, dims, lines, goals, best=best),
        )
        pairs = [(place, at) for place in _by_weight(dims, weights) for at in range(len(goals))]
        for place, at in pairs[:_MOST_SLICES]:
            name, goal = dims[place]["name"], goals[at]["name"]
            yield (
                f"slice-{_file_name(name)}-{_file_name(goal)}",
                f"{goal} of the trials over {name}.",
                partial(draw.draw_slice, dims, place, lines, goals, at),
            )
    for across, up in list(itertools.combinations(range(len(goals)), 2))[:_MOST_PAIRS]:
        if rows:
            names = goals[across]["name"], goals[up]["name"]
            yield (
                "-".join(("front", *map(_file_name, names))),
                f"{' and '.join(names)} of the trials, and those that none beats in every goal.",
                partial(draw.draw_front, rows, goals, (across, up), found["pareto"]),
            )


def _with_values(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the parallel axes that have a value of every goal, with those values."""
    values = {row["trial"]: row["values"] for row in found["history"]}
    return [
        {**row, "values": values[row["trial"]]}
        for row in found["parallel"]["rows"]
        if row["trial"] in values
    ]


def _curves(run: Run, state: SearchState, best: Sequence[int]) -> dict[str, list[Series]]:
    """What the best and some others have logged, by metric, the goals first."""
    numbers = (*best, *reversed(state.ended))
    keys = [key for number in numbers for key in state.tasks.get(number, ())]
    wanted = set(list(dict.fromkeys(keys))[:_MOST_CURVES])
    chosen: dict[str, list[Series]] = {goal.name: [] for goal in state.spec.objectives}
    for one in run.series():
        if one.task in wanted:
            chosen.setdefault(one.name, []).append(one)
    logged = {name: series for name, series in chosen.items() if series}
    return dict(list(logged.items())[:_MOST_METRICS])


def _fates(state: SearchState) -> dict[str, str]:
    trials = state.search.trials
    return {
        key: "stopped" if trials[number].state == "waiting" else trials[number].state
        for number, keys in state.tasks.items()
        for key in keys
    }


def _which(state: SearchState, series: Sequence[Series]) -> str:
    shown, known = len(series), sum(len(keys) for keys in state.tasks.values())
    if shown < min(known, _MOST_CURVES):
        return count(shown, "task")
    return "all trials" if shown == known else f"the best and of the last {shown - 1} tasks"


def _by_weight(dims: Sequence[Mapping[str, Any]], weights: Mapping[str, Any] | None) -> list[int]:
    """The places of the parameters, the important ones first."""
    known = {} if weights is None else {row["name"]: row["value"] for row in weights["values"]}
    return sorted(range(len(dims)), key=lambda at: -known.get(dims[at]["name"], 0.0))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text)[:60] or "_"


def _no_importance(state: SearchState) -> str:
    from importlib.util import find_spec

    if find_spec("optuna") is None or find_spec("sklearn") is None:
        return (
            "The importance of parameters is left out: it needs Optuna "
            f"({how_to_install('search')})."
        )
    return "There are too few values yet to tell which parameter matters."


# ---------------------------------------------------------------------- tables


def _tables(run: Run, state: SearchState, found: Mapping[str, Any]) -> list[Block | None]:
    return [
        _best_table(state),
        *_commands(run.stored.targets[0], state),
        *_schedules(state),
        _budget(found["budget"]),
        _rung_table(found["rungs"]),
        _decision_table(found["rungs"]),
    ]


def _best_table(state: SearchState) -> Table | None:
    names = [goal.name for goal in state.spec.objectives]
    rows = []
    for standing in state.search.best(_MOST_BEST):
        row: dict[str, Any] = {"trial": standing.trial}
        for name, value, spread in zip(names, standing.values, standing.spread, strict=True):
            row[name] = value
            row |= {} if state.spec.seeds is None else {f"± {name}": spread}
        params = {n: v for n, v in standing.params.items() if not is_secret_name(n)}
        rows.append({**row, "state": standing.state, "step": standing.step, **params})
    return table_of("The best trials", rows)


def _commands(target: Mapping[str, Any], state: SearchState) -> Iterator[Listing]:
    for standing in state.unbeaten()[:_MOST_BEST]:
        if state.schedule(standing.trial):
            continue  # no one command does
        text = command_line(shlex.split(again(target, state.spec, standing.params)))
        yield Listing(f"Run trial {standing.trial} again", text)


def _schedules(state: SearchState) -> Iterator[Table | None]:
    """How the best came to be where a trial went on from another's checkpoint."""
    for standing in state.unbeaten()[:_MOST_BEST]:
        rows = [
            {"until step": until, "trial": trial.number}
            | {n: v for n, v in trial.params.items() if not is_secret_name(n)}
            for until, trial in state.schedule(standing.trial) or ()
        ]
        yield table_of(f"The settings of trial {standing.trial}, in their order", rows)


def _budget(budget: Mapping[str, Any]) -> Facts:
    """What was spent and is left; a cost only where there is a limit to it."""
    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        "trials": ("trials", lambda value: f"{value:,}"),
        "seconds": ("time", human_duration),
        "gpu_hours": ("GPU hours", lambda value: f"{value:.3g}"),
        "cost": ("cost", lambda value: f"{value:.2f}"),
    }
    pairs = []
    for name, (caption, words) in shown.items():
        part = budget[name]
        text = words(part["spent"])
        if part["limit"] is not None:
            text = f"{text} of {words(part['limit'])}, {words(part['left'])} left"
        if name != "cost" or part["limit"] is not None:
            pairs.append((caption, text))
    return Facts("Budget", tuple(pairs))


def _rung_table(rungs: Sequence[Mapping[str, Any]]) -> Table | None:
    rows = [
        {"step": rung["step"], "came": rung["reached"], "ended there": rung["stopped"],
         "went on": rung["promoted"]}
        for rung in rungs
    ]  # fmt: skip
    return table_of("Where trials are compared", rows)


def _decision_table(rungs: Sequence[Mapping[str, Any]]) -> Table | None:
    rows = [
        {"step": rung["step"], "trial": row["trial"], "task": row["task"],
         "decision": row["decision"], **row["evidence"],
         **({} if row["heir"] is None else {"from trial": row["parent"], "new trial": row["heir"]}),
         "when": None if row["when"] is None else iso_utc(row["when"])}
        for rung in rungs
        for row in rung["rows"]
    ]  # fmt: skip
    return table_of("Decisions, and the numbers behind them", rows)
