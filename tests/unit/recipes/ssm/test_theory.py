"""The closed forms against direct sampling, and in the corners where arithmetic could fail."""

from __future__ import annotations

import random

import numpy as np
import pytest

from muster_recipes.ssm.problem import Problem
from muster_recipes.ssm.theory import acceptance_rate, conditional_mean, prior_mean


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
