"""Population-based training.

Jaderberg, Dalibard, Osindero, Czarnecki, Donahue, Razavi, Vinyals, Green, Dunning, Simonyan,
Fernando and Kavukcuoglu: "Population Based Training of Neural Networks", 2017 (arXiv:1711.09846),
with truncation selection: the worst fifth gives its places to trials that go on from the best fifth
(exploit), with settings a little changed (explore).

All members rest at each mark, and the decision is made when the last of them does. Then all are
compared at one step, each checkpoint is that of this step, there may be more members than workers,
and neither the order in which they come nor a killed process changes what is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from muster.search.distributions import Choice
from muster.search.records import Decision
from muster.search.space import Space, is_active
from muster.search.spec import SearchSpec, Stopping
from muster.search.trials import Report, Rule, Trial, best_first, random_for

_FACTORS = (0.8, 1.2)
#: Choices have no neighbours: one in four is drawn anew.
_DRAWN_ANEW = 0.25


@dataclass
class _Population:
    """Its members, and those of them that rest, with their values there."""

    room: int
    members: dict[int, Trial] = field(default_factory=dict)
    rested: dict[int, float] = field(default_factory=dict)
    begun: int = 0
    mark: int = 0
    """The number of the mark at which it meets next."""


class Pbt(Rule):
    """A population has as many members as the search was to choose trials when it began; where more
    are asked for later, they are another population. Trials from before the search are in none."""

    pauses = True

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__(spec)
        self._space, self._seed = spec.space, spec.seed
        self._newest: _Population | None = None
        self._of: dict[int, tuple[_Population, int]] = {}  # and the first mark of the trial
        self._begun = 0

    def begun(self, trial: Trial) -> None:
        if trial.by == "given":
            return
        if trial.parent is not None:
            population, _ = self._of[trial.parent]
        else:
            population = self._with_room(trial)
            population.begun += 1
            self._begun += 1
        population.members[trial.number] = trial
        self._of[trial.number] = population, population.mark

    def _with_room(self, trial: Trial) -> _Population:
        if self._newest is None or self._newest.begun == self._newest.room:
            assert trial.limit is not None
            self._newest = _Population(max(1, trial.limit - self._begun))
        return self._newest

    def mark(self, trial: Trial, index: int) -> float | None:
        if trial.number not in self._of:
            return None
        assert self._stopping.max_step is not None
        step = self._stopping.regular_step(self._of[trial.number][1] + index)
        return step if step < self._stopping.max_step else None

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        evidence = {"value": report.value}
        return [Decision("pause", trial.number, rung=report.step, evidence=evidence)]

    def rested(self, trial: Trial) -> list[Decision]:
        population, _ = self._of[trial.number]
        population.rested[trial.number] = trial.reports[-1].value
        return self._meet(population)

    def finished(self, trial: Trial) -> list[Decision]:
        return self.left(trial)

    def left(self, trial: Trial) -> list[Decision]:
        """Nobody waits for a trial that has failed, or has ended by itself."""
        if trial.number not in self._of:
            return []
        population, _ = self._of[trial.number]
        population.members.pop(trial.number, None)
        population.rested.pop(trial.number, None)
        return self._meet(population)

    def _meet(self, population: _Population) -> list[Decision]:
        """What becomes of all members, the best first; nothing before all of them rest."""
        values, members = population.rested, population.members
        if population.begun < population.room or not values or values.keys() != members.keys():
            return []
        order = best_first(values, self._goal.maximize)
        share = _share(self._stopping, len(order))
        step = self._stopping.regular_step(population.mark)
        decisions = [
            Decision("promote", n, rung=step, evidence={"value": values[n], "trials": len(order)})
            for n in order
        ]
        for place in range(len(order) - share, len(order)):
            random = random_for(self._seed, "pbt", order[place], population.mark)
            parent = order[random.randrange(share)]
            if math.isnan(values[parent]):
                continue  # no trial is worth going on from
            decisions[place] = Decision(
                "replace", order[place], rung=step, parent=parent,
                evidence={**decisions[place].evidence, "parent_value": values[parent]},
                params=explored(self._space, members[parent].params, random),
            )  # fmt: skip
            del members[order[place]]
        population.mark += 1
        population.rested = {}
        return decisions


def _share(stopping: Stopping, members: int) -> int:
    """How many of so many members give their places to others."""
    return min(math.ceil(members * stopping.quantile), members // 2)


def num_heirs(stopping: Stopping, members: int) -> int:
    """How many trials take the place of another in a population, as far as is known before."""
    if stopping.rule != "pbt" or stopping.max_step is None:
        return 0
    return _share(stopping, members) * sum(mark < stopping.max_step for mark in stopping.rungs())


def explored(space: Space, params: Mapping[str, Any], random: Random) -> dict[str, Any]:
    """``params`` with every number times 0.8 or 1.2, and some choices drawn anew."""
    changed: dict[str, Any] = {}
    for axis in space.axes:
        own, name = axis.distribution, axis.name
        if not is_active(axis, changed):
            continue
        if name not in params:
            changed[name] = own.draw(random)
        elif isinstance(own, Choice):
            is_new = random.random() < _DRAWN_ANEW
            changed[name] = own.draw(random) if is_new else params[name]
        else:
            changed[name] = own.moved(params[name], random.choice(_FACTORS))
    return changed
