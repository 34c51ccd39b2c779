from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.monitor.recorder import Ticker


def test_due_times_come_from_the_start_however_late_each_sample_is() -> None:
    ticker = Ticker(5.0, 100.0)
    due = []
    for _ in range(1000):
        due.append(ticker.due_s)
        ticker.taken(ticker.due_s + 1.7)
    assert due == [100.0 + 5 * n for n in range(1000)]
    assert ticker.missed == 0


@pytest.mark.parametrize(
    ("taken_at", "next_due", "missed"),
    [(100.0, 105.0, 0), (104.9, 105.0, 0), (105.0, 110.0, 1), (117.0, 120.0, 3)],
)
def test_what_was_missed_is_skipped(taken_at: float, next_due: float, missed: int) -> None:
    ticker = Ticker(5.0, 100.0)
    ticker.taken(taken_at)
    assert (ticker.due_s, ticker.missed) == (next_due, missed)


def test_nothing_is_waited_for_when_it_is_late() -> None:
    ticker = Ticker(5.0, 100.0)

    assert (ticker.wait_s(98.5), ticker.wait_s(100.0), ticker.wait_s(130.0)) == (1.5, 0.0, 0.0)


@given(
    st.floats(0.05, 1e4),
    st.floats(0.0, 1e6),
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40),
)
def test_the_next_is_always_later_than_now_and_on_the_grid(
    interval_s: float, start_s: float, delays: list[float]
) -> None:
    ticker = Ticker(interval_s, start_s)
    for num_taken, delay in enumerate(delays, start=1):
        now_s = ticker.due_s + delay
        ticker.taken(now_s)
        assert ticker.due_s > now_s
        assert ticker.due_s <= now_s + interval_s * (1 + 1e-9) + 1e-9
        number = round((ticker.due_s - start_s) / interval_s)
        assert ticker.due_s == start_s + number * interval_s
        assert number == num_taken + ticker.missed
