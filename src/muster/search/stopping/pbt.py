"""Population-based training.

Jaderberg, Dalibard, Osindero, Czarnecki, Donahue, Razavi, Vinyals, Green, Dunning, Simonyan,
Fernando and Kavukcuoglu: "Population Based Training of Neural Networks", 2017 (arXiv:1711.09846).
Truncation selection: a member among the worst fifth gives its place to a copy of one drawn from the
best fifth, whose numbers are multiplied by 0.8 or 1.2; one parameter in four is drawn anew.

A copy is a trial of its own that goes on from the checkpoint of its source: what a task's
parameters are never changes, so a result always belongs to one setting.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

from muster.search.distributions import Choice
from muster.search.draws import random_for
from muster.search.records import Decision
from muster.search.space import Space, is_active
from muster.search.spec import Objective, Stopping
from muster.search.trials import Report, Trial

_FACTORS = (0.8, 1.2)
_DRAWN_ANEW = 0.25


class Pbt:
    pauses = False

    def __init__(self, spec: Stopping, goal: Objective, space: Space, seed: int) -> None:
        self._spec, self._goal, self._space, self._seed = spec, goal, space, seed
        self.max_trials: int | None = spec.population
        self._members: dict[int, Trial] = {}
        self._starts: dict[int, float] = {}
        self._came_to: dict[int, float] = {}

    def begun(self, trial: Trial) -> None:
        if trial.parent is not None:
            self._starts[trial.number] = self._came_to[trial.parent]
        self._members[trial.number] = trial

    def mark(self, trial: Trial, index: int) -> float | None:
        every = self._spec.every or self._spec.min_step
        start = self._starts.get(trial.number)
        step = self._spec.min_step + index * every if start is None else start + (index + 1) * every
        limit = self._spec.max_step
        return None if limit is not None and step >= limit else step

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        self._came_to[trial.number] = report.step
        ranked = self._ranked()
        share = min(math.ceil(len(ranked) * self._spec.quantile), len(ranked) // 2)
        if trial not in ranked[len(ranked) - share :]:
            return []
        random = random_for(self._seed, "pbt", trial.number, trial.marks)
        source = ranked[random.randrange(share)]
        evidence = {
            "value": report.value,
            "source_value": source.reports[-1].value,
            "members": len(ranked),
            "params": explored(self._space, source.params, random),
        }
        copy = Decision(
            "copy", trial.number, rung=report.step, source=source.number, evidence=evidence
        )
        del self._members[trial.number]
        return [copy]

    def finished(self, trial: Trial) -> list[Decision]:
        return []

    def left(self, trial: Trial) -> list[Decision]:
        return []

    def _ranked(self) -> list[Trial]:
        """The living members that have come to a mark, the best first."""
        sign = -1.0 if self._goal.maximize else 1.0
        known = [
            trial
            for trial in self._members.values()
            if trial.reports and trial.state in ("running", "done")
        ]
        values = {trial.number: trial.reports[-1].value for trial in known}
        return sorted(
            known, key=lambda t: (math.isnan(values[t.number]), sign * values[t.number], t.number)
        )


def explored(space: Space, params: Any, random: Random) -> dict[str, Any]:
    """``params``, each a little changed, or drawn anew."""
    changed: dict[str, Any] = {}
    for axis in space.axes:
        if not is_active(axis, changed):
            continue
        own, name = axis.distribution, axis.name
        if name not in params or random.random() < _DRAWN_ANEW:
            changed[name] = own.draw(random)
        elif isinstance(own, Choice):
            changed[name] = params[name]
        else:
            changed[name] = own.moved(params[name], random.choice(_FACTORS))
    return changed
