"""Flags become tasks: each combination once, with everything that fixes its result."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster import UsageError
from muster_recipes.ssvae.config import SsvaeConfig
from muster_recipes.ssvae.plan import count, forecast, plan
from muster_recipes.ssvae.recipe import RECIPE
from muster_recipes.ssvae.tasks import ssvae_runs, supervised_runs


@examples(30)
@given(
    n_labels=st.lists(st.integers(1, 1_000), min_size=1, max_size=3, unique=True),
    alphas=st.lists(st.floats(0, 100), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=3, unique=True),
    num_seeds=st.integers(1, 3),
    offset=st.integers(0, 5),
    supervised=st.booleans(),
)
def test_every_combination_is_one_task(
    n_labels: list[int],
    alphas: list[float],
    rates: list[float],
    num_seeds: int,
    offset: int,
    supervised: bool,
) -> None:
    config = SsvaeConfig(
        n_labels=tuple(n_labels),
        alpha_values=tuple(alphas),
        corruption_rates=tuple(rates),
        num_seeds=num_seeds,
        seed_offset=offset,
        supervised=supervised,
    )
    tasks = list(plan(config))
    assert len(tasks) == count(config)
    seeds = [42 + offset + i for i in range(num_seeds)]
    expected = {
        ("ssvae", m, a, r, s) for m in n_labels for a in alphas for r in rates for s in seeds
    }
    if supervised:
        expected |= {("supervised", m, None, r, s) for m in n_labels for r in rates for s in seeds}
    names = ("method", "n_labels", "alpha", "corruption_rate", "seed")
    got = Counter(tuple(task.params[name] for name in names) for task in tasks)
    assert got == Counter(expected)
    for task in tasks:
        assert task.target == task.params["method"] in RECIPE.targets
        assert json.loads(json.dumps(task.params)) == task.params


def test_the_flags_that_shape_a_program_are_those_that_tasks_must_agree_on() -> None:
    from muster.farm.batched import batch_spec_of

    free = {"n_labels", "alpha", "corruption_rate", "seed"}
    params = next(plan(SsvaeConfig())).params
    for function, may_differ in ((ssvae_runs, free), (supervised_runs, free - {"n_labels"})):
        spec = batch_spec_of(function)
        assert spec is not None
        assert set(spec.static) == set(params) - may_differ


def test_every_flag_reaches_the_tasks() -> None:
    changed: dict[str, Any] = {
        "num_epochs": 3, "eval_frequency": 2, "batch_size": 16, "lr": 0.5, "num_style": 4,
        "num_samples": 2, "temperature": 1.5, "unlabelled": "sampled", "factor_scores": True,
        "label_protocol": "per-batch", "split_seed": 9, "ensemble_size": 5,
    }  # fmt: skip
    params = next(plan(SsvaeConfig(**changed))).params
    assert {name: params[name] for name in changed} == changed
    grid = {"n_labels", "alpha_values", "corruption_rates", "num_seeds", "seeds", "seed_offset"}
    others = {"dataset", "data_dir", "supervised"}
    names = {field.name for field in dataclasses.fields(SsvaeConfig)}
    assert names == set(changed) | grid | others


def test_the_defaults_are_the_grid_of_the_study_as_far_as_there_are_images() -> None:
    config = SsvaeConfig()
    assert config.n_labels == (100, 600, 1000)  # the digits have no 3,000
    assert config.alpha_values == (1, 10, 50, 100)
    assert config.corruption_rates == (0, 0.1, 0.2, 0.5)
    assert config.all_seeds == tuple(range(42, 52))
    assert (config.num_epochs, config.batch_size, config.lr) == (75, 128, 1e-3)
    assert SsvaeConfig(seeds=(7, 3), seed_offset=10).all_seeds == (17, 13)
    assert SsvaeConfig(dataset="DIGITS") == config


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"n_labels": (0,)}, "--n-labels 0: give different whole numbers from 1."),
        ({"n_labels": (10, 10)}, "--n-labels 10 10: give different whole numbers from 1."),
        ({"alpha_values": (-1.0,)}, "--alpha-values -1.0: give different numbers from 0."),
        ({"alpha_values": (float("nan"),)}, "--alpha-values nan: give different numbers from 0."),
        ({"corruption_rates": (20.0,)}, "--corruption-rates 20.0: give different shares from 0"),
        ({"corruption_rates": ()}, "--corruption-rates : give different shares"),
        ({"seeds": (1, 1)}, "--seeds 1 1 names a seed twice."),
        ({"num_epochs": 0}, "--num-epochs 0 is too small."),
        ({"ensemble_size": 0}, "--ensemble-size 0 is too small."),
        ({"lr": 0.0}, "--lr 0.0 must be above 0 and finite."),
        ({"temperature": 0.5}, "--temperature 0.5 has no effect with --unlabelled exact."),
        ({"seeds": (1, 2), "num_seeds": 5}, "--num-seeds 5 has no effect beside --seeds."),
        ({"seeds": (2**63,)}, f"--seeds with --seed-offset: the seed {2**63} is out of range."),
        ({"seeds": (1,), "seed_offset": 2**63}, f"the seed {2**63 + 1} is out of range."),
        ({"seed_offset": 2**63 - 51}, f"--num-seeds with --seed-offset: the seed {2**63} is out"),
        ({"split_seed": 2**63}, f"--split-seed: the seed {2**63} is out of range."),
        ({"temperature": float("inf")}, "--temperature inf must be above 0 and finite."),
    ],
)
def test_a_mistake_is_told_with_its_value(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        SsvaeConfig(**flags)
    assert text in str(caught.value)


def test_the_largest_seeds_are_seeds() -> None:
    assert SsvaeConfig(seeds=(2**63 - 1,), split_seed=2**63 - 1).all_seeds == (2**63 - 1,)
    assert SsvaeConfig(seed_offset=2**63 - 52).all_seeds[-1] == 2**63 - 1


def test_the_older_protocol_is_announced() -> None:
    assert forecast(SsvaeConfig()) == []
    (said,) = forecast(SsvaeConfig(label_protocol="per-batch"))
    assert "--label-protocol per-batch" in said and "only on average" in said
