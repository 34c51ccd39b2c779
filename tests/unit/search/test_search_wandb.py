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


def test_a_cap_that_is_a_text_is_a_number() -> None:
    sweep = {**SWEEP, "method": "grid", "run_cap": "20", "parameters": {"a": {"values": [1, 2]}}}
    assert import_sweep(sweep).spec.budget.trials == 2


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"min": 0, "max": 1, "q": 0.25}, Space.uniform(0, 1, step=0.25)),
        ({"min": 0, "max": 8, "q": 2}, Space.int(0, 8, step=2)),
        ({"min": 0.01, "max": 2, "distribution": "inv_log_uniform_values"}, Space.log(0.01, 2)),
        ({"min": 0, "max": 2, "distribution": "inv_log_uniform"}, Space.log(math.exp(-2), 1)),
    ],
)
def test_a_range_means_what_it_means_to_wandb(given: dict[str, Any], means: Any) -> None:
    found = import_sweep({**SWEEP, "parameters": {"a": given}})
    assert found.spec.space == Space.from_values({"a": means})


def test_it_is_said_that_a_trial_ends_at_the_last_rung() -> None:
    early = {"type": "hyperband", "max_iter": 27, "s": 2}
    found = import_sweep({**SWEEP, "early_terminate": early})
    assert found.spec.stopping == Stopping(rule="asha-stop", min_step=3, max_step=27)
    assert any("beyond step 27 is ended" in remark for remark in found.remarks)


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
        (
            {"parameters": {"learning rate": {"min": 1, "max": 2}}},
            "'learning rate' is not a parameter name",
        ),
        ({"parameters": {"a": {"min": 0, "max": 2, "mu": 1}}}, "a has mu, which means nothing"),
        *(
            ({"parameters": {"a": {"values": [1, 2], word: 1}}}, f"a has {word} beside values")
            for word in ("mu", "sigma", "q", "min", "max")
        ),
        ({"parameters": {"a": {"value": 1, "q": 1}}}, "a has q beside value, where it"),
        (
            {"parameters": {"a": {"values": [1, 2], "distribution": "q_normal"}}},
            "has distribution: q_normal beside values",
        ),
        ({"parameters": {"a": {"min": 0, "max": 2, "probabilities": [1]}}}, "a has probabilities"),
        ({"parameters": {"a": {"min": 0, "max": 2, "q": 1, "distribution": "uniform"}}}, "a has q"),
        ({"parameters": {"a": {"min": 0, "max": ".nan"}}}, "max of a is '.nan'"),
        ({"parameters": {"a": {"min": 0, "max": math.nan}}}, "max of a is nan, which is not a"),
        (
            {"parameters": {"a": {"min": 0.5, "max": 2, "distribution": "int_uniform"}}},
            "min of a is 0.5, which is not a whole number",
        ),
        (
            {"parameters": {"a": {"min": 0, "max": 1e5, "distribution": "log_uniform"}}},
            "more than a float holds",
        ),
        ({"parameters": {"a": {"values": "abc"}}}, "values of a is 'abc', which is not a list"),
        ({"run_cap": "many"}, "run_cap of the sweep file is 'many'"),
        ({"early_terminate": "hyperband"}, "early_terminate is 'hyperband'"),
        ({"early_terminate": {"type": "hyperband", "min_iter": 3, "eta": 3.5}}, "eta of .* is 3.5"),
        ({"early_terminate": {"type": "hyperband", "max_iter": 9, "eta": 0}}, "eta of .* is 0"),
        ({"early_terminate": {"type": "hyperband", "max_iter": 9, "s": "a"}}, "s of .* is 'a'"),
        ({"early_terminate": {"type": "median"}}, "Unknown type of early_terminate 'median'"),
    ],
)
def test_what_cannot_be_taken_over_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){message}"):
        import_sweep({**SWEEP, **change})
