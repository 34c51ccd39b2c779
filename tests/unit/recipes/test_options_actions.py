"""The two action spaces against the recipe's list."""

from __future__ import annotations

from collections import Counter

import pytest

from muster_recipes.clstm_ppo.actions import (
    NUM_SLOTS,
    Leg,
    Strategy,
    action_space,
    described,
    most_owed,
    payoff,
)


def test_the_31_actions_are_those_of_the_specification() -> None:
    space = action_space("31")
    assert space.num_actions == 31
    assert space.num_closing == NUM_SLOTS == 10
    for m in range(10):
        call, put = space.strategies[m], space.strategies[10 + m]
        assert call.legs == (Leg(option="call", ratio=1, strike=(100 + m) / 100),)
        assert put.legs == (Leg(option="put", ratio=1, strike=(100 - m) / 100),)


def test_the_91_actions_are_those_of_the_specification() -> None:
    space = action_space("91")
    assert (space.num_actions, space.num_closing) == (91, 0)
    ranges = {
        "call": (1, 15), "put": (16, 30), "covered call": (31, 45), "cash-secured put": (46, 60),
        "bull call spread": (61, 65), "bear put spread": (66, 70), "straddle": (71, 75),
        "strangle": (76, 80), "iron condor": (81, 85), "butterfly": (86, 90),
    }  # fmt: skip
    for family, (first, last) in ranges.items():
        assert {s.family for s in space.strategies[first - 1 : last]} == {family}
    for first in (1, 16, 31, 46):
        strikes = [space.strategies[first - 1 + i].legs[0].strike for i in range(15)]
        assert strikes == pytest.approx([1 + m / 100 for m in range(-7, 8)])
    for first in (71, 76):
        days = [space.strategies[first - 1 + i].days for i in range(5)]
        assert days == [7, 14, 21, 28, 35]
    assert all(1 <= len(s.legs) <= 4 for s in space.strategies)
    assert len(set(space.strategies)) == 90


@pytest.mark.parametrize("name", ["31", "91"])
def test_no_strategy_can_owe_more_than_is_locked_up(name: str) -> None:
    """Tried at 4,001 prices from 0 to four times the opening price."""
    for strategy in action_space("31" if name == "31" else "91").strategies:
        owed = most_owed(strategy)
        worst = min(
            payoff(strategy, i / 1000) + strategy.shares / 100 * i / 1000 for i in range(4001)
        )
        assert max(0.0, -worst) == pytest.approx(owed, abs=1e-9)


def test_what_is_locked_up_by_kind() -> None:
    strategies = action_space("91").strategies
    assert most_owed(strategies[30]) == 0  # a covered call: its shares
    assert most_owed(strategies[45]) == pytest.approx(0.93)  # a put: its strike
    assert most_owed(strategies[60]) == 0  # a debit spread
    assert most_owed(strategies[80]) == pytest.approx(0.03)  # a condor: one wing
    assert most_owed(strategies[85]) == pytest.approx(0, abs=1e-12)  # a butterfly


def test_a_short_call_without_cover_is_refused() -> None:
    naked = Strategy(family="naked", legs=(Leg(option="call", ratio=-1, strike=1.0),))
    with pytest.raises(ValueError, match="naked: a short call without cover"):
        most_owed(naked)


def test_the_table_is_printed_for_the_documentation() -> None:
    lines = described("91")
    assert len(lines) == 91
    assert lines[0] == "0  hold"
    assert lines[31] == "31  covered call  +100 shares, -1 call 93%"
    assert lines[76] == "76  strangle  +1 call 103%, +1 put 97%, 7 days"
    assert lines[81] == ("81  iron condor  +1 put 94%, -1 put 97%, -1 call 103%, +1 call 106%")
    assert lines[86] == "86  butterfly  +1 call 97%, -2 call 100%, +1 call 103%"
    assert described("31")[30] == "30  close slot 9"
    assert Counter(line.split()[1] for line in described("31")) == {
        "hold": 1, "call": 10, "put": 10, "close": 10,
    }  # fmt: skip
