"""ASHA: asynchronous successive halving.

Li, Jamieson, Rostamizadeh, Gonina, Hardt, Recht and Talwalkar: "Massively Parallel Hyperparameter
Tuning", 2018 (arXiv:1810.05934), Algorithm 2. There a worker that is free takes a trial that may be
promoted before it begins a new one. A worker is free when a trial has come to a rung, and only then
can another trial have become one that may be promoted, so here the promotion is decided at that
moment. Of a rung with n trials the best floor(n / eta) are promoted, each as soon as it is one.
"""

from __future__ import annotations

import heapq
import math

from muster.search.records import Decision
from muster.search.spec import Objective, Stopping
from muster.search.stopping.rule import Rule
from muster.search.trials import Report, Trial


class BestShare:
    """Numbers with their owners, of which the best ``n // eta`` (and ``at_least`` so many) are
    known at any time, in O(log n) for each that is added. A NaN is the worst; of equals the owner
    with the lower number is better.
    """

    def __init__(self, eta: int, *, maximize: bool, at_least: int = 0) -> None:
        self._eta, self._at_least = eta, at_least
        self._sign = -1.0 if maximize else 1.0
        self._top: list[tuple[float, int]] = []  # the worst of the best first, costs negated
        self._rest: list[tuple[float, int]] = []  # the best of the others first

    def __len__(self) -> int:
        return len(self._top) + len(self._rest)

    def add(self, value: float, owner: int) -> tuple[int, float] | None:
        """Add a number. Returns the owner that this brings among the best, with its number, or
        None. It is one at most, because the share grows by one at most; it may be the new one.
        """
        cost = math.inf if math.isnan(value) else self._sign * value
        room = max((len(self) + 1) // self._eta, min(self._at_least, len(self) + 1))
        if len(self._top) < room:
            cost, owner = heapq.heappushpop(self._rest, (cost, owner))
            heapq.heappush(self._top, (-cost, -owner))
            return owner, self._sign * cost
        if not room:
            heapq.heappush(self._rest, (cost, owner))
            return None
        worst = heapq.heappushpop(self._top, (-cost, -owner))
        heapq.heappush(self._rest, (-worst[0], -worst[1]))
        return None if -worst[1] == owner else (owner, self._sign * cost)

    def cutoff(self) -> float | None:
        """The worst number among the best, None where there is none."""
        return -self._sign * self._top[0][0] if self._top else None


class Rungs:
    """The rungs ``min_step * eta**k`` below ``max_step``, each with those who came to it."""

    def __init__(self, spec: Stopping, goal: Objective, *, at_least: int = 0) -> None:
        self._spec, self._goal, self._at_least = spec, goal, at_least
        self._shares: list[BestShare] = []

    def mark(self, index: int) -> float | None:
        """The step of rung ``index``; None from ``max_step`` on, where a trial is whole."""
        step = self._spec.min_step * float(self._spec.eta) ** index
        limit = self._spec.max_step
        return None if limit is not None and step >= limit else step

    def share(self, index: int) -> BestShare:
        while len(self._shares) <= index:
            share = BestShare(self._spec.eta, maximize=self._goal.maximize, at_least=self._at_least)
            self._shares.append(share)
        return self._shares[index]


class Asha(Rule):
    """Pauses each trial at each rung and promotes the best."""

    pauses = True

    def __init__(self, spec: Stopping, goal: Objective) -> None:
        self._rungs = Rungs(spec, goal)
        self._eta = spec.eta
        self._promoted: set[tuple[int, int]] = set()

    def mark(self, trial: Trial, index: int) -> float | None:
        return self._rungs.mark(index)

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        rung = trial.marks - 1
        share = self._rungs.share(rung)
        entered = share.add(report.value, trial.number)
        seen = {"cutoff": share.cutoff(), "trials": len(share), "eta": self._eta}
        decisions = []
        if entered is None or entered[0] != trial.number:
            evidence = {"value": report.value, **seen}
            decisions.append(Decision("pause", trial.number, rung=report.step, evidence=evidence))
        # A trial that was promoted, fell behind and came back went on long ago.
        if entered is not None and (rung, entered[0]) not in self._promoted:
            self._promoted.add((rung, entered[0]))
            evidence = {"value": entered[1], **seen}
            decisions.append(Decision("promote", entered[0], rung=report.step, evidence=evidence))
        return decisions


class AshaStop(Rule):
    """Ends a trial for good that is not among the best of those who came to the rung so far.

    The variant without pauses, for trials that keep no checkpoint. The first trials of a rung have
    nobody to lose against, so the best one always goes on.
    """

    def __init__(self, spec: Stopping, goal: Objective) -> None:
        self._rungs = Rungs(spec, goal, at_least=1)
        self._eta = spec.eta

    def mark(self, trial: Trial, index: int) -> float | None:
        return self._rungs.mark(index)

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        share = self._rungs.share(trial.marks - 1)
        entered = share.add(report.value, trial.number)
        if entered is not None and entered[0] == trial.number:
            return []
        evidence = {
            "value": report.value, "cutoff": share.cutoff(), "trials": len(share), "eta": self._eta
        }  # fmt: skip
        return [Decision("stop", trial.number, rung=report.step, evidence=evidence)]
