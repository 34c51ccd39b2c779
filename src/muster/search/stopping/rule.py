"""What a search asks of a rule of early stopping; no rule, and the median rule."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod

from muster.search.records import Decision, is_better
from muster.search.spec import Objective, Stopping
from muster.search.trials import Report, Trial


class Rule(ABC):
    """It names the steps at which it wants to hear a trial, and decides there."""

    #: Whether a trial rests at each mark until it is promoted.
    pauses = False

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
        """What follows from a trial's failure."""
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

    def __init__(self, spec: Stopping, goal: Objective) -> None:
        self._spec, self._goal = spec, goal
        self._medians: list[RunningMedian] = []

    def mark(self, trial: Trial, index: int) -> float | None:
        limit, step = self._spec.max_step, self._spec.regular_step(index)
        return None if limit is not None and step >= limit else step

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        index = trial.marks - 1
        known = self._medians[index] if index < len(self._medians) else RunningMedian()
        median = known.median()
        if median is None or len(known) < self._spec.startup_trials:
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
