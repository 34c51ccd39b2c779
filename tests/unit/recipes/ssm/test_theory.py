"""The closed forms against direct sampling, and in the corners where arithmetic could fail."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.plan import forecast
from muster_recipes.ssm.problem import Problem
from muster_recipes.ssm.summary import summarise
from muster_recipes.ssm.theory import acceptance_rate, asymptote, conditional_mean, prior_mean


def test_the_prior_mean_is_that_of_drawn_students() -> None:
    one = Problem((0.7, 0.4), ((1.0, 0.0, 0.0, 0.0, 0.0),))
    a = np.random.default_rng(1).normal(0.0, 6**-0.5, (400_000, 6))
    error = np.stack([(a**m).sum(1) for m in range(1, 6)], 1) - np.array(one.h)
    losses = (error**2).sum(1)
    margin = 5 * losses.std() / len(losses) ** 0.5
    assert prior_mean(one, 6) == pytest.approx(losses.mean(), abs=margin)


@pytest.mark.parametrize("dim", [150, 3000, 100_000])
def test_the_scale_of_a_sequence_does_not_count(dim: int) -> None:
    plain = conditional_mean(Problem((0.5,), ((1.0, 0, 0, 0), (0, 0, 0, 1.0))), dim)
    scaled = conditional_mean(Problem((0.5,), ((1e3, 0, 0, 0), (0, 0, 0, 1e-3))), dim)
    assert scaled == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("dim", [16, 150, 3000])
def test_as_many_sequences_as_lags_leave_no_loss(dim: int) -> None:
    for seed in range(100):
        draws = random.Random(seed)
        w = tuple(tuple(draws.gauss(0, 1) for _ in range(4)) for _ in range(6))
        assert conditional_mean(Problem((0.5,), w), dim) == pytest.approx(0.0, abs=1e-5)


def test_the_second_oracle_for_e1() -> None:
    """For w = e_1 the law of the accepted is known: a_i = α/d + g_i, g ~ N(0, (I - 11ᵀ/d)/d)."""
    dim = 150
    g = np.random.default_rng(2).normal(0.0, dim**-0.5, (40_000, dim))
    a = 0.5 / dim + g - g.mean(1, keepdims=True)
    error = np.stack([(a**m).sum(1) - 0.5**m for m in range(1, 5)], 1)
    losses = (error**2).sum(1)
    margin = 4 * losses.std() / len(losses) ** 0.5
    assert losses.mean() == pytest.approx(0.5838, abs=margin + 2e-4)
    theory = conditional_mean(Problem((0.5,), ((1.0, 0, 0, 0),)), dim)
    assert theory / losses.mean() == pytest.approx(1.013, abs=0.005)  # the stated 1.3 % too high


def test_no_rate_is_predicted_where_every_student_trains_alike() -> None:
    assert acceptance_rate(Problem((0.5,), ((0.0, 0.0, 0.0, 0.0),)), 150, 1e-5) is None


@pytest.mark.parametrize("lags", [160, 400])
def test_many_lags_have_a_prior_as_long_as_a_float_holds_it(lags: int) -> None:
    """319!! is beyond a float; of wide students the power sums at high lags are next to nothing."""

    def impulse(lags: int) -> Problem:
        return Problem((0.5,), ((1.0,) + (0.0,) * (lags - 1),))

    assert prior_mean(impulse(lags), 1000) == pytest.approx(prior_mean(impulse(40), 1000))
    assert acceptance_rate(impulse(lags), 1000, 1e-5) == pytest.approx(2.227e-3, rel=1e-3)
    narrow = SsmConfig(num_seeds=1, sequence_length=lags + 1, student_dims=(2,))
    forecast(narrow)
    for row in summarise(narrow, []):
        json.dumps(row, allow_nan=False)


def test_a_tiny_first_weight_has_no_asymptote_and_a_theory() -> None:
    assert asymptote(Problem((0.5,), ((1e-99, 1.0, 1.0, 1.0),))) is None
    tiny = Problem((0.5,), ((1e-99, 0.0, 0.0, 1.0),))
    assert conditional_mean(tiny, 150) == pytest.approx(3.66245, rel=1e-4)
    scaled = asymptote(Problem((0.5,), ((1e-90, 2e-90, 0.0, 1e-90),)))
    plain = asymptote(Problem((0.5,), ((1.0, 2.0, 0.0, 1.0),)))
    assert scaled is not None and plain is not None
    assert (scaled.a, scaled.b) == pytest.approx((plain.a, plain.b))
