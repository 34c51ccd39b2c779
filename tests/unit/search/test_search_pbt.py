"""Population-based training: against a slow reference, by hand, and on the example of its paper."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import UsageError
from muster.search.records import Decision, Ended, Ending, Heard, Point, Proposal, Record
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, Constraint, SearchSpec, Stopping, objectives
from muster.search.stopping.pbt import explored
from muster.search.trials import random_for

SPACE = Space.from_texts(
    ["lr=log(1e-5,1e-1)", "width=int(8,64,step=8)", "opt=choice(adam,sgd)",
     "momentum=uniform(0,0.99,step=0.01) if opt=sgd"]
)  # fmt: skip


def spec_of(
    stop: str = "pbt:min=2,max=9", trials: int | None = 10, *, maximize: bool = False, **others: Any
) -> SearchSpec:
    return SearchSpec(
        space=others.pop("space", SPACE),
        objectives=objectives(maximize=["v"]) if maximize else objectives(minimize=["v"]),
        seed=3,
        budget=Budget(trials=trials, **others.pop("limits", {})),
        stopping=Stopping.from_text(stop),
        **others,
    )


class Members:
    """A farm whose tasks rest, fail and finish in an order drawn at random."""

    def __init__(self, spec: SearchSpec, order: Random, table: Random) -> None:
        self.search, self.order = Search(spec), order
        self.salt = table.random()
        self.running: dict[int, Proposal] = {}
        self.told: list[Decision] = []
        self.records: list[Record] = []

    def value(self, trial: int, step: int) -> float:
        """That of a trial at a step, whenever it comes there; some are no numbers or alike."""
        random = Random(f"{self.salt} {trial} {step}")
        return math.nan if random.random() < 0.1 else round(random.random(), 1)

    def fails(self, trial: int, step: int) -> bool:
        return Random(f"{self.salt} {trial} {step} fails").random() < 0.07

    def run(self, kills: float = 0.0) -> None:
        while True:
            self.take(self.search.ask(3))
            if not self.running:
                return
            trial = self.order.choice(sorted(self.running))
            proposal = self.running.pop(trial)
            self.step(trial, int(self.search.trials[trial].step or proposal.step or 0) + 1)
            if self.order.random() < kills:
                self.search = Search.replay(self.search.spec, self.records)
                waits = [p for p in self.records if isinstance(p, Proposal)]
                self.running = {
                    p.trial: p for p in waits if self.search.trials[p.trial].state == "running"
                }

    def take(self, proposals: list[Proposal]) -> None:
        self.records += proposals
        self.running |= {proposal.trial: proposal for proposal in proposals}

    def step(self, trial: int, step: int) -> None:
        """One step, at the end of which it goes on, rests, has failed or is done."""
        if self.fails(trial, step):
            return self.end(trial, Ending("failed"))
        points = (Point("v", step, self.value(trial, step)),)
        self.records.append(Heard(trial, None, points))
        if self.obey(self.search.heard(trial, None, points)):
            return self.end(trial, Ending("paused"))
        if step == 9:
            return self.end(trial, Ending("done", {"v": self.value(trial, 9)}))
        self.running[trial] = next(
            p for p in self.records if isinstance(p, Proposal) and p.trial == trial
        )
        return None

    def end(self, trial: int, ending: Ending) -> None:
        self.records.append(Ended(trial, None, ending))
        self.obey(self.search.ended(trial, None, ending))

    def obey(self, decisions: list[Decision]) -> bool:
        """Whether the trial that logged is to rest."""
        self.told += [decision for decision in decisions if decision.kind != "pause"]
        self.records += decisions
        for decision in decisions:
            if decision.kind == "promote":
                self.running[decision.trial] = next(
                    p for p in self.records
                    if isinstance(p, Proposal) and p.trial == decision.trial
                )  # fmt: skip
        return any(decision.kind == "pause" for decision in decisions)


def reference(members: Members, spec: SearchSpec, trials: int) -> list[tuple[Any, ...]]:
    """What is decided, generation by generation, from the table of values alone."""
    alive = dict.fromkeys(range(trials), 0)  # and the step at which each began
    params = {n: dict(members.search.trials[n].params) for n in range(trials)}
    story: list[tuple[Any, ...]] = []
    count, marks = trials, [2, 4, 6, 8]
    for at, mark in enumerate(marks):
        alive = {
            n: start for n, start in alive.items()
            if not any(members.fails(n, step) for step in range(start + 1, mark + 1))
        }  # fmt: skip
        worst = math.inf
        cost = {
            n: -members.value(n, mark) if spec.objectives[0].maximize else members.value(n, mark)
            for n in alive
        }
        ranked = sorted(alive, key=lambda n: (worst if math.isnan(cost[n]) else cost[n], n))
        share = min(math.ceil(len(ranked) / 5), len(ranked) // 2)
        following = dict.fromkeys(ranked, mark)
        for place, n in enumerate(ranked):
            draws = random_for(spec.seed, "pbt", n, at)
            if place < len(ranked) - share:
                story.append(("promote", n, mark))
                continue
            parent = ranked[draws.randrange(share)]
            if math.isnan(cost[parent]):
                story.append(("promote", n, mark))
                continue
            params[count] = explored(spec.space, params[parent], draws)
            story.append(("replace", n, mark, parent, count, params[count]))
            del following[n]
            following[count] = mark
            count += 1
        alive = following
    return story


def told(decision: Decision) -> tuple[Any, ...]:
    if decision.kind == "promote":
        return decision.kind, decision.trial, decision.rung
    return (decision.kind, decision.trial, decision.rung, decision.parent, decision.heir,
            dict(decision.params or {}))  # fmt: skip


@examples(60)
@given(
    salt=st.integers(0, 10**6), order=st.integers(0, 10**6),
    maximize=st.booleans(), trials=st.integers(2, 12), kills=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_any_order_and_any_kills_decide_as_the_reference(
    salt: int, order: int, maximize: bool, trials: int, kills: float
) -> None:
    spec = spec_of(trials=trials, maximize=maximize)
    members = Members(spec, Random(order), Random(salt))
    members.run(kills)
    assert [told(decision) for decision in members.told] == reference(members, spec, trials)


def test_a_population_by_hand() -> None:
    """Five rest at step 2: the worst gives its place to one that goes on from the best."""
    search = Search(spec_of(trials=5, maximize=True))
    search.ask(5)
    for trial, value in enumerate([0.3, 0.9, 0.1, 0.5, 0.4]):
        [pause] = search.heard(trial, None, [Point("v", 2, value)])
        assert (pause.kind, pause.trial, pause.rung) == ("pause", trial, 2)
        if trial < 4:
            assert search.ended(trial, None, Ending("paused")) == []
            assert search.ask(1) == []
    decisions = search.ended(4, None, Ending("paused"))
    assert [(d.kind, d.trial) for d in decisions] == [
        ("promote", 1), ("promote", 3), ("promote", 4), ("promote", 0), ("replace", 2),
    ]  # fmt: skip
    replaced = decisions[-1]
    assert (replaced.parent, replaced.heir) == (1, 5)
    assert replaced.evidence == {"value": 0.1, "trials": 5, "parent_value": 0.9}
    [heir] = search.ask(3)
    assert (heir.trial, heir.by, heir.parent, heir.step) == (5, "pbt", 1, 2)
    assert heir.params == replaced.params
    before, after = search.trials[1].params["lr"], heir.params["lr"]
    assert min(abs(after / before - factor) for factor in (0.8, 1.2)) < 1e-9
    assert search.heard(5, None, [Point("v", 3, 0.9)]) == []
    assert search.heard(5, None, [Point("v", 4, 0.9)])[0].rung == 4
    assert search.trials[2].state == "stopped"


@examples(200)
@given(st.integers(0, 10**6))
def test_a_changed_setting_is_in_the_space_and_is_another(salt: int) -> None:
    random = Random(salt)
    params = SPACE.draw(random)
    for _ in range(8):
        changed = explored(SPACE, params, random)
        assert SPACE.check(changed) == changed
        at_bound = params["lr"] in (1e-5, 1e-1) or changed["lr"] in (1e-5, 1e-1)
        assert at_bound or abs(abs(changed["lr"] / params["lr"] - 1) - 0.2) < 1e-9
        assert changed["width"] != params["width"] or params["width"] in (8, 64)
        params = changed


def test_more_trials_later_are_another_population() -> None:
    members = Members(spec_of(trials=4), Random(0), Random(1))
    members.run()
    before = len(members.told)
    members.search = Search.replay(spec_of(trials=7), members.records)
    members.run()
    assert {t.number for t in members.search.trials if t.by == "random"} >= {0, 1, 2, 3}
    later = members.told[before:]
    firsts = [d.trial for d in later if d.rung == 2]
    assert len(firsts) <= 3 and min(firsts) > max(d.trial for d in members.told[:before])


@pytest.mark.parametrize(
    ("stop", "others", "why"),
    [
        ("pbt:max=9", {"trials": None}, "size of its population"),
        ("pbt:max=9", {"seeds": (0, 1)}, "--seeds cannot be combined"),
        ("pbt:max=9,quantile=0.6", {}, "at most 0.5"),
        ("pbt:min=3", {}, "needs the last step"),
        ("pbt:max=9", {"limits": {"seconds": 60}}, "cannot be combined with --search-time"),
        ("pbt:max=9", {"limits": {"gpu_hours": 1}}, "cannot be combined with --search-time"),
        ("pbt:max=9", {"limits": {"cost": 1}}, "cannot be combined with --search-time"),
        ("pbt:max=9", {"constraints": (Constraint("ms", "<=", 20),)}, "--constraint cannot be"),
    ],
)
def test_what_is_no_population(stop: str, others: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        spec_of(stop, **others)


def climb(stop: str, steps: int = 200) -> float:
    """The example of the paper (its figure 2): quality is 1.2 - a² - b², from a = b = 0.9, and the
    setting says which of the two is made smaller. Returns the best quality at the end."""
    search = Search(spec_of(
        stop, 2, maximize=True, space=Space.from_texts(["moved=choice(a,b)"])
    ))  # fmt: skip
    places: dict[int, dict[str, float]] = {}
    running: list[int] = []
    while True:
        for proposal in search.ask(99):
            start = {"a": 0.9, "b": 0.9} if proposal.parent is None else places[proposal.parent]
            places[proposal.trial] = dict(start)
            running.append(proposal.trial)
        if not running:
            return search.best()[0].values[0]
        trial = running.pop(0)
        found = search.trials[trial]
        step = int(found.step or found.start or 0) + 1
        places[trial][found.params["moved"]] *= 0.98
        value = 1.2 - sum(place**2 for place in places[trial].values())
        decisions = search.heard(trial, None, [Point("v", step, value)])
        if any(decision.kind == "pause" for decision in decisions):
            decisions = search.ended(trial, None, Ending("paused"))
            running += [d.trial for d in decisions if d.kind == "promote"]
        elif step == steps:
            search.ended(trial, None, Ending("done", {"v": value}))
        else:
            running.append(trial)


def test_it_beats_the_grid_where_no_constant_setting_is_good() -> None:
    assert climb("none") < 0.4
    assert climb("pbt:min=5,max=200") > 1.1
