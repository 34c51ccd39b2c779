"""Moments merge as if their values had been seen together, and absence stays absent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.ssm.problem import stream_seed
from muster_recipes.ssm.sampler import Moments

values = st.lists(st.floats(-1e6, 1e6), max_size=40)


def assert_close(left: Moments, right: Moments) -> None:
    assert left.count == right.count
    assert left.mean == pytest.approx(right.mean, rel=1e-12, abs=1e-9)
    # A spread far below the magnitude keeps only the digits that the values themselves have.
    assert left.m2 == pytest.approx(right.m2, rel=1e-9, abs=1e-6)


@given(values, values)
def test_merge_equals_numpy_on_the_concatenation(left: list[float], right: list[float]) -> None:
    merged = Moments.of(left).merge(Moments.of(right))
    both = np.array(left + right)
    assert merged.count == len(both)
    if merged.count == 0:
        assert merged.value is None
        return
    assert merged.value == pytest.approx(math.fsum(both) / len(both), rel=1e-12, abs=1e-9)
    if merged.count == 1:
        assert merged.variance is None
        assert merged.standard_error is None
        return
    variance = both.var(ddof=1)
    assert merged.variance == pytest.approx(variance, rel=1e-9, abs=1e-6)
    assert merged.standard_error == pytest.approx(
        math.sqrt(variance / len(both)), rel=1e-8, abs=1e-3
    )


@given(values, values)
def test_merge_is_commutative(left: list[float], right: list[float]) -> None:
    a, b = Moments.of(left), Moments.of(right)
    assert_close(a.merge(b), b.merge(a))


@given(values, values, values)
def test_merge_is_associative(x: list[float], y: list[float], z: list[float]) -> None:
    a, b, c = Moments.of(x), Moments.of(y), Moments.of(z)
    assert_close(a.merge(b).merge(c), a.merge(b.merge(c)))


def test_a_large_offset_does_not_cancel() -> None:
    """A sum of squares minus a squared sum would lose every digit of this variance."""
    blocks = [[1e9 + 0.1 * i + j for i in range(7)] for j in range(5)]
    merged = Moments.none()
    for block in blocks:
        merged = merged.merge(Moments.of(block))
    expected = np.var(np.array(blocks).ravel() - 1e9, ddof=1)
    assert merged.variance == pytest.approx(expected, rel=1e-6)


def test_counts_beyond_float64_merge_exactly() -> None:
    huge = Moments(2**60 + 1, 1.0, 0.0)
    assert huge.merge(Moments(1, 1.0, 0.0)).count == 2**60 + 2


def test_nothing_is_not_zero() -> None:
    nothing = Moments.none()
    assert nothing == Moments.of([]) == nothing.merge(nothing)
    assert (nothing.value, nothing.variance, nothing.standard_error) == (None, None, None)


def test_stream_seeds_are_pinned() -> None:
    """A change of these numbers would change every published table."""
    assert stream_seed("gnc", 3, 1, 150, 0) == 12_120_443_163_904_096_414


def test_stream_seeds_tell_types_order_and_boundaries_apart() -> None:
    names = [("1",), (1,), (1, 2), (2, 1), (12,), ("a", "bc"), ("ab", "c"), ("s1:a;",)]
    seeds = {stream_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**64 for seed in seeds)
