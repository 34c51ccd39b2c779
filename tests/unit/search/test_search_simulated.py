"""Whole searches on learning curves: what they find, what they cost, beside the peers' own code."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.simulated_search import Simulated, simulate

from muster.search.space import Space
from muster.search.spec import Budget, SearchSpec, Stopping, objectives

GRID = json.loads((Path(__file__).parents[2] / "fixtures" / "digits_grid.json").read_text())
NAMES = ("lr", "momentum", "width", "weight_decay")
STEPS = 27


def on_digits(stop: str, seed: int, workers: int = 4) -> Simulated:
    curves = {
        tuple(setting[name] for name in NAMES): [count / GRID["images"] for count in right]
        for setting, right in zip(GRID["settings"], GRID["right"], strict=True)
    }
    choices = {name: sorted({s[name] for s in GRID["settings"]}) for name in NAMES}
    spec = SearchSpec(
        space=Space.from_values({name: Space.choice(*choices[name]) for name in NAMES}),
        objectives=objectives(maximize=["accuracy"]),
        seed=seed,
        stopping=Stopping.from_text(stop),
    )
    return simulate(spec, lambda p, _: curves[tuple(p[n] for n in NAMES)], workers=workers)


def test_asha_on_digits_is_as_good_as_the_grid_for_a_quarter_of_its_epochs() -> None:
    best = max(right[-1] for right in GRID["right"]) / GRID["images"]
    one_standard_error = math.sqrt(best * (1 - best) / GRID["images"])
    for seed in range(20):
        result = on_digits("asha:min=1,max=27,eta=3", seed)
        assert len(result.search.trials) == len(GRID["settings"]) == 81
        assert result.steps <= 81 * STEPS / 4
        found = result.search.best(1)[0]
        assert found.state == "done"
        assert found.values[0] >= best - one_standard_error


def pool(salt: int, size: int = 27) -> list[list[float]]:
    """Curves that fall to levels of their own at paces of their own, with noise."""
    random = Random(salt)
    curves = []
    for _ in range(size):
        level, pace = random.random(), random.uniform(0.15, 0.6)
        curves.append(
            [level + math.exp(-pace * t) + random.gauss(0, 0.03) for t in range(1, STEPS + 1)]
        )
    return curves


def finds_best(stop: str, salt: int, size: int = 27) -> tuple[bool, int]:
    """Whether the best of a pool was found, and after how many steps."""
    curves = pool(salt, size)
    spec = SearchSpec(
        space=Space.from_values({"which": Space.int(0, len(curves) - 1)}),
        objectives=objectives(minimize=["v"]),
        seed=salt,
        budget=Budget(trials=len(curves)),
        stopping=Stopping.from_text(stop),
    )
    result = simulate(spec, lambda params, _: curves[params["which"]])
    last = [curve[-1] for curve in curves]
    best = result.search.best(1)[0].params["which"] == last.index(min(last))
    return best, result.steps


def peer_finds_best(pruner: Any, salt: int, size: int = 27) -> tuple[bool, int]:
    """The same pool, gone through at random by Optuna's own loop."""
    import optuna

    curves, steps = pool(salt, size), 0
    order = Random(f"order {salt}").sample(range(len(curves)), len(curves))
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        # Optuna assigns brackets by a hash of this name, which is drawn anew where none is given.
        study = optuna.create_study(study_name=f"study {salt}", pruner=pruner)
        for which in order:
            trial = study.ask({"which": optuna.distributions.IntDistribution(which, which)})
            state = optuna.trial.TrialState.COMPLETE
            for step, value in enumerate(curves[which], 1):
                trial.report(value, step)
                steps += 1
                if trial.should_prune():
                    state = optuna.trial.TrialState.PRUNED
                    break
            study.tell(trial, curves[which][-1] if state.name == "COMPLETE" else None, state)
        found = study.best_trial.value
    finally:
        optuna.logging.set_verbosity(before)
    return found == min(curve[-1] for curve in curves), steps


def margin(first: float, second: float, n_first: int, n_second: int) -> float:
    """Three standard errors of the difference of two shares."""
    spread = first * (1 - first) / n_first + second * (1 - second) / n_second
    return 3 * math.sqrt(spread) + 1e-9


SHA = "SuccessiveHalvingPruner"
_ETA = {"min_resource": 1, "reduction_factor": 3}
PEERS = {
    SHA: _ETA,
    "HyperbandPruner": {**_ETA, "max_resource": 27},
    "MedianPruner": {"n_startup_trials": 5},
}


@cache
def share_of_peer(name: str, size: int) -> float:
    """In how many of 50 searches it finds the best: once for all that are compared with it."""
    optuna = pytest.importorskip("optuna")
    found = [
        peer_finds_best(getattr(optuna.pruners, name)(**PEERS[name]), salt, size)[0]
        for salt in range(50)
    ]
    return sum(found) / 50


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ours", "peer", "size"),
    [
        ("asha:min=1,max=27,eta=3", SHA, 27),
        ("asha-stop:min=1,max=27,eta=3", SHA, 27),
        # 46 trials are one whole round of brackets.
        ("hyperband:min=1,max=27,eta=3", "HyperbandPruner", 46),
        ("median:min=1,startup=5", "MedianPruner", 27),
    ],
)
def test_a_thousand_searches_find_the_best_as_often_as_the_peers(
    ours: str, peer: str, size: int
) -> None:
    """250 of ours with each rule, 50 of theirs, on curves of the same kind."""
    peer_share = share_of_peer(peer, size)
    own = [finds_best(ours, salt, size)[0] for salt in range(250)]
    own_share = sum(own) / len(own)
    assert own_share >= peer_share - margin(own_share, peer_share, len(own), 50)


def test_a_rule_finds_the_best_far_more_often_than_chance() -> None:
    found = [finds_best("asha:min=1,max=27,eta=3", salt) for salt in range(40)]
    assert sum(best for best, _ in found) >= 14  # chance would find one or two of forty
    assert sum(steps for _, steps in found) < len(found) * 27 * STEPS / 5
