"""Intervals against published tables, independent computations and their own promise."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import UsageError
from muster.rl.statistics import interval, median_interval, student_quantile, student_within


@pytest.mark.parametrize(
    ("confidence", "degrees", "quantile"),
    [  # Abramowitz and Stegun 1964, table 26.10
        (0.9, 1, 6.314),
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 9, 2.262),
        (0.95, 10, 2.228),
        (0.95, 19, 2.093),
        (0.95, 30, 2.042),
        (0.99, 5, 4.032),
        (0.99, 60, 2.660),
        (0.95, 100_000, 1.960),
    ],
)
def test_students_quantiles_are_the_published_ones(
    confidence: float, degrees: int, quantile: float
) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(quantile, abs=6e-4)


@given(degrees=st.integers(1, 60), t=st.floats(0, 20))
def test_students_distribution_is_the_integral_of_its_density(degrees: int, t: float) -> None:
    x = np.linspace(0, t, 4001)
    constant = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
    density = constant / math.sqrt(degrees * math.pi) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert student_within(t, degrees) == pytest.approx(2 * np.trapezoid(density, x), abs=1e-5)


def test_a_mean_with_its_interval_by_hand() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    middle, low, high, num = interval(values)
    half = 3.1824463 * statistics.stdev(values) / 2
    assert (middle, num) == (4.0, 4)
    assert (low, high) == (pytest.approx(4 - half), pytest.approx(4 + half))


def test_one_value_says_nothing_about_the_spread() -> None:
    for found in (interval([3.0]), median_interval([3.0])):
        assert (found.middle, found.low, found.high) == (3.0, -math.inf, math.inf)
        assert json.loads(json.dumps(found.record(), allow_nan=False)) == {
            "middle": 3.0,
            "low": None,
            "high": None,
            "num": 1,
        }


def test_equal_values_leave_no_doubt() -> None:
    assert interval([2.0] * 5)[:3] == (2.0, 2.0, 2.0)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(5.0, 2.0, (1000, 6))
    covered = sum(low <= 5 <= high for _, low, high, _ in map(interval, map(list, samples)))
    # Binomial, n = 1000, p = 0.95: standard deviation 6.9.
    assert 950 - 28 < covered < 950 + 28


def test_the_bootstrap_of_a_median_agrees_with_numpys() -> None:
    values = np.random.default_rng(1).exponential(size=41)
    resampled = np.random.default_rng(2).choice(values, (20_000, 41))
    expected = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    found = median_interval(list(values), seed=5)
    assert found.middle == np.median(values)
    # Order statistics of a sample are discrete: the ends agree within a neighbour or so.
    ordered = np.sort(values)
    for end, wanted in zip((found.low, found.high), expected, strict=True):
        assert abs(np.searchsorted(ordered, end) - np.searchsorted(ordered, wanted)) <= 1


def test_a_bootstrap_repeats_itself() -> None:
    values = torch.arange(30.0).square()
    assert median_interval(values, seed=1) == median_interval(values, seed=1)
    assert median_interval(values, seed=1) != median_interval(values, seed=2)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="no episode"):
        interval([])
    with pytest.raises(UsageError, match="confidence of 95"):
        interval([1.0, 2.0], confidence=95)


def test_a_share_has_wilsons_interval_and_never_leaves_0_to_1() -> None:
    """Wilson's for 9 of 10 with z = 1.96 is 0.596 to 0.982; with t of 9 degrees a little wider."""
    found = interval([1.0] * 9 + [0.0], low=0.0, high=1.0)
    assert found.middle == pytest.approx(0.9)
    assert found.low == pytest.approx(0.54, abs=0.03)
    assert found.high == pytest.approx(0.985, abs=0.01)
    plain = interval([1.0] * 9 + [0.0])
    assert plain.high > 1
    all_of_them = interval([1.0] * 10, low=0.0, high=1.0)
    assert all_of_them.low == pytest.approx(10 / (10 + student_quantile(0.95, 9) ** 2))
    assert all_of_them.high == 1.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.sampled_from([1.0, 5.0, math.inf]))
def test_an_interval_stays_where_its_values_must_be(values: list[float], high: float) -> None:
    found = interval(values, low=0.0, high=high)
    assert 0 <= found.low <= found.middle + 1e-12
    assert found.middle - 1e-12 <= found.high <= high


def test_wilsons_interval_covers_a_share_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).random((1000, 40)) < 0.9
    found = [interval(list(map(float, row)), low=0.0, high=1.0) for row in draws]
    covered = sum(each.low <= 0.9 <= each.high for each in found)
    assert 950 - 28 < covered <= 1000
