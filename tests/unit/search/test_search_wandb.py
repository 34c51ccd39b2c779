"""A sweep file of W&B as a search."""

from __future__ import annotations

import math
from typing import Any

import pytest

from muster.base.errors import UsageError
from muster.search.space import Space
from muster.search.spec import Budget, Objective, Stopping
from muster.search.wandb_sweep import import_sweep

SWEEP: dict[str, Any] = {
    "program": "train.py",
    "project": "mnist",
    "method": "bayes",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "run_cap": 40,
    "parameters": {
        "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1},
        "old": {"distribution": "log_uniform", "min": -2, "max": 0},
        "dropout": {"min": 0.0, "max": 0.5},
        "layers": {"min": 1, "max": 8},
        "width": {"distribution": "q_uniform", "min": 16, "max": 256, "q": 16},
        "opt": {"values": ["adam", "sgd"]},
        "epochs": {"value": 10},
    },
    "early_terminate": {"type": "hyperband", "min_iter": 3, "eta": 2},
}


def test_a_sweep_file_is_a_search() -> None:
    found = import_sweep(SWEEP)
    assert found.spec.space == Space.from_values(
        {
            "lr": Space.log(1e-5, 0.1),
            "old": Space.log(math.exp(-2), 1.0),
            "dropout": Space.uniform(0, 0.5),
            "layers": Space.int(1, 8),
            "width": Space.int(16, 256, step=16),
            "opt": Space.choice("adam", "sgd"),
        }
    )
    assert found.spec.objectives == (Objective("val_loss", "minimize"),)
    assert found.spec.sampler == "gp"
    assert found.spec.budget == Budget(trials=40)
    assert found.spec.stopping == Stopping(rule="asha-stop", min_step=3, eta=2)
    assert found.fixed == {"epochs": 10}
    assert found.program == "train.py"
    assert found.remarks[0] == "Left out: project."


def test_a_grid_is_tried_whole() -> None:
    found = import_sweep(
        {
            "method": "grid",
            "metric": {"name": "acc", "goal": "maximize"},
            "parameters": {"a": {"values": [1, 2, 3]}, "b": {"values": [True, False]}},
        }
    )
    assert found.spec.budget.trials == 6
    assert found.spec.stopping.rule == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methd": "x"}, "Unknown key of the sweep file 'methd'.*'method'"),
        ({"method": "hyper"}, "Unknown method of the sweep file 'hyper'"),
        ({"metric": None}, "no goal"),
        ({"parameters": {}}, "has no parameters"),
        ({"parameters": {"a": {"value": 1}}}, "varies nothing"),
        ({"parameters": {"a": {"low": 1}}}, "Unknown key of parameter a 'low'"),
        ({"parameters": {"a": {"distribution": "normal", "mu": 0}}}, "has no bounds"),
        ({"parameters": {"a": {"min": 1}}}, "neither value, values, nor min and max"),
        ({"parameters": {"a": {"parameters": {"b": {"value": 1}}}}}, "parameters of its own"),
        ({"parameters": {"a": {"values": [1, 2], "probabilities": [0.1, 0.9]}}}, "probabilities"),
        ({"method": "grid"}, "method: grid needs values, but lr is log"),
        ({"early_terminate": {"type": "hyperband"}}, "neither min_iter nor max_iter"),
        ({"early_terminate": {"type": "median"}}, "Unknown type of early_terminate 'median'"),
    ],
)
def test_what_cannot_be_taken_over_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        import_sweep({**SWEEP, **change})
