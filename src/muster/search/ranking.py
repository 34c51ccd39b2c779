"""Which trials are the best so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from muster.search.records import Standing
from muster.search.spec import SearchSpec
from muster.search.trials import Trial

#: So many trials are compared with all others at once: a few megabytes.
_BLOCK = 256


def best_first(values: Mapping[int, float], maximize: bool) -> list[int]:
    """The numbers of trials by their values; a NaN is the worst, of equals the lower is better."""
    sign = -1.0 if maximize else 1.0
    costs = {n: (True, 0.0) if math.isnan(v) else (False, sign * v) for n, v in values.items()}
    return sorted(values, key=lambda n: (costs[n], n))


def standing_of(spec: SearchSpec, trial: Trial) -> Standing | None:
    """The trial as it stands; None where it failed or an objective has no number."""
    if trial.state == "failed":
        return None
    values = tuple(trial.value_of(objective.name) for objective in spec.objectives)
    if any(math.isnan(value) for value in values):
        return None
    return Standing(
        trial=trial.number,
        params=trial.params,
        values=values,
        spread=tuple(trial.spread_of(objective.name) for objective in spec.objectives),
        seeds=len(trial.tasks),
        step=trial.step,
        state="paused" if trial.state == "waiting" else trial.state,
    )


def is_feasible(spec: SearchSpec, trial: Trial) -> bool:
    return all(limit.violation(trial.value_of(limit.name)) <= 0 for limit in spec.constraints)


def rank_trials(spec: SearchSpec, trials: Sequence[Trial]) -> list[Standing]:
    """All trials that count, the best first: those that finished before the others, then by how
    many beat them in every objective, then by value, then by number."""
    found = _counted(spec, trials)
    fronts = num_better([costs for _, costs in found]) if len(spec.objectives) > 1 else None
    order = sorted(
        range(len(found)),
        key=lambda at: (
            found[at][0].state != "done",
            fronts[at] if fronts else 0,
            found[at][1],
            found[at][0].trial,
        ),
    )
    return [found[at][0] for at in order]


def pareto_front(spec: SearchSpec, trials: Sequence[Trial]) -> list[Standing]:
    """The finished trials that no finished one beats in every objective, by number."""
    done = [one for one in _counted(spec, trials) if one[0].state == "done"]
    numbers = num_better([costs for _, costs in done])
    front = [standing for (standing, _), number in zip(done, numbers, strict=True) if not number]
    return sorted(front, key=lambda standing: standing.trial)


def _counted(spec: SearchSpec, trials: Sequence[Trial]) -> list[tuple[Standing, tuple[float, ...]]]:
    return [
        (standing, _costs(spec, standing))
        for trial in trials
        if is_feasible(spec, trial) and (standing := standing_of(spec, trial)) is not None
    ]


def _costs(spec: SearchSpec, standing: Standing) -> tuple[float, ...]:
    """The values, turned so that less is better."""
    pairs = zip(standing.values, spec.objectives, strict=True)
    return tuple(-value if objective.maximize else value for value, objective in pairs)


def num_better(costs: Sequence[tuple[float, ...]]) -> list[int]:
    """How many others beat each: not worse anywhere, and better somewhere."""
    import numpy as np

    table, alike = np.array(costs), Counter(costs)
    numbers: list[int] = []
    for start in range(0, len(costs), _BLOCK):
        block = table[start : start + _BLOCK]
        is_not_worse = np.ones((len(block), len(costs)), bool)
        for own, column in zip(block.T, table.T, strict=True):
            is_not_worse &= column <= own[:, None]
        numbers += is_not_worse.sum(axis=1).tolist()
    return [number - alike[own] for number, own in zip(numbers, costs, strict=True)]
