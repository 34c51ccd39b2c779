from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.plan.scaling import (
    BUCKET,
    FIRST_BUCKET,
    buckets_of,
    expected_largest,
    exposed,
    straggler_factor,
)
from muster.plan.units import Bytes, Seconds

MIB = 2**20
SIZES = st.floats(1.0, 1e10).map(Bytes)


@pytest.mark.parametrize(
    ("mib", "on_gpus", "on_cpus"),
    [
        (0.5, [0.5], [0.5]),
        (1, [1], [1]),
        (20, [1, 19], [20]),
        (26, [1, 25], [25, 1]),
        (60, [1, 25, 25, 9], [25, 25, 10]),
    ],
)
def test_buckets_as_a_training_has_them(
    mib: float, on_gpus: list[float], on_cpus: list[float]
) -> None:
    for overlaps, expected in ((True, on_gpus), (False, on_cpus)):
        buckets = buckets_of(Bytes(mib * MIB), overlaps=overlaps)
        assert [bucket.value / MIB for bucket in buckets] == expected


@given(SIZES, st.booleans())
def test_buckets_add_up(size: Bytes, overlaps: bool) -> None:
    buckets = buckets_of(size, overlaps=overlaps)
    assert sum(b.value for b in buckets) == pytest.approx(size.value)
    assert all(b <= BUCKET for b in buckets)
    assert buckets[0] <= (FIRST_BUCKET if overlaps else BUCKET) or len(buckets) == 1


@pytest.mark.parametrize(
    ("backward_s", "per_byte_s", "expected_s"),
    [
        # Buckets of 10, 30 and 60 bytes are full at 10 %, 40 % and 100 % of the backward.
        # Slow backward (10 s), 0.05 s per byte: the last is sent from 10 to 13 s: 3 s wait.
        (10.0, 0.05, 3.0),
        # Fast backward (1 s), 0.1 s per byte: full at 0.1, 0.4, 1 s; sent 0.1-1.1, 1.1-4.1,
        # 4.1-10.1: the step waits 9.1 s.
        (1.0, 0.1, 9.1),
        # No backward to hide behind: all of it, 100 bytes x 0.1 s.
        (0.0, 0.1, 10.0),
        (10.0, 0.0, 0.0),
    ],
)
def test_what_the_step_waits_for(backward_s: float, per_byte_s: float, expected_s: float) -> None:
    buckets = [Bytes(10.0), Bytes(30.0), Bytes(60.0)]
    late = exposed(buckets, Seconds(backward_s), lambda b: Seconds(b.value * per_byte_s))
    assert late.value == pytest.approx(expected_s)


@given(SIZES, st.floats(0, 100), st.floats(1e-12, 1e-8))
def test_hidden_or_not_it_is_between_the_last_bucket_and_all(
    size: Bytes, backward_s: float, per_byte_s: float
) -> None:
    buckets = buckets_of(size, overlaps=True)
    late = exposed(buckets, Seconds(backward_s), lambda b: Seconds(b.value * per_byte_s)).value
    last = buckets[-1].value * per_byte_s
    assert last * (1 - 1e-6) - 1e-9 <= late <= size.value * per_byte_s * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(
    ("count", "value"),
    # David & Nagaraja 2003: expected largest of n standard normal values.
    [(1, 0.0), (2, 0.56419), (3, 0.84628), (4, 1.02938), (5, 1.16296), (8, 1.42360), (10, 1.53875),
     (100, 2.50759)],
)  # fmt: skip
def test_the_expected_largest_is_that_of_the_tables(count: int, value: float) -> None:
    assert expected_largest(count) == pytest.approx(value, abs=2e-5)


@given(st.integers(1, 200), st.floats(0, 2))
def test_waiting_for_the_slowest_never_helps(count: int, spread: float) -> None:
    assert straggler_factor(count, spread) >= 1.0
    assert straggler_factor(count + 1, spread) >= straggler_factor(count, spread) - 1e-9
