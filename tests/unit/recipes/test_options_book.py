"""Slots, marks and the fast price formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes import black_scholes
from torch import Tensor

from muster_recipes.clstm_ppo.actions import action_space
from muster_recipes.clstm_ppo.book import Book, empty_book, marks, opened, without
from muster_recipes.clstm_ppo.offers import Order
from muster_recipes.clstm_ppo.quotes import (
    RATE,
    SECONDS_PER_YEAR,
    Conditions,
    Rules,
    legs_of,
    mid_and_delta,
)

CPU = torch.device("cpu")
RULES = Rules(skew=0.5, with_costs=True, with_shares=True, can_close=False)


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _order(num_envs: int, contracts: float = 3.0) -> Order:
    return Order(*(torch.full((num_envs,), x).double() for x in (contracts, 700.0, 5.0, 40.0)))


def _bars(num_envs: int, spot: float = 100.0, time_s: float = 0.0) -> Conditions:
    return Conditions(*(torch.full((num_envs,), x).double() for x in (spot, 0.25, 1e7, time_s)))


@given(
    spot=st.floats(1, 1000),
    strike_to_spot=st.floats(0.3, 3.0),
    days=st.one_of(st.just(0.0), st.floats(-5, 60)),
    volatility=st.floats(0.02, 2.0),
    is_call=st.booleans(),
)
@examples(200)
# At expiry, one unit in the last place from the strike: delta is a step there.
@example(spot=100.0, strike_to_spot=1 - 2**-53, days=0.0, volatility=2.0, is_call=True)
@example(spot=1.0, strike_to_spot=1 + 2**-52, days=-1.0, volatility=2.0, is_call=False)
def test_the_fast_formula_is_the_careful_one(
    spot: float, strike_to_spot: float, days: float, volatility: float, is_call: bool
) -> None:
    bars = Conditions(_tensor(spot), _tensor(volatility), _tensor(0.0), _tensor(0.0))
    strike, years = bars.spot * strike_to_spot, _tensor(days / 365)
    price, delta = mid_and_delta(bars, strike, years, _tensor(float(is_call)), RULES)
    smile = black_scholes.implied_volatility(bars.volatility, bars.spot, strike, RULES.skew)
    terms = (bars.spot, strike, years, smile, RATE, is_call)
    careful = black_scholes.price_and_delta(*terms)
    assert float(price) == pytest.approx(float(careful[0]), abs=1e-12 * spot)
    assert float(delta) == pytest.approx(float(careful[1]), abs=1e-12)


@given(spot=st.floats(1, 1000), strike=st.floats(1, 1000), is_call=st.booleans())
@examples(100)
def test_at_expiry_the_fast_formula_is_intrinsic(spot: float, strike: float, is_call: bool) -> None:
    bars = Conditions(_tensor(spot), _tensor(0.2), _tensor(0.0), _tensor(0.0))
    price, _ = mid_and_delta(bars, _tensor(strike), _tensor(0.0), _tensor(float(is_call)), RULES)
    gain = spot - strike if is_call else strike - spot
    assert float(price) == pytest.approx(max(gain, 0.0), abs=1e-15 * spot)


@given(moves=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), max_size=40))
@examples(40)
def test_a_position_takes_the_first_free_slot_and_leaves_the_others_alone(
    moves: list[tuple[int, int]],
) -> None:
    """Against a plain list. Kind 0 opens nothing; full slots take nothing more."""
    legs = legs_of(action_space("91"), 30.0, CPU)
    book, plain = empty_book(1, 10, CPU), [0] * 10
    for kind, emptied in moves:
        book = opened(book, torch.tensor([kind]), _order(1), _bars(1), legs)
        if kind and 0 in plain:
            plain[plain.index(0)] = kind
        assert book.kind[0].tolist() == plain
        if kind % 3 == 0:
            gone = torch.zeros(1, 10, dtype=torch.bool)
            gone[0, emptied] = True
            book, plain[emptied] = without(book, gone), 0
        held = book.kind[0] > 0
        for column in book[1:]:
            assert bool((column[0][~held] == 0).all())
        assert bool((book.contracts[0][held] == 3).all())


def test_an_opened_position_remembers_what_it_needs() -> None:
    legs = legs_of(action_space("91"), 30.0, CPU)
    book = opened(empty_book(1, 10, CPU), torch.tensor([73]), _order(1), _bars(1, 90.0, 5e8), legs)
    first = Book(*(column[:, 0] for column in book))
    assert [float(x) for x in first] == [73, 90.0, 5e8 + 21 * 86_400, 3.0, 700.0, 40.0]


def test_every_strategy_is_marked_leg_by_leg() -> None:
    """All 90 in one account each, twelve days after the opening, against single prices."""
    space = action_space("91")
    legs = legs_of(space, 30.0, CPU)
    kinds = torch.arange(1, 91)
    book = opened(empty_book(90, 10, CPU), kinds, _order(90), _bars(90), legs)
    later = _bars(90, 104.0, 12 * 86_400)
    found = marks(book, later, legs, RULES)
    assert bool((found.value[:, 1:] == 0).all()) and bool((found.delta[:, 1:] == 0).all())
    for i, strategy in enumerate(space.strategies):
        expiry_s = (strategy.days or 30.0) * 86_400
        years = _tensor((expiry_s - 12 * 86_400) / SECONDS_PER_YEAR)
        value, delta = strategy.shares * 104.0, strategy.shares / 100
        for leg in strategy.legs:
            strike, spot = _tensor(100.0 * leg.strike), _tensor(104.0)
            smile = black_scholes.implied_volatility(_tensor(0.25), spot, strike, RULES.skew)
            terms = (spot, strike, years, smile, RATE, leg.option == "call")
            each = black_scholes.price_and_delta(*terms)
            value += 100 * leg.ratio * float(each[0])
            delta += leg.ratio * float(each[1])
        assert float(found.value[i, 0]) == pytest.approx(3 * value, abs=1e-8), strategy
        assert float(found.delta[i, 0]) == pytest.approx(delta, abs=1e-10), strategy
