"""Successive halving: asynchronous (ASHA), and in brackets (Hyperband).

ASHA is of Li, Jamieson, Rostamizadeh, Gonina, Hardt, Recht and Talwalkar: "Massively Parallel
Hyperparameter Tuning", 2018 (arXiv:1810.05934), Algorithm 2. There a worker that is free takes a
trial that may be promoted before it begins a new one. A worker is free when a trial has come to a
rung, and only then can another trial have become one that may be promoted, so here the promotion is
decided at that moment. Of a rung with n trials the best floor(n / eta) are promoted, each as soon
as it is one.

Hyperband, brackets that begin with many short or few long trials, is of Li, Jamieson, DeSalvo,
Rostamizadeh and Talwalkar: "Hyperband: A Novel Bandit-Based Approach to Hyperparameter
Optimization", JMLR 18 (2018), Algorithm 1. A rung is decided when everybody who should be there has
come or failed. Brackets run side by side, so that nobody waits for a rung.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from muster.search.records import Decision
from muster.search.spec import SearchSpec
from muster.search.trials import Report, Rule, Trial, best_first


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


class _OnRungs(Rule):
    """A rule that asks at the rungs ``min_step * eta**k`` below ``max_step``."""

    #: How many of a rung are its best, however few have come.
    at_least = 0

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__(spec)
        self._shares: list[BestShare] = []

    def mark(self, trial: Trial, index: int) -> float | None:
        """The step of rung ``index``; None from ``max_step`` on, where a trial is whole."""
        step = self._stopping.min_step * float(self._stopping.eta) ** index
        limit = self._stopping.max_step
        return None if limit is not None and step >= limit else step

    def _enter(
        self, trial: Trial, report: Report
    ) -> tuple[tuple[int, float] | None, dict[str, float | None]]:
        """Add the trial to the rung it has come to. Returns what `BestShare.add` does, and the
        rung's numbers for the evidence."""
        rung, eta = trial.marks - 1, self._stopping.eta
        if rung == len(self._shares):
            share = BestShare(eta, maximize=self._goal.maximize, at_least=self.at_least)
            self._shares.append(share)
        share = self._shares[rung]
        entered = share.add(report.value, trial.number)
        return entered, {"cutoff": share.cutoff(), "trials": len(share), "eta": eta}


class Asha(_OnRungs):
    """Pauses each trial at each rung and promotes the best."""

    pauses = True

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__(spec)
        self._promoted: set[tuple[int, int]] = set()

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        rung = trial.marks - 1
        entered, seen = self._enter(trial, report)
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


class AshaStop(_OnRungs):
    """Ends a trial for good that is not among the best of those who came to the rung so far.

    The variant without pauses, for trials that keep no checkpoint. The first trials of a rung have
    nobody to lose against, so the best one always goes on.
    """

    at_least = 1

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        entered, seen = self._enter(trial, report)
        if entered is not None and entered[0] == trial.number:
            return []
        evidence = {"value": report.value, **seen}
        return [Decision("stop", trial.number, rung=report.step, evidence=evidence)]


@dataclass(frozen=True)
class Rung:
    """``trials`` trials run up to ``step``."""

    trials: int
    step: float


def brackets(min_step: float, max_step: float, eta: int) -> list[list[Rung]]:
    """The brackets of one round, the most adventurous first: Table 1 of the paper.

    Bracket s begins with ``(s_max + 1) // (s + 1) * eta**s`` trials, as the authors' table and
    code do; Algorithm 1 rounds later, and would begin the second of R = 81 with 34, not 27.

    >>> for bracket in brackets(1, 81, 3):
    ...     print(*(f"{rung.trials}:{rung.step:g}" for rung in bracket))
    81:1 27:3 9:9 3:27 1:81
    27:3 9:9 3:27 1:81
    9:9 3:27 1:81
    6:27 2:81
    5:81
    """
    most = 0
    while min_step * eta ** (most + 1) <= max_step * (1 + 1e-12):
        most += 1
    found = []
    for halvings in range(most, -1, -1):
        first = (most + 1) // (halvings + 1) * eta**halvings
        steps = [max_step / eta ** (halvings - at) for at in range(halvings + 1)]
        found.append([Rung(first // eta**at, step) for at, step in enumerate(steps)])
    return found


@dataclass
class _Bracket:
    """One bracket as it runs. ``awaited[k]`` are the trials that should still come to rung k."""

    rungs: list[Rung]
    room: int
    """How many trials begin in it."""
    members: int = 0
    awaited: list[set[int]] = field(default_factory=list)
    arrived: list[dict[int, float]] = field(default_factory=list)


class Hyperband(Rule):
    """The last bracket has only as many trials as were left of those that the search was to choose
    when it began. Trials from before the search are in none."""

    pauses = True

    def __init__(self, spec: SearchSpec) -> None:
        super().__init__(spec)
        stopping = spec.stopping
        assert stopping.max_step is not None
        self._round = brackets(stopping.min_step, stopping.max_step, stopping.eta)
        self._brackets: list[_Bracket] = []
        self._of: dict[int, _Bracket] = {}

    def begun(self, trial: Trial) -> None:
        if trial.by == "given":
            return
        if not self._brackets or self._brackets[-1].members == self._brackets[-1].room:
            rungs = self._round[len(self._brackets) % len(self._round)]
            room = rungs[0].trials
            if trial.limit is not None:
                room = min(room, trial.limit - len(self._of))
            made = _Bracket(rungs, max(1, room), awaited=[set() for _ in rungs])
            made.arrived = [{} for _ in rungs]
            self._brackets.append(made)
        bracket = self._brackets[-1]
        bracket.members += 1
        bracket.awaited[0].add(trial.number)
        self._of[trial.number] = bracket

    def mark(self, trial: Trial, index: int) -> float | None:
        bracket = self._of.get(trial.number)
        rungs = bracket.rungs if bracket is not None else []
        return rungs[index].step if index < len(rungs) - 1 else None

    def decide(self, trial: Trial, report: Report) -> list[Decision]:
        bracket, rung = self._of[trial.number], trial.marks - 1
        bracket.awaited[rung].discard(trial.number)
        bracket.arrived[rung][trial.number] = report.value
        here = len(bracket.arrived[rung])
        evidence = {
            "value": report.value,
            "trials": here,
            "expected": self._expected(bracket, rung),
        }
        pause = Decision("pause", trial.number, rung=report.step, evidence=evidence)
        return self._without(trial.number, pause, self._promoted(bracket, rung))

    def finished(self, trial: Trial) -> list[Decision]:
        return self.left(trial)

    def left(self, trial: Trial) -> list[Decision]:
        """The rungs that wait for a trial which failed, or ended by itself, wait no longer."""
        bracket = self._of.get(trial.number)
        decisions: list[Decision] = []
        if bracket is None:
            return decisions
        for rung, awaited in enumerate(bracket.awaited[:-1]):
            if trial.number in awaited:
                awaited.discard(trial.number)
                decisions += self._promoted(bracket, rung)
        return decisions

    def _expected(self, bracket: _Bracket, rung: int) -> int:
        waiting = len(bracket.awaited[rung]) + len(bracket.arrived[rung])
        return waiting + (bracket.room - bracket.members if rung == 0 else 0)

    def _promoted(self, bracket: _Bracket, rung: int) -> list[Decision]:
        """The promotions out of a rung to which all trials have come; none before that."""
        arrived = bracket.arrived[rung]
        if bracket.awaited[rung] or (rung == 0 and bracket.members < bracket.room) or not arrived:
            return []
        order = best_first(arrived, self._goal.maximize)
        eta, step = self._stopping.eta, bracket.rungs[rung].step
        chosen = order[: max(1, len(order) // eta)]  # one also where most of a few have failed
        bracket.awaited[rung + 1].update(chosen)
        evidence = {"cutoff": arrived[chosen[-1]], "trials": len(arrived), "eta": eta}
        return [
            Decision("promote", n, rung=step, evidence={"value": arrived[n], **evidence})
            for n in chosen
        ]

    @staticmethod
    def _without(number: int, pause: Decision, promoted: list[Decision]) -> list[Decision]:
        """No pause for a trial that goes on at once."""
        if any(decision.trial == number for decision in promoted):
            return promoted
        return [pause, *promoted]
