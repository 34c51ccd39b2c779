"""A search in words: how it stands, what it would try, and what was best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from muster.api.sweeps.search_state import SearchState
from muster.base.clock import human_duration
from muster.base.shown_text import count
from muster.search.distributions import shown_value
from muster.search.records import Standing
from muster.search.spec import SearchSpec
from muster.search.trials import Trial


def goal_of(spec: SearchSpec) -> str:
    """``maximize accuracy``."""
    return ", ".join(f"{goal.direction} {goal.name}" for goal in spec.objectives)


def state_lines(state: SearchState) -> list[str]:
    """The best so far, where trials were stopped, and what is left of the budget."""
    spec, lines = state.spec, []
    best = state.search.best()
    if best:
        values = ", ".join(value_lines(spec, best[0]))
        before = len(state.lineage(best[0].trial)) - 1
        of = f", the last of its {before + 1} settings" if before else ""
        lines.append(f"best so far: {values}  with {setting_text(best[0].params)}{of}")
    else:
        lines.append(f"best so far: none; no trial has a value of {spec.objectives[0].name}")
    if stopped := state.num_by_rung:
        rungs = ", ".join(f"{number:,} at step {rung:g}" for rung, number in stopped.items())
        ended = "at rest or replaced" if spec.stopping.rule == "pbt" else "stopped"
        lines.append(f"trials {ended}: {rungs}")
    if heirs := sum(trial.parent is not None for trial in state.search.trials):
        lines.append(f"{count(heirs, 'trial')} began with the checkpoint of a better one")
    lines.append(f"{count(len(state.search.trials), 'trial')}{_left(state)}")
    return [*lines, *_none_whole(state), *_none_compared(state)]


def _none_whole(state: SearchState) -> Iterator[str]:
    """A note where ASHA has had all its trials and could promote none to the last step.

    A rung promotes one in ``eta``, so ``eta`` trials to the power of the number of rungs are needed
    for one that is whole: never fewer than last step / first step. A smaller ``eta`` only makes
    more rungs.
    """
    rule, trials = state.spec.stopping, state.search.trials
    most, num = state.spec.budget.trials, state.num_asked
    if rule.rule != "asha" or rule.max_step is None or most is None or num < most:
        return
    rungs = sum(step < rule.max_step for step in rule.rungs())
    if rungs == 0 or any(trial.state in ("running", "done") for trial in trials):
        return
    fitting = max(k for k in range(rungs + 1) if rule.eta**k <= max(1, num))
    first = math.ceil(rule.max_step / rule.eta**fitting)
    later = "" if fitting == rungs else (
        f", or a later first rung: --stop asha:min={min(first, rule.max_step):g},"
        f"max={rule.max_step:g},eta={rule.eta}"
    )  # fmt: skip
    yield (
        f"note: no trial came to the last step, {rule.max_step:g}: with {count(rungs, 'rung')} "
        f"before it and one in {rule.eta} promoted from each, it takes {rule.eta**rungs:,} trials"
        f"{later}"
    )


def _none_compared(state: SearchState) -> Iterator[str]:
    """A note where a rule had nothing to go by: trials are done, and none has logged the goal."""
    rule = state.spec.stopping.rule
    tasks = [task for trial in state.search.trials for task in trial.tasks.values()]
    if rule == "none" or any(task.step is not None for task in tasks):
        return
    if any(task.state == "done" for task in tasks):
        name = state.spec.objectives[0].name
        yield (
            f"note: no trial has logged {name}, so --stop {rule} had nothing to compare: use "
            f"ctx.log(step, {name}=…), or in a program muster.log or --metrics-from"
        )


def _left(state: SearchState) -> str:
    budget, parts = state.spec.budget, []
    if budget.trials is not None:
        parts.append(f"{max(0, budget.trials - state.num_asked):,} of {budget.trials:,} left")
    if budget.seconds is not None:
        left_s = max(0.0, budget.seconds - state.spent_s)
        parts.append(f"{human_duration(left_s)} of {human_duration(budget.seconds)} left")
    if budget.gpu_hours is not None:
        parts.append(f"{max(0.0, budget.gpu_hours - state.gpu_hours):.3g} of "
                     f"{budget.gpu_hours:g} GPU hours left")  # fmt: skip
    if budget.cost is not None:
        parts.append(f"{max(0.0, budget.cost - state.cost):.2f} of {budget.cost:g} of cost left")
    return "; " + "; ".join(parts) if parts else ""


def plan_lines(spec: SearchSpec) -> list[str]:
    """What a search would do, for ``--dry-run``."""
    budget = spec.budget
    limits = [count(budget.trials, "trial")] if budget.trials is not None else []
    if not limits and spec.space.size is not None:
        limits.append(f"all {spec.space.size:,} settings")
    limits += [] if budget.seconds is None else [f"{human_duration(budget.seconds)} of time"]
    limits += [] if budget.gpu_hours is None else [f"{budget.gpu_hours:g} GPU hours"]
    if budget.cost is not None:
        limits.append(f"a cost of {budget.cost:g}, at {budget.price_per_gpu_hour:g} a GPU hour")
    seeds = "" if spec.seeds is None else f", {count(len(spec.seeds), 'seed')} each"
    rule = "" if spec.stopping.rule == "none" else f", {spec.stopping.rule} ends bad trials early"
    if spec.stopping.rule == "pbt":
        rule = ", pbt ends bad trials, and changed ones go on from good ones in their places"
    lines = [f"search   {', '.join(limits)}{seeds}: {goal_of(spec)}, sampler {spec.sampler}{rule}"]
    for number in range(2):
        example = setting_text(spec.space.draw(Random(number)))
        lines.append(f"         a setting of the space: {example}")
    return lines


def setting_text(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={shown_value(value)}" for name, value in params.items())


def schedule_lines(schedule: Sequence[tuple[float | None, Trial]]) -> list[str]:
    """``to step 12  lr=0.1  (trial 3)``, a line for each setting in its turn."""
    ends = ["to the end" if until is None else f"to step {until:g}" for until, _ in schedule]
    width = max(map(len, ends))
    return [
        f"{end:{width}}  {setting_text(trial.params)}  (trial {trial.number})"
        for end, (_, trial) in zip(ends, schedule, strict=True)
    ]


def value_lines(spec: SearchSpec, standing: Standing) -> list[str]:
    """``accuracy 0.93 ± 0.01``, one for each objective; the deviation is that over the seeds."""
    lines = []
    for goal, value, spread in zip(spec.objectives, standing.values, standing.spread, strict=True):
        more = "" if spread is None else f" ± {spread:.2g}"
        lines.append(f"{goal.name} {value:.6g}{more}")
    return lines
