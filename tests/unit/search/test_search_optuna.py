"""A search as a study of Optuna's: export, importance, and what is told to samplers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.base.errors import MissingPackageError
from muster.search.optuna_study import import_optuna, importances, to_optuna
from muster.search.records import Ending, Point
from muster.search.search import Search
from muster.search.space import Space
from muster.search.spec import Budget, Constraint, SearchSpec, Stopping, objectives

optuna = pytest.importorskip("optuna")


def search_of(**others: Any) -> Search:
    space = Space.from_texts(["lr=log(1e-4,1)", "shape=choice([1,2],[3])"])
    return Search(SearchSpec(space=space, objectives=objectives(minimize=["v"]), **others))


@pytest.mark.thorough
def test_a_study_opens_elsewhere_with_states_values_and_curves(tmp_path: Path) -> None:
    search = search_of(
        stopping=Stopping.from_text("asha-stop:max=9"), constraints=(Constraint("mem", "<=", 5),)
    )
    search.ask(4)
    search.heard(0, None, [Point("v", 1, 0.5), Point("v", 3, 0.4)])
    search.ended(0, None, Ending("done", {"v": 0.3, "mem": 7}))
    search.heard(1, None, [Point("v", 1, 0.9)])
    search.ended(2, None, Ending("failed"))
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    to_optuna(search.spec, search.trials, url, "mine")
    before = optuna.logging.get_verbosity()
    trials = optuna.load_study(study_name="mine", storage=url).trials
    assert optuna.logging.get_verbosity() == before
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert [t.number for t in trials] == [0, 1, 2, 3]
    assert trials[0].value == 0.3
    assert trials[0].intermediate_values == {1: 0.5, 3: 0.4}
    assert trials[1].intermediate_values == {1: 0.9}
    assert trials[0].params == {
        "lr": search.trials[0].params["lr"],
        "shape": str(search.trials[0].params["shape"]).replace(" ", ""),
    }
    assert trials[0].user_attrs == {"by": "random", "state": "done"}
    assert trials[0].system_attrs["constraints"] == [2.0]


@pytest.mark.thorough
def test_importance_finds_what_matters() -> None:
    space = Space.from_texts(["a=uniform(0,1)", "b=uniform(0,1)"])
    spec = SearchSpec(space=space, objectives=objectives(minimize=["v"]))
    search = Search(spec)
    assert importances(spec, []) == {}
    for proposal in search.ask(40):
        value = 10 * proposal.params["a"] + proposal.params["b"]
        search.ended(proposal.trial, None, Ending("done", {"v": value}))
    found = importances(spec, [(trial, trial.value_of("v")) for trial in search.trials])
    assert list(found) == ["a", "b"] and found["a"] > 0.8
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_sampler_does_better_than_chance(sampler: Any) -> None:
    def best(name: Any) -> float:
        space = Space.from_texts(["x=uniform(-5,5)", "y=uniform(-5,5)"])
        spec = SearchSpec(
            space=space, objectives=objectives(minimize=["v"]), sampler=name,
            budget=Budget(trials=60),
        )  # fmt: skip
        search = Search(spec)
        while asked := search.ask(1):
            x, y = asked[0].params["x"], asked[0].params["y"]
            ending = Ending("done", {"v": (x - 1) ** 2 + (y + 2) ** 2})
            search.ended(asked[0].trial, None, ending)
        return search.best()[0].values[0]

    assert best(sampler) < best("random")


@pytest.mark.parametrize("sampler", ["cmaes", "nsga2"])
def test_a_promoted_trial_is_the_samplers_own(sampler: Any) -> None:
    search = search_of(sampler=sampler, stopping=Stopping.from_text("asha:max=9,eta=2"))
    search.ask(3)
    search.heard(0, None, [Point("v", 1, 0.5)])
    search.heard(1, None, [Point("v", 1, 0.7)])
    search.ended(0, None, Ending("done", {"v": 0.4}))
    study: Any = search._sampler
    states = [trial.state.name for trial in study._study.trials]
    assert states == ["COMPLETE", "RUNNING", "RUNNING"]


def test_without_optuna_only_random_searches(tmp_path: Path) -> None:
    """In a process of its own, where importing Optuna fails."""
    (tmp_path / "optuna.py").write_text("raise ImportError('none here')\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from muster.search.search import Search\n"
        "from muster.search.space import Space\n"
        "from muster.search.spec import SearchSpec, objectives\n"
        "goal = objectives(minimize=['v'])\n"
        "space = Space.from_texts(['x=uniform(0,1)'])\n"
        "assert Search(SearchSpec(space=space, objectives=goal)).ask(1)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "Search(SearchSpec(space=space, objectives=goal, sampler='tpe'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "MissingPackageError: The sampler tpe needs the package optuna" in done.stderr
    assert "pip install 'muster-gpu[search]'" in done.stderr
    assert import_optuna("This") is optuna
    with pytest.raises(MissingPackageError, match=r"package no_such.*\n.*\[search\]"):
        import_optuna("This", "no_such")
