"""What a search knows of its trials: a few numbers for each task, never the whole curve; the
samplers, from which their settings come; and the rules that end some of them early, of which the
simple two are here: no rule, and the median rule.
"""

from __future__ import annotations

import heapq
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, Literal, Protocol

from muster.search.records import Decision, Ending, EndState, Point, Standing, is_better
from muster.search.spec import SearchSpec

TrialState = Literal["running", "waiting", "stopped", "done", "failed"]


@dataclass(frozen=True)
class Report:
    """What a trial had shown at a mark: means over its seeds."""

    step: float
    """The mark: a rung, or a step at which a rule asks."""
    value: float
    """The objective at the first step that was not before the mark."""
    best: float
    """The best objective up to there."""
    mean: float
    """The running average of the objective up to there."""


class TaskTrace:
    """One task of a trial: its last numbers, and its reports at the marks it has reached."""

    __slots__ = (
        "best", "count", "held", "is_beyond", "last", "reports", "result", "state", "step", "total"
    )  # fmt: skip

    def __init__(self) -> None:
        self.state: EndState | Literal["running"] = "running"
        self.step: float | None = None
        self.last: dict[str, float] = {}
        self.result: Mapping[str, float] = {}
        self.reports: list[Report] = []
        self.best = math.nan
        self.total = 0.0
        self.count = 0
        self.held = False
        self.is_beyond = False  # it logged beyond the last step

    def take(self, point: Point, maximize: bool) -> None:
        """Count a point of the objective; its step is later than those before."""
        self.step = point.step
        self.last[point.name] = point.value
        self.count += 1
        self.total += point.value
        if not math.isnan(point.value):
            choose = max if maximize else min
            self.best = point.value if math.isnan(self.best) else choose(self.best, point.value)

    def report(self, mark: float, name: str) -> Report:
        return Report(mark, self.last[name], self.best, self.total / self.count)

    def value_of(self, name: str) -> float:
        """What it returned under this name, otherwise what it logged last, otherwise NaN."""
        found = self.result.get(name, self.last.get(name))
        return math.nan if found is None else float(found)

    def go_on(self) -> None:
        """It was promoted."""
        self.held = False
        if self.state == "paused":
            self.state = "running"

    def end(self, ending: Ending, goal: str) -> None:
        self.state = ending.state
        self.result = dict(ending.values)
        if ending.state == "done" and not self.reports:
            # It ended before the first mark, at which the other seeds of its trial would wait.
            value = self.value_of(goal)
            self.reports.append(Report(self.step or 0.0, value, value, value))


@dataclass
class Trial:
    """One setting and its tasks, by seed."""

    number: int
    params: Mapping[str, Any]
    by: str
    tasks: dict[int | None, TaskTrace]
    limit: int | None = None
    """How many trials there were to be when it began; None: any number."""
    parent: int | None = None
    """The trial from whose checkpoint it began; None: from nothing."""
    start: float | None = None
    """The step of that checkpoint."""
    state: TrialState = "running"
    marks: int = 0
    """How many marks have been decided."""
    reports: list[Report] = field(default_factory=list)
    """Its means at those marks."""

    def has_arrived(self) -> bool:
        """Whether every task has a number for the next mark; one that is done keeps its last."""
        return all(
            len(task.reports) > self.marks or (task.state == "done" and task.reports)
            for task in self.tasks.values()
        ) and any(len(task.reports) > self.marks for task in self.tasks.values())

    def is_over(self) -> bool:
        """Whether every task is done or came beyond the last step."""
        return all(task.state == "done" or task.is_beyond for task in self.tasks.values())

    def report_at(self, mark: int) -> Report:
        found = [task.reports[min(mark, len(task.reports) - 1)] for task in self.tasks.values()]
        return Report(
            max(report.step for report in found),
            _mean([report.value for report in found]),
            _mean([report.best for report in found]),
            _mean([report.mean for report in found]),
        )

    def value_of(self, name: str) -> float:
        """The mean over the seeds; NaN where a seed has no number."""
        return _mean([task.value_of(name) for task in self.tasks.values()])

    def spread_of(self, name: str) -> float | None:
        """The standard deviation over the seeds; None where there is none: of one seed, or where
        a seed has diverged."""
        values = [task.value_of(name) for task in self.tasks.values()]
        if len(values) < 2 or not all(map(math.isfinite, values)):
            return None
        try:
            return statistics.stdev(values)
        except OverflowError:  # beyond the largest number
            return None

    @property
    def step(self) -> float | None:
        steps = [task.step for task in self.tasks.values() if task.step is not None]
        return min(steps) if steps else None


def _mean(values: list[float]) -> float:
    """NaN of two infinite values that cancel out, infinite beyond the largest number."""
    if len(values) == 1:
        return values[0]
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # where `sum` gives an infinity or NaN
        return sum(values) / len(values)


#: How many trials are compared with all others at once, which takes a few megabytes.
_BLOCK = 256


def best_first(values: Mapping[int, float], maximize: bool) -> list[int]:
    """The numbers of trials by their values; a NaN is the worst, of equals the lower goes first."""
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


def seed_for(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 32 bits for this purpose; the same for ever."""
    text = f"{seed} {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")


def random_for(seed: int, purpose: str, *numbers: int) -> Random:
    return Random(seed_for(seed, purpose, *numbers))


class Sampler(Protocol):
    """What a search asks of a sampler; the order of the calls is its only state."""

    def pick(self, number: int) -> dict[str, Any]:
        """The setting of trial ``number``."""

    def fix(self, number: int, params: Mapping[str, Any]) -> None:
        """Trial ``number`` has this setting, whatever was picked."""

    def recall(self, number: int, params: Mapping[str, Any], by: str) -> None:
        """Do again what this trial once came from, a `pick` or a `fix`."""

    def tell(self, trial: Trial) -> None:
        """This trial has ended, or is paused at a mark."""


class RandomSampler:
    """Each parameter drawn by itself, by Muster's own draws: it needs no package."""

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec

    def pick(self, number: int) -> dict[str, Any]:
        return self._spec.space.draw(random_for(self._spec.seed, "random", number))

    def fix(self, number: int, params: Mapping[str, Any]) -> None: ...

    def recall(self, number: int, params: Mapping[str, Any], by: str) -> None: ...

    def tell(self, trial: Trial) -> None: ...


def make_sampler(spec: SearchSpec) -> Sampler:
    """The sampler that the specification names; all but ``random`` are Optuna's."""
    if spec.sampler == "random":
        return RandomSampler(spec)
    from muster.search.optuna_study import StudySampler

    return StudySampler(spec)


class Rule(ABC):
    """It names the steps at which it wants to hear a trial, its marks, and decides there."""

    #: Whether a trial is paused at each mark until it is promoted.
    pauses = False

    def __init__(self, spec: SearchSpec) -> None:
        self._stopping, self._goal = spec.stopping, spec.objectives[0]

    @abstractmethod
    def mark(self, trial: Trial, index: int) -> float | None:
        """The step of the trial's mark number ``index``; None where there is none."""

    @abstractmethod
    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        """What follows from a trial's arrival at its next mark, for it and for others."""

    def begun(self, trial: Trial) -> None:  # noqa: B027 - most rules need not know
        """There is this new trial."""

    def rested(self, trial: Trial) -> list[Decision]:
        """What follows from the end of a trial that was paused: its checkpoint is as it will be."""
        return []

    def finished(self, trial: Trial) -> list[Decision]:
        """What follows from a trial's end by itself."""
        return []

    def left(self, trial: Trial) -> list[Decision]:
        """What follows where a trial failed or was stopped, so that nothing need wait for it."""
        return []


class NoRule(Rule):
    """Every trial runs to its end."""

    def mark(self, trial: Trial, index: int) -> float | None:
        return None

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        return []


class RunningMedian:
    """The median of a growing set, from two heaps (the mean of the middle two of an even one)."""

    def __init__(self) -> None:
        self._low: list[float] = []  # negated, the largest first
        self._high: list[float] = []

    def __len__(self) -> int:
        return len(self._low) + len(self._high)

    def add(self, value: float) -> None:
        heapq.heappush(self._high, -heapq.heappushpop(self._low, -value))
        if len(self._high) > len(self._low):
            heapq.heappush(self._low, -heapq.heappop(self._high))

    def median(self) -> float | None:
        if not self._low:
            return None
        if len(self._low) > len(self._high):
            return -self._low[0]
        return (self._high[0] - self._low[0]) / 2


class Median(Rule):
    """A trial is stopped at step s if its best objective by s is strictly worse than the median of
    the running averages, up to s, of all trials that have finished.

    Golovin, Solnik, Moitra, Kochanski, Karro and Sculley: "Google Vizier: A Service for Black-Box
    Optimization", KDD 2017, section 3.2.2.
    """

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__(spec)
        self._medians: list[RunningMedian] = []

    def mark(self, trial: Trial, index: int) -> float | None:
        limit, step = self._stopping.max_step, self._stopping.regular_step(index)
        return None if limit is not None and step >= limit else step

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        index = trial.marks - 1
        known = self._medians[index] if index < len(self._medians) else RunningMedian()
        median = known.median()
        if median is None or len(known) < self._stopping.startup_trials:
            return []
        if not is_better(median, report.best, self._goal.maximize):
            return []
        evidence = {"best": report.best, "median": median, "trials": len(known)}
        return [Decision("stop", trial.number, rung=report.step, evidence=evidence)]

    def finished(self, trial: Trial) -> list[Decision]:
        for index, report in enumerate(trial.reports):
            if index == len(self._medians):
                self._medians.append(RunningMedian())
            if not math.isnan(report.mean):
                self._medians[index].add(report.mean)
        return []
