"""The numbers of the specification (independent runs of the same mathematics)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.ssm.problem import Problem
from muster_recipes.ssm.theory import (
    acceptance_rate,
    asymptote,
    conditional_mean,
    mean_power_sum,
    prior_mean,
)


def problem(*w: float) -> Problem:
    return Problem((0.5,), (tuple(w),))


def test_moments_of_a_standard_normal() -> None:
    assert [mean_power_sum(p, 1) for p in range(1, 9)] == [0, 1, 0, 3, 0, 15, 0, 105]
    assert mean_power_sum(2, 49) == 1.0
    assert mean_power_sum(4, 150) == pytest.approx(3 / 150)


def test_prior_mean_is_exact() -> None:
    assert prior_mean(problem(1, 0, 0, 0), 150) == pytest.approx(1.8440, abs=5e-5)


@pytest.mark.parametrize(
    ("w", "value"),
    [
        ((1, 0, 0, 0), 0.59116),
        ((0.01, 0.01, 0.01, 1), 6.9958),
        ((0, 0, 0, 1), 3.66245),
        ((1, 1, 1, 1), 0.94220),
    ],
)
def test_conditional_mean_at_width_150(w: tuple[float, ...], value: float) -> None:
    assert conditional_mean(problem(*w), 150) == pytest.approx(value, rel=2e-5)


@pytest.mark.parametrize(
    ("w", "a", "b"), [((1, 0, 0, 0), 0.58203, 1.25), ((1, 1, 1, 1), 0.89844, 6.508)]
)
def test_asymptote(w: tuple[float, ...], a: float, b: float) -> None:
    found = asymptote(problem(*w))
    assert found is not None
    assert found.a == pytest.approx(a, abs=1e-5)
    assert found.b == pytest.approx(b, abs=1e-3)


def test_the_asymptote_is_absent_where_it_is_undefined() -> None:
    assert asymptote(problem(0, 0, 0, 1)) is None
    assert asymptote(Problem((0.5,), ((1.0, 0.0), (0.0, 1.0)))) is None


@given(st.floats(0.3, 0.7), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_the_asymptote_is_the_limit_of_the_theory(alpha: float, w: list[float]) -> None:
    one = Problem((alpha,), (tuple(w),))
    limit = asymptote(one)
    assert limit is not None
    widths = (1000, 3000, 30_000)
    errors = [abs(conditional_mean(one, d) - limit.at(d)) * d for d in widths]
    # The remainder is of order 1/d²; at one of the smaller widths its terms may happen to cancel.
    assert errors[2] < max(errors[:2]) / 5 + 1e-6


@given(st.integers(2, 300), st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_conditioning_leaves_the_constrained_direction_without_error(
    dim: int, w: list[float]
) -> None:
    """Adding a sequence that is already there changes nothing."""
    if max(map(abs, w)) < 0.1:
        return
    once = conditional_mean(Problem((0.5,), (tuple(w),)), dim)
    twice = conditional_mean(Problem((0.5,), (tuple(w), tuple(w))), dim)
    assert twice == pytest.approx(once, rel=1e-6)


def test_the_predicted_acceptance_is_near_the_counted_one() -> None:
    """2.229e6 and 2.453e6 of 1e9 were accepted at d = 150, eps = 1e-5."""
    assert acceptance_rate(problem(1, 0, 0, 0), 150, 1e-5) == pytest.approx(2.229e-3, rel=0.01)
    assert acceptance_rate(problem(1, 1, 1, 1), 150, 1e-5) == pytest.approx(2.453e-3, rel=0.01)
    assert acceptance_rate(Problem((0.5,), ((1.0,), (2.0,))), 150, 1e-5) is None


def test_impulse_response() -> None:
    assert Problem((0.5, 2.0), ((0.0, 0.0, 0.0),)).h == (2.5, 4.25, 8.125)
    assert math.isclose(problem(1, 0, 0, 0).h[3], 0.5**4)
