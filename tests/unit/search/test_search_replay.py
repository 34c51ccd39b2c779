"""A search that was rebuilt from its records goes on as the one that was not."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.search.records import (
    Decision,
    Ended,
    Ending,
    Heard,
    Point,
    Proposal,
    Record,
    Spent,
)
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, Constraint, SearchSpec, Stopping, objectives
from muster.search.trials import pareto_front

SPACE = Space.from_texts(
    ["lr=log(1e-5,1e-1)", "width=int(8,64,step=8)", "opt=choice(adam,sgd)",
     "momentum=uniform(0,0.99) if opt=sgd"]
)  # fmt: skip
RULES = ["none", "asha:max=27", "asha-stop:max=27", "hyperband:max=9", "median:startup=2"]
#: What a training logs that has diverged, or soon will have.
DIVERGED = (math.nan, math.inf, -math.inf, 1.5e308, -1.5e308, 5e-324)
SAMPLERS = [pytest.param("qmc", marks=pytest.mark.thorough), "tpe", "cmaes", "nsga2"]


class Farm:
    """Tasks that log and end in an order drawn at random; it obeys, and keeps the records."""

    def __init__(self, spec: SearchSpec, seed: int) -> None:
        self.spec, self.random, self.records = spec, Random(seed), list[Record]()
        self.open: dict[tuple[int, int | None], Proposal] = {}
        self.all: dict[tuple[int, int | None], Proposal] = {}
        self.steps: dict[tuple[int, int | None], int] = {}

    def turn(self, search: Search) -> list[Any]:
        """One thing that happens, and what the search answers."""
        if len(self.open) < 5 and (asked := search.ask(self.random.randint(1, 3))):
            for proposal in asked:
                key = proposal.trial, proposal.seed
                self.open[key] = self.all[key] = proposal
                self.steps[key] = int(proposal.step or 0)
            self.records += asked
            return list(asked)
        if not self.open:
            return []
        key = self.random.choice(sorted(self.open, key=str))
        trial, seed = key
        chance = self.random.random()
        if chance < 0.85:
            points = []
            for _ in range(self.random.randint(1, 4)):
                self.steps[key] += 1
                points.append(Point("v", self.steps[key], self.value(key)))
            self.records.append(Heard(trial, seed, tuple(points)))
            decisions = search.heard(trial, seed, points)
        else:
            state = "failed" if chance < 0.88 else "done"
            ending = Ending(state, {"v": self.value(key), "mem": self.random.random()})
            self.open.pop(key)
            self.records.append(Ended(trial, seed, ending))
            decisions = search.ended(trial, seed, ending)
        return self.obey(search, decisions)

    def obey(self, search: Search, decisions: list[Decision]) -> list[Any]:
        self.records += decisions
        for decision in decisions:
            for seed in self.spec.seeds or (None,) if decision.seed is None else (decision.seed,):
                key = decision.trial, seed
                if decision.kind == "promote" and key in self.all:
                    self.open[key] = self.all[key]
                elif decision.kind != "promote" and self.open.pop(key, None):
                    ending = Ending("paused" if decision.kind == "pause" else "stopped")
                    self.records.append(Ended(*key, ending))
                    decisions = decisions + self.obey(search, search.ended(*key, ending))
        return decisions

    def value(self, key: tuple[int, int | None]) -> float:
        if self.random.random() < 0.1:
            return self.random.choice(DIVERGED)
        lr = self.all[key].params["lr"]
        return (math.log10(lr) + 3) ** 2 + self.random.random() + 5 / (self.steps[key] or 1)


def spec_of(rule: str, sampler: Any = "random", *, seeds: Any = None) -> SearchSpec:
    return SearchSpec(
        space=SPACE,
        objectives=objectives(minimize=["v"]),
        sampler=sampler,
        seed=5,
        budget=Budget(trials=14),
        seeds=seeds,
        tries=({"lr": 1e-3}, {"opt": "sgd", "width": 16}),
        constraints=() if rule.startswith("pbt") else (Constraint.from_text("mem<=0.9"),),
        stopping=Stopping.from_text(rule),
    )


def check(spec: SearchSpec, seed: int, turns: int = 120, restarts: float = 0.1) -> None:
    """One search that lives, and one that is rebuilt every now and then, say the same."""
    living, other = Farm(spec, seed), Farm(spec, seed)
    search, again = Search(spec), Search(spec)
    kills = Random(seed)
    for _ in range(turns):
        answers = living.turn(search)
        assert repr(answers) == repr(other.turn(again))  # a NaN equals itself there
        if kills.random() < restarts:
            again = Search.replay(spec, other.records)
        if not answers and not living.open:
            break
    assert repr(living.records) == repr(other.records)
    assert repr(again.best(99)) == repr(search.best(99))


@pytest.mark.parametrize("rule", [*RULES, "pbt:min=2,max=9"])
@examples(6)
@given(seed=st.integers(0, 10**6), seeds=st.sampled_from([None, (0, 1)]))
def test_a_rebuilt_search_decides_as_before(rule: str, seed: int, seeds: Any) -> None:
    check(spec_of(rule, seeds=None if rule.startswith("pbt") else seeds), seed)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_rebuilt_sampler_asks_as_before(sampler: str) -> None:
    pytest.importorskip("optuna")
    check(spec_of("asha:max=27", sampler), 1, turns=80)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsga2"])
def test_rebuilt_after_every_report(sampler: str, rule: str) -> None:
    pytest.importorskip("optuna")
    check(spec_of(rule, sampler), 3, turns=60, restarts=1.0)


@pytest.mark.thorough
def test_a_rebuilt_gaussian_process_asks_as_before() -> None:
    pytest.importorskip("optuna")
    check(spec_of("none", "gp"), 1, turns=14, restarts=0.3)


def test_more_budget_continues() -> None:
    small = spec_of("none")
    farm, search = Farm(small, 2), Search(small)
    while farm.open or not search.is_exhausted():
        farm.turn(search)
    assert search.is_exhausted() and search.ask(1) == []
    more = SearchSpec.from_json({**small.to_json(), "budget": {"trials": 16}})
    again = Search.replay(more, farm.records)
    assert [proposal.trial for proposal in again.ask(9)] == [14, 15]


def test_a_tuple_among_the_choices_comes_back_from_the_ledger_as_a_list() -> None:
    space = Space.from_values({"kernel": Space.choice((3, 3), (5, 5))})
    spec = SearchSpec(space=space, objectives=objectives(minimize=["v"]))
    [first] = Search(spec).ask(1)
    recorded = Proposal(first.trial, first.seed, {"kernel": list(first.params["kernel"])}, first.by)
    [second] = Search.replay(spec, [recorded]).ask(9)
    assert (second.trial, list(second.params["kernel"])) != (0, recorded.params["kernel"])


def test_time_money_and_gpu_hours_end_the_asking() -> None:
    spec = SearchSpec(
        space=SPACE,
        objectives=objectives(minimize=["v"]),
        budget=Budget(seconds=60, gpu_hours=2, cost=5),
    )
    search = Search(spec)
    assert len(search.ask(3, Spent(seconds=59, gpu_hours=1.9, cost=4.9))) == 3
    for spent in (Spent(seconds=60), Spent(gpu_hours=2), Spent(cost=5.5)):
        assert search.ask(1, spent) == []
        assert search.is_exhausted(spent)
    assert not search.is_exhausted()


def test_a_setting_is_asked_once_until_there_is_none_left() -> None:
    space = Space.from_texts(["a=int(1,4)", "b=choice(x,y)"])
    spec = SearchSpec(space=space, objectives=objectives(minimize=["v"]), tries=({"a": 2},))
    search = Search(spec)
    asked = search.ask(99)
    assert len({str(p.params) for p in asked}) == len(asked) == 8
    assert asked[0].by == "try" and asked[0].params["a"] == 2
    assert search.is_exhausted()


def test_a_first_guess_is_a_setting_like_any_other() -> None:
    """A number has its type, and what is there is not tried again."""
    space = Space.from_texts(["a=uniform(0,9)"])
    spec = SearchSpec(
        space=space, objectives=objectives(minimize=["v"]), tries=({"a": 1}, {"a": 1.0}, {"a": 2})
    )  # fmt: skip
    asked = Search(spec).ask(3)
    assert [p.by for p in asked] == ["try", "random", "try"]
    assert [repr(asked[at].params["a"]) for at in (0, 2)] == ["1.0", "2.0"]


def test_a_finished_grid_begins_a_search() -> None:
    """Tasks that were there count among the best and are not asked again."""
    space = Space.from_texts(["a=int(1,4)"])
    spec = SearchSpec(space=space, objectives=objectives(minimize=["v"]), budget=Budget(trials=2))
    records: list[Record] = []
    for trial, a in enumerate((1, 3)):
        records.append(Proposal(trial, None, {"a": a}, "given"))
        records.append(Ended(trial, None, Ending("done", {"v": float(a)})))
    search = Search.replay(spec, records)
    assert sorted(p.params["a"] for p in search.ask(9)) == [2, 4]
    assert search.best(1)[0].params == {"a": 1}


def test_the_best_satisfy_the_constraints_and_finished() -> None:
    spec = SearchSpec(
        space=SPACE,
        objectives=objectives(minimize=["v"]),
        constraints=(Constraint.from_text("mem<=8"),),
    )
    search = Search(spec)
    search.ask(5)
    for trial, (state, values) in enumerate(
        [("done", (3.0, 8.0)), ("done", (1.0, 9.0)), ("failed", (0.0, 1.0)),
         ("done", (2.0, 1.0)), ("done", (math.nan, 1.0))]
    ):  # fmt: skip
        ending = Ending(state, dict(zip(("v", "mem"), values, strict=True)))
        search.ended(trial, None, ending)
    assert [standing.trial for standing in search.best(9)] == [3, 0]


def test_of_several_objectives_the_unbeaten_come_first() -> None:
    spec = SearchSpec(space=SPACE, objectives=objectives(minimize=["a"], maximize=["b"]))
    search = Search(spec)
    search.ask(4)
    for trial, (a, b) in enumerate([(1, 1), (2, 5), (3, 4), (0.5, 0.5)]):
        search.ended(trial, None, Ending("done", {"a": a, "b": b}))
    assert {standing.trial for standing in search.best(3)} == {0, 1, 3}
    assert [standing.trial for standing in pareto_front(spec, search.trials)] == [0, 1, 3]
    assert search.best(4)[3].trial == 2
