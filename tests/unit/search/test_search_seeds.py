"""Tasks of one trial that end in any order, and numbers that come late: no trial waits for ever."""

from __future__ import annotations

from random import Random

import pytest

from muster.search.records import Decision, Ending, Point
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, SearchSpec, Stopping, objectives

SPACE = Space.from_texts(["x=uniform(0,1)"])
RULES = (
    "asha:min=1,max=9,eta=2", "asha:min=1,eta=2", "asha-stop:min=1,max=9,eta=2", "hyperband:max=9",
    "median:min=1,max=9,startup=1",
)  # fmt: skip
Task = tuple[int, int | None]


def searching(rule: str, seeds: tuple[int, ...] | None, trials: int = 5) -> Search:
    spec = SearchSpec(
        space=SPACE, objectives=objectives(maximize=["y"]), budget=Budget(trials=trials),
        stopping=Stopping.from_text(rule), seeds=seeds,
    )  # fmt: skip
    return Search(spec)


def test_a_seed_that_is_done_before_the_first_rung_holds_up_no_other() -> None:
    search = searching("asha:min=3,max=9,eta=2", (0, 1), trials=1)
    search.ask(2)
    assert search.heard(0, 0, [Point("y", 2, 0.5)]) == []
    assert search.ended(0, 0, Ending("done", {"y": 0.5})) == []
    pause, *_ = search.heard(0, 1, [Point("y", 3, 0.25)])
    assert (pause.kind, pause.seed) == ("pause", None)
    assert pause.evidence["value"] == 0.375
    assert search.trials[0].state == "waiting"


def test_a_late_number_of_a_task_that_is_done_changes_nothing() -> None:
    search = searching("asha:min=1,max=9,eta=2", (0, 1))
    search.ask(2)
    search.ended(0, 0, Ending("done", {"y": 0.5}))
    assert search.heard(0, 0, [Point("y", 99, 0.1)]) == []
    search.ended(0, 1, Ending("done", {"y": 0.7}))
    [best] = search.best()
    assert (best.state, best.values) == ("done", (0.6,))


@pytest.mark.parametrize("seeds", [None, (0, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_whatever_the_order_every_trial_is_decided(
    rule: str, seeds: tuple[int, ...] | None
) -> None:
    for case in range(40):
        _play(searching(rule, seeds), Random(case))


def _play(search: Search, random: Random) -> None:
    states: dict[Task, str] = {}
    told: dict[Task, str] = {}
    steps: dict[Task, int] = {}

    def obey(decisions: list[Decision]) -> None:
        for decision in decisions:
            seeds = search.spec.seeds or (None,) if decision.seed is None else (decision.seed,)
            for task in ((decision.trial, seed) for seed in seeds):
                if decision.kind == "promote":
                    if told.get(task) == "pause":
                        del told[task]
                        states[task] = "running"
                elif states.get(task) == "running" and told.get(task) != "stop":
                    told[task] = decision.kind

    for _ in range(60):
        for proposal in search.ask(1) if random.random() < 0.3 else ():
            states[proposal.trial, proposal.seed] = "running"
        if not states:
            continue
        task = random.choice(list(states))
        was = search.trials[task[0]].state
        if random.random() < 0.7:  # also one that has ended: its numbers came late
            steps[task] = steps.get(task, 0) + random.choice([1, 1, 2, 9])
            obey(search.heard(*task, [Point("y", steps[task], random.random())]))
            assert was == "running" or search.trials[task[0]].state == was
        elif states[task] == "running":
            asked = {"stop": "stopped", "pause": "paused"}.get(told.get(task, ""))
            way = random.choice(["done", asked or "done"])
            states[task] = way
            if way == "done":
                told.pop(task, None)
            values = {"y": random.random()} if way == "done" else {}
            obey(search.ended(*task, Ending(way, values)))  # type: ignore[arg-type]
    for trial in search.trials:
        tasks = [states.get((trial.number, seed), "new") for seed in trial.tasks]
        if set(tasks) == {"done"}:
            assert trial.state == "done"
        elif not {"running", "new"} & set(tasks):
            assert trial.state != "running", "it would wait for ever"
