"""What a picture of a search shows, as plain values, for a report and a dashboard alike.

Everything here is a function of `SearchState`, except that `importance` needs Optuna. Numbers that
are not finite are None, so that the values can be written as JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from muster.api.sweeps.search_state import SearchState
from muster.base.errors import MissingPackageError
from muster.base.shown_text import is_secret_name
from muster.search.distributions import Choice, Float, shown_value
from muster.search.records import is_better
from muster.search.trials import Trial, is_feasible, pareto_front

Row = dict[str, Any]


def view(state: SearchState) -> Row:
    """All of it but the importance, which takes seconds."""
    return {
        "goals": [
            {"name": goal.name, "direction": goal.direction} for goal in state.spec.objectives
        ],
        "history": history(state),
        "parallel": parallel(state),
        "pareto": pareto(state),
        "rungs": rungs(state),
        "budget": budget(state),
    }


def history(state: SearchState) -> list[Row]:
    """The trials that ended with a value of every goal, in the order of their ends.

    ``value`` and ``best`` are of the first goal, ``values`` and ``bests`` of all. The best is that
    up to there among the trials that finished, or among all where none did; what breaks a
    constraint or failed is not among them.
    """
    trials = [state.search.trials[number] for number in state.ended]
    shown = [(trial, values) for trial in trials if (values := _values(state, trial)) is not None]
    only_done = any(trial.state == "done" for trial, _ in shown)
    bests = [math.nan] * len(state.spec.objectives)
    rows = []
    for n, (trial, values) in enumerate(shown, 1):
        counts = trial.state == "done" if only_done else trial.state != "failed"
        if counts and is_feasible(state.spec, trial):
            for at, goal in enumerate(state.spec.objectives):
                if is_better(values[at], bests[at], goal.maximize):
                    bests[at] = values[at]
        rows.append(
            {
                "n": n,
                "task": _task(state, trial),
                "trial": trial.number,
                "state": _word(trial),
                "value": values[0],
                "values": list(values),
                "best": _finite(bests[0]),
                "bests": list(map(_finite, bests)),
            }
        )
    return rows


def parallel(state: SearchState) -> Row:
    """The parameters as axes, and every trial as a row of ``cells`` along them.

    A cell is None where the trial does not have the parameter. Parameters whose names say that they
    are secret are left out.
    """
    axes = [axis for axis in state.spec.space.axes if not is_secret_name(axis.name)]
    dims: list[Row] = []
    for axis in axes:
        own = axis.distribution
        if isinstance(own, Choice):
            dims.append({"name": axis.name, "kind": "choice",
                         "values": list(map(shown_value, own.values)), "log": False})  # fmt: skip
        else:
            kind = "float" if isinstance(own, Float) else "int"
            dims.append({"name": axis.name, "kind": kind, "range": [own.low, own.high],
                         "log": own.log})  # fmt: skip
    rows = []
    for trial in state.search.trials:
        values = _values(state, trial)
        cells = [
            _cell(trial.params[axis.name], axis.distribution) if axis.name in trial.params else None
            for axis in axes
        ]
        rows.append(
            {
                "task": _task(state, trial),
                "trial": trial.number,
                "cells": cells,
                "value": None if values is None else values[0],
                "state": _word(trial),
            }
        )
    return {"dims": dims, "rows": rows}


def pareto(state: SearchState) -> list[str]:
    """The tasks of the trials that no other beats in every goal; none where there is one goal."""
    if len(state.spec.objectives) < 2:
        return []
    front = pareto_front(state.spec, state.search.trials)
    return [_task(state, state.search.trials[standing.trial]) for standing in front]


def rungs(state: SearchState) -> list[Row]:
    """Each step at which trials were compared: how many came, stayed and went on, and what was
    decided there about whom, when (seconds since 1970) and on what evidence."""
    steps: dict[float, list[Row]] = {}
    came: dict[float, set[int]] = {}
    for trial in state.search.trials:
        for report in trial.reports:
            came.setdefault(report.step, set()).add(trial.number)
    for decision, time_s in zip(state.decisions, state.decided_s, strict=True):
        if decision.rung is None or decision.seed is not None:
            continue
        trial = state.search.trials[decision.trial]
        evidence = {name: _plain(value) for name, value in decision.evidence.items()}
        came.setdefault(decision.rung, set()).add(trial.number)
        steps.setdefault(decision.rung, []).append(
            {
                "task": _task(state, trial),
                "trial": trial.number,
                "value": _value_at(trial, decision.rung),
                "decision": decision.kind,
                "parent": decision.parent,
                "heir": decision.heir,
                "when": time_s,
                "evidence": evidence,
            }
        )
    stayed = state.num_by_rung
    return [
        {
            "step": step,
            "reached": len(came[step]),
            "stopped": stayed.get(step, 0),
            "promoted": len(came[step]) - stayed.get(step, 0),
            "rows": steps.get(step, []),
        }
        for step in sorted(came)
    ]


def budget(state: SearchState) -> Row:
    """What was spent of trials, seconds, GPU hours and money; ``limit`` and ``left`` are None where
    there is no limit."""
    own = state.spec.budget
    parts = {
        "trials": (own.trials, state.num_asked),
        "seconds": (own.seconds, state.spent_s),
        "gpu_hours": (own.gpu_hours, state.gpu_hours),
        "cost": (own.cost, state.cost),
    }
    return {
        name: {
            "limit": limit,
            "spent": spent,
            "left": None if limit is None else max(0, limit - spent),
        }
        for name, (limit, spent) in parts.items()
    }


def importance(state: SearchState) -> Row | None:
    """How much of the first goal's variation each parameter explains, the largest first.

    ``values`` are rows of name and value, ``step`` is the step at which the trials were compared
    (None: at their ends), and ``trials`` says how many of them were. None where Optuna is not
    installed, or where too few trials have a value to tell.
    """
    from muster.search.optuna_study import importances

    step, compared = _comparable(state)
    try:
        found = importances(state.spec, compared)
    except MissingPackageError:
        return None
    rows = [
        {"name": name, "value": value} for name, value in found.items() if not is_secret_name(name)
    ]
    return {"values": rows, "step": step, "trials": len(compared)} if rows else None


def _comparable(state: SearchState) -> tuple[float | None, Sequence[tuple[Trial, float]]]:
    """Trials with values that may be compared: those at their ends where half as many finished as
    came to one step, otherwise those at the step to which the most trials came."""
    # One that went on from another's checkpoint has a value that is not of its setting alone.
    trials = [trial for trial in state.search.trials if trial.parent is None]
    name = state.spec.objectives[0].name
    done = [(t, t.value_of(name)) for t in trials if t.state == "done"]
    steps = Counter(report.step for t in trials for report in t.reports)
    [(step, count)] = steps.most_common(1) or [(0.0, 0)]
    if 2 * len(done) >= count:
        return None, done
    return step, [(t, report.value) for t in trials for report in t.reports if report.step == step]


def _values(state: SearchState, trial: Trial) -> tuple[float, ...] | None:
    """Its value of each goal; None where one is missing or not finite."""
    values = tuple(trial.value_of(goal.name) for goal in state.spec.objectives)
    return values if all(map(math.isfinite, values)) else None


def _value_at(trial: Trial, step: float) -> float | None:
    return next((_finite(report.value) for report in trial.reports if report.step == step), None)


def _task(state: SearchState, trial: Trial) -> str:
    """The key of the trial's task, or of the first of them where it has several seeds."""
    return next(iter(state.tasks.get(trial.number, ())), "")


def _word(trial: Trial) -> str:
    return "paused" if trial.state == "waiting" else trial.state


def _cell(value: Any, distribution: Any) -> Any:
    return shown_value(value) if isinstance(distribution, Choice) else value


def _plain(value: Any) -> Any:
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
