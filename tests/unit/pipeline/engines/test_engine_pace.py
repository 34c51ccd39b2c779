"""Rates are kept in every minute, waits grow, and Retry-After is read in both of its forms."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.engines.remote import Bucket, back_off_s, retry_after_s

ASKED = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), min_size=1, max_size=60)


@given(st.integers(1, 6000), ASKED)
def test_no_minute_holds_more_than_the_rate_and_one_burst(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    """Whenever requests come, and however large they are."""
    bucket = Bucket(per_minute)
    now_s, sent = 1000.0, []
    for pause_s, units in asked:
        now_s += pause_s
        sent.append((now_s + bucket.take(units, now_s), units))
    burst = max(per_minute / 60, 1)
    for begin_s, _ in sent:
        # The first of them may have been paid for in the time before.
        inside = [units for at_s, units in sent if begin_s <= at_s < begin_s + 60]
        assert sum(inside[1:]) <= per_minute + burst + 1e-6


@given(st.integers(60, 6000))
def test_a_busy_sender_reaches_the_rate(per_minute: int) -> None:
    bucket = Bucket(per_minute)
    waits = [bucket.take(1, 1000.0) for _ in range(per_minute)]
    assert max(waits) == pytest.approx(59)  # a minute's worth, of which one second goes at once
    assert waits == sorted(waits)


def test_what_was_booked_too_much_is_given_back() -> None:
    bucket = Bucket(60)
    bucket.take(100, 1000.0)
    bucket.correct(-90)
    assert bucket.take(1, 1000.0) == pytest.approx(10)


def test_no_limit_means_no_wait() -> None:
    bucket = Bucket(0)
    assert [bucket.take(10**6, 1000.0) for _ in range(3)] == [0.0] * 3


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_back_off_doubles_up_to_30_s(failures: int, chance: float) -> None:
    longest = min(30.0, 0.5 * 2 ** min(failures - 1, 40))
    assert longest / 2 <= back_off_s(failures, chance, None) <= longest


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1000))
def test_never_sooner_than_the_server_asks_for(
    failures: int, chance: float, asked_s: float
) -> None:
    assert asked_s <= back_off_s(failures, chance, asked_s) <= asked_s + 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        (" 0.5 ", 0.5),
        ("-4", 0.0),
        ("nan", None),
        ("soon", None),
        ("", None),
        (formatdate(1_700_000_060, usegmt=True), 60.0),
        (formatdate(1_600_000_000, usegmt=True), 0.0),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, 1_700_000_000.0) == seconds
