"""Rules of early stopping against slow references, the papers' tables and the peers' own code."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.simulated_search import simulate

from muster.search.records import Decision, Ended, Ending, Heard, Point, Proposal
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, SearchSpec, Stopping, objectives
from muster.search.stopping.halving import BestShare, brackets
from muster.search.trials import RunningMedian

POOL = Space.from_texts(["which=int(0,10000)"])


def spec_of(stop: str, trials: int = 27, *, maximize: bool = False, **others: Any) -> SearchSpec:
    goal = objectives(maximize=["v"]) if maximize else objectives(minimize=["v"])
    return SearchSpec(
        space=others.pop("space", POOL),
        objectives=goal,
        budget=Budget(trials=trials),
        stopping=Stopping.from_text(stop),
        **others,
    )


def noise(params: Any, seed: int | None) -> list[float]:
    """A curve of 27 steps that falls to a level of its own, with noise."""
    random = Random(f"{params['which']} {seed}")
    level, pace = random.random(), random.uniform(0.1, 1)
    return [level + math.exp(-pace * t) + random.gauss(0, 0.05) for t in range(1, 28)]


def log(search: Search, trial: int, *values: float, seed: int | None = None) -> list[Decision]:
    """The decisions after the next points of a trial, at steps 1, 2, and so on."""
    first = int(search.trials[trial].tasks[seed].step or 0) + 1
    points = [Point("v", first + at, value) for at, value in enumerate(values)]
    return search.heard(trial, seed, points)


def told(decisions: list[Decision]) -> list[tuple[str, int]]:
    return [(decision.kind, decision.trial) for decision in decisions]


@examples(100)
@given(
    st.lists(st.integers(0, 12), max_size=60), st.integers(2, 5), st.booleans(), st.integers(0, 1)
)
def test_the_best_share_is_that_of_a_sorted_list(
    values: list[int], eta: int, maximize: bool, at_least: int
) -> None:
    share, known, before = BestShare(eta, maximize=maximize, at_least=at_least), [], set()
    for owner, value in enumerate(values):
        known.append((-value if maximize else value, owner))
        best = {n for _, n in sorted(known)[: max(len(known) // eta, at_least)]}
        entered = share.add(value, owner)
        new = best - before
        assert (entered and entered[0]) == (new.pop() if new else None)
        assert entered is None or entered[1] == values[entered[0]]
        assert share.cutoff() == (max(values[n] * (-1 if maximize else 1) for n in best)
                                  * (-1 if maximize else 1) if best else None)  # fmt: skip
        before = best


@examples(50)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=40))
def test_the_running_median_is_the_median(values: list[float]) -> None:
    running = RunningMedian()
    for at, value in enumerate(values):
        running.add(value)
        assert running.median() == pytest.approx(statistics.median(values[: at + 1]))


def test_hyperband_has_the_brackets_of_the_paper() -> None:
    found = [[(rung.trials, rung.step) for rung in bracket] for bracket in brackets(1, 81, 3)]
    assert found == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(27, 3), (9, 9), (3, 27), (1, 81)],
        [(9, 9), (3, 27), (1, 81)],
        [(6, 27), (2, 81)],
        [(5, 81)],
    ]


def test_asha_by_hand() -> None:
    """Nine trials, eta 3: the third at a rung lets the best of three go on."""
    search = Search(spec_of("asha:min=1,max=9,eta=3", 9))
    search.ask(9)
    assert told(log(search, 0, 0.5)) == [("pause", 0)]
    assert told(log(search, 1, 0.4)) == [("pause", 1)]
    third = log(search, 2, 0.6)
    assert told(third) == [("pause", 2), ("promote", 1)]
    assert third[1].rung == 1
    assert third[1].evidence == {"value": 0.4, "cutoff": 0.4, "trials": 3, "eta": 3}
    assert told(log(search, 3, 0.1)) == [("promote", 3)]  # better than all: it goes right on
    assert [told(log(search, n, 0.9)) for n in (4, 5)] == [
        [("pause", 4)],
        [("pause", 5)],
    ]  # of six two may go on, and two did
    assert told(log(search, 1, 0.3, 0.3)) == [("pause", 1)]
    assert told(log(search, 3, 0.1, 0.1)) == [("pause", 3)]
    assert [search.is_wanted(n) for n in range(9)] == [False] * 6 + [True] * 3


def test_a_trial_that_logs_past_its_rung_while_it_is_paused_has_arrived_at_the_next() -> None:
    search = Search(spec_of("asha:min=1,max=9,eta=2", 9))
    search.ask(3)
    assert told(log(search, 0, 0.5, 0.4, 0.3)) == [("pause", 0)]
    assert told(log(search, 1, 0.7)) == [("pause", 1), ("promote", 0), ("pause", 0)]


def test_nan_is_the_worst_and_a_failed_trial_is_not_counted() -> None:
    search = Search(spec_of("asha:min=1,max=9,eta=2", 9, maximize=True))
    search.ask(4)
    assert told(log(search, 0, math.nan)) == [("pause", 0)]
    assert search.ended(1, None, Ending("failed")) == []
    assert told(log(search, 2, -5.0)) == [("promote", 2)]


def test_with_seeds_a_rung_is_decided_by_the_mean_when_all_have_come() -> None:
    search = Search(spec_of("asha:min=1,max=9,eta=2", 3, seeds=(0, 1)))
    assert [(p.trial, p.seed) for p in search.ask(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first = log(search, 0, 0.0, seed=0)
    assert [(d.kind, d.trial, d.seed) for d in first] == [("pause", 0, 0)]
    assert told(log(search, 0, 0.8, seed=1)) == [("pause", 0)]
    assert told(log(search, 1, 0.3, seed=1)) == [("pause", 1)]
    last = log(search, 1, 0.3, seed=0)
    assert [(d.kind, d.trial, d.seed) for d in last] == [("promote", 1, None)]
    assert last[0].evidence["value"] == 0.3


def test_a_trial_that_logs_beyond_the_last_step_is_stopped() -> None:
    search = Search(spec_of("asha-stop:min=1,max=3", 3))
    search.ask(1)
    assert log(search, 0, 1.0, 1.0, 1.0) == []
    assert told(log(search, 0, 1.0)) == [("stop", 0)]


def test_hyperband_waits_for_all_and_not_for_the_failed() -> None:
    search = Search(spec_of("hyperband:min=1,max=3,eta=3", 7))
    search.ask(7)  # 3 trials with rungs at 1 and 3, 2 that run to 3, then the next round
    assert told(log(search, 0, 0.5)) == [("pause", 0)]
    assert log(search, 3, 0.1) == []
    assert told(log(search, 1, 0.4)) == [("pause", 1)]
    # A third of two is none, but a bracket without anybody at its end would have been in vain.
    assert told(search.ended(2, None, Ending("failed"))) == [("promote", 1)]
    assert told(log(search, 5, 0.2)) == [("pause", 5)]
    # The budget has room for two trials in the last bracket.
    assert told(log(search, 6, 0.1)) == [("promote", 6)]
    search = Search(spec_of("hyperband:min=1,max=3,eta=3", 4))
    search.ask(4)
    for number in (0, 1):
        log(search, number, 0.5 - number / 10)
    assert told(log(search, 2, 0.9)) == [("pause", 2), ("promote", 1)]


def test_a_trial_that_finished_although_it_was_to_pause_stays_done() -> None:
    search = Search(spec_of("asha:min=1,max=9", 9))
    search.ask(3)
    assert told(log(search, 0, 0.1)) == [("pause", 0)]
    assert search.ended(0, None, Ending("done", {"v": 0.05})) == []
    log(search, 1, 0.5)
    assert told(log(search, 2, 0.6)) == [("pause", 2), ("promote", 0)]
    assert search.trials[0].state == "done"
    assert (search.best()[0].trial, search.best()[0].state) == (0, "done")


def test_no_rung_waits_for_trials_that_ended_although_they_were_to_pause() -> None:
    search = Search(spec_of("hyperband:min=1,max=9,eta=3", 9))
    search.ask(9)
    for number in range(8):
        log(search, number, number / 10)
    search.ended(0, None, Ending("done", {"v": 0.0}))
    search.ended(1, None, Ending("failed"))
    last = [("pause", 8), ("promote", 0), ("promote", 1), ("promote", 2)]
    assert told(log(search, 8, 0.9)) == last
    assert told(log(search, 2, 0.2, 0.2)) == [("promote", 2)]
    assert [trial.state for trial in search.trials[:3]] == ["done", "failed", "running"]


def test_a_larger_budget_changes_no_bracket_that_has_begun() -> None:
    small, large = (spec_of("hyperband:min=1,max=3,eta=3", trials) for trials in (2, 9))
    search = Search(small)
    records: list[Any] = list(search.ask(2))
    for number, value in enumerate((0.5, 0.4)):
        records.append(Heard(number, None, (Point("v", 1, value),)))
        search.heard(number, None, records[-1].points)
    again = Search.replay(large, records)
    assert [t.state for t in again.trials] == [t.state for t in search.trials]
    assert [t.state for t in again.trials] == ["waiting", "running"]


def test_a_seed_beyond_the_last_step_ends_no_other_seed() -> None:
    search = Search(spec_of("asha-stop:min=1,max=3", 3, seeds=(0, 1)))
    search.ask(2)
    [own] = log(search, 0, 1.0, 1.0, 1.0, 1.0, seed=0)
    assert (own.kind, own.trial, own.seed, own.rung) == ("stop", 0, 0, 3)
    assert log(search, 0, 1.0, seed=0) == []
    search.ended(0, 0, Ending("stopped"))
    assert log(search, 0, 2.0, 2.0, seed=1) == []
    assert search.is_wanted(0)
    [whole] = search.ended(0, 1, Ending("done", {"v": 2.0}))
    assert (whole.kind, whole.seed, search.trials[0].state) == ("stop", None, "stopped")
    assert search.best()[0].values == (1.5,)


def test_the_median_is_asked_seldom_of_a_task_that_counts_its_steps_in_millions() -> None:
    search = Search(spec_of("median", 3))
    search.ask(1)
    search.heard(0, None, [Point("v", 1e8, 1.0)])
    assert len(search.trials[0].tasks[None].reports) == 27
    assert Stopping.from_text("median:min=3,max=25").rungs() == (3, 6, 12, 24)
    assert Stopping.from_text("median:min=3,every=2,max=9").rungs() == (3, 5, 7, 9)


def test_tasks_are_told_of_the_rungs_of_hyperband() -> None:
    steps = {rung.step for bracket in brackets(1, 100, 3) for rung in bracket}
    assert Stopping.from_text("hyperband:max=100").rungs() == tuple(sorted(steps))


def test_the_median_rule_by_hand() -> None:
    """Golovin et al.: the best so far against the median of the running averages."""
    search = Search(spec_of("median:min=2,every=2,startup=3", 9))
    search.ask(6)
    for number, values in enumerate([(4.0, 2.0), (6.0, 4.0), (9.0, 9.0)]):
        assert log(search, number, *values) == []
        search.ended(number, None, Ending("done", {"v": values[-1]}))
    assert log(search, 3, 9.0, 5.0) == []  # not strictly worse than the median of 3, 5 and 9
    decisions = log(search, 4, 5.5, 8.0)
    assert told(decisions) == [("stop", 4)]
    assert decisions[0].evidence == {"best": 5.5, "median": 5.0, "trials": 3}
    assert search.best(1)[0].trial == 0


class SlowAsha:
    """Algorithm 2 of the paper, with the list of a rung sorted each time it is asked."""

    def __init__(self, eta: int) -> None:
        self.eta, self.rungs, self.promoted = eta, defaultdict(dict), defaultdict(set)

    def report(self, rung: int, trial: int, value: float) -> None:
        self.rungs[rung][trial] = value

    def promotable(self, top: int) -> tuple[int, int] | None:
        for rung in reversed(range(top)):
            here = self.rungs[rung]
            best = sorted(here, key=lambda n: (here[n], n))[: len(here) // self.eta]
            for trial in best:
                if trial not in self.promoted[rung]:
                    self.promoted[rung].add(trial)
                    return rung, trial
        return None


@examples(25)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(2, 4))
def test_asha_promotes_whom_algorithm_2_promotes(salt: int, workers: int, eta: int) -> None:
    def curve(params: Any, seed: int | None) -> list[float]:
        return [float(round(v * 5)) for v in noise({"which": params["which"] + salt}, seed)]

    spec = spec_of(f"asha:min=1,max=27,eta={eta}")
    result = simulate(spec, curve, workers=workers)
    slow, rung_of, expected = SlowAsha(eta), defaultdict(int), []
    for record in result.records:
        if isinstance(record, Heard):
            trial, step = record.trial, record.points[0].step
            if step == eta ** rung_of[trial] and step < 27:
                slow.report(rung_of[trial], trial, record.points[0].value)
                rung_of[trial] += 1
                if (found := slow.promotable(9)) is not None:
                    expected.append((found[1], float(eta ** found[0])))
    promoted = [
        (r.trial, r.rung) for r in result.records if isinstance(r, Decision) and r.kind == "promote"
    ]
    assert promoted == expected


@pytest.mark.parametrize("workers", [1, 5])
def test_asha_stops_whom_optuna_stops(workers: int) -> None:
    """The same reports in the same order: decision for decision the same."""
    optuna = pytest.importorskip("optuna")
    count = 0
    for salt in range(4):
        spec = spec_of("asha-stop:min=1,max=27,eta=3", seed=salt)
        result = simulate(spec, noise, workers=workers)
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
            study = optuna.create_study(pruner=pruner)
        finally:
            optuna.logging.set_verbosity(before)
        theirs: dict[int, Any] = {}
        stopped = {
            (r.trial, r.rung)
            for r in result.records
            if isinstance(r, Decision) and r.kind == "stop"
        }
        for record in result.records:
            if isinstance(record, Proposal):
                theirs[record.trial] = study.ask()
            if isinstance(record, Heard) and record.points[0].step in (1, 3, 9):
                point = record.points[0]
                theirs[record.trial].report(point.value, int(point.step))
                pruned = theirs[record.trial].should_prune()
                assert pruned == ((record.trial, point.step) in stopped)
                count += pruned
            if isinstance(record, Ended) and record.ending.state == "done":
                study.tell(theirs[record.trial], record.ending.values["v"])
    assert count > 20


@pytest.mark.thorough
@pytest.mark.ray
def test_asha_stops_about_whom_ray_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's cutoff is a percentile between two values: a trial may differ here and there."""
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # importing Ray sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = pytest.importorskip("ray.tune.schedulers.async_hyperband")
    same = total = 0
    for salt in range(20):
        spec = spec_of("asha-stop:min=1,max=27,eta=3", 81, maximize=True, seed=salt)
        result = simulate(spec, lambda p, s: [-v for v in noise(p, s)], workers=4)
        stopped = {
            (r.trial, r.rung)
            for r in result.records
            if isinstance(r, Decision) and r.kind == "stop"
        }
        bracket = scheduler._Bracket(1, 27, 3, 0)
        for record in result.records:
            if isinstance(record, Heard) and record.points[0].step in (1, 3, 9):
                step, value = record.points[0].step, record.points[0].value
                theirs = bracket.on_result(_Named(record.trial), step, value) == "STOP"
                same += theirs == ((record.trial, step) in stopped)
                total += 1
    assert same / total > 0.95


class _Named:
    def __init__(self, number: int) -> None:
        self.trial_id = str(number)
