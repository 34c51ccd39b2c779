"""The reference for option prices: published values, parity, bounds, limits, derivatives."""

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes.black_scholes import implied_volatility, price_and_delta
from torch import Tensor


def price(*terms: Any) -> Tensor:
    return price_and_delta(*terms)[0]


def delta(*terms: Any) -> Tensor:
    return price_and_delta(*terms)[1]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def numbers(*values: float) -> tuple[Tensor, ...]:
    return tuple(number(value) for value in values)


# Hull, "Options, Futures, and Other Derivatives": the example of the pricing formulas (8th ed.,
# example 14.6) and the European example of the binomial chapter's limit (Haug, "The Complete Guide
# to Option Pricing Formulas", chapter 1: S=60, X=65, T=0.25, r=8 %, sigma=30 % gives 2.1334).
@pytest.mark.parametrize(
    ("spot", "strike", "years", "volatility", "rate", "is_call", "published", "digits"),
    [
        (42.0, 40.0, 0.5, 0.20, 0.10, True, 4.76, 2),
        (42.0, 40.0, 0.5, 0.20, 0.10, False, 0.81, 2),
        (60.0, 65.0, 0.25, 0.30, 0.08, True, 2.1334, 4),
        # Hull, chapter "The Greek letters": the call of the hedging examples costs $240,000 per
        # 100,000 shares.
        (49.0, 50.0, 20 / 52, 0.20, 0.05, True, 2.40, 2),
    ],
)
def test_prices_are_the_published_ones(
    spot: float,
    strike: float,
    years: float,
    volatility: float,
    rate: float,
    is_call: bool,
    published: float,
    digits: int,
) -> None:
    found = price(*numbers(spot, strike, years, volatility), rate, is_call).item()
    assert round(found, digits) == published


def test_greeks_are_the_published_ones() -> None:
    # Hull, chapter "The Greek letters": S=49, K=50, r=5 %, sigma=20 %, 20 weeks (0.3846 years):
    # delta 0.522, gamma 0.066, vega 12.1, theta -4.31 per year, rho 8.91.
    leaves = [number.requires_grad_() for number in numbers(49.0, 50.0, 0.3846, 0.20, 0.05)]
    spot, _, years, volatility, rate = leaves
    slope = delta(*leaves, True)
    (gamma,) = torch.autograd.grad(slope, [spot])
    vega, theta, rho = torch.autograd.grad(price(*leaves, True), [volatility, years, rate])
    assert [round(slope.item(), 3), round(gamma.item(), 3)] == [0.522, 0.066]
    assert [round(vega.item(), 1), round(-theta.item(), 2)] == [12.1, -4.31]
    assert round(rho.item(), 2) == 8.91


inputs = st.fixed_dictionaries(
    {
        "spot": st.floats(1.0, 500.0),
        "strike": st.floats(1.0, 500.0),
        "years": st.floats(-0.1, 3.0),
        "volatility": st.floats(0.01, 2.0),
        "rate": st.floats(-0.02, 0.15),
        "is_call": st.booleans(),
    }
)


def slow_price(
    spot: float, strike: float, years: float, volatility: float, rate: float, is_call: bool
) -> float:
    """The discounted expectation of the payoff under the log-normal law, by Simpson's rule."""
    if years <= 0:
        return max(0.0, spot - strike if is_call else strike - spot)
    deviation = volatility * math.sqrt(years)
    mean = math.log(spot) + (rate - volatility**2 / 2) * years
    # In units of the normal law: from the kink of the payoff to where the density is gone.
    kink = (math.log(strike) - mean) / deviation
    low, high = (max(kink, -9.0), 9.0 + deviation) if is_call else (-9.0, min(kink, 9.0))
    if low >= high:
        return 0.0
    pieces, total = 2000, 0.0
    for i in range(pieces + 1):
        x = low + (high - low) * i / pieces
        terminal = math.exp(mean + deviation * x)
        payoff = terminal - strike if is_call else strike - terminal
        weight = 1 if i in (0, pieces) else 4 if i % 2 else 2
        total += weight * payoff * NormalDist().pdf(x)
    return math.exp(-rate * years) * total * (high - low) / pieces / 3


@examples(40)
@given(inputs)
def test_price_is_the_discounted_expectation(given_: dict[str, float]) -> None:
    volatility, rate, is_call = given_["volatility"], given_["rate"], bool(given_["is_call"])
    spot, strike, years = given_["spot"], given_["strike"], given_["years"]
    found = price(*numbers(spot, strike, years, volatility), rate, is_call).item()
    expected = slow_price(spot, strike, years, volatility, rate, is_call)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@examples(100)
@given(inputs)
def test_parity_bounds_and_monotonicity(given_: dict[str, float]) -> None:
    spot, strike, years, volatility = numbers(
        *(given_[name] for name in ("spot", "strike", "years", "volatility"))
    )
    rate = given_["rate"]
    call = price(spot, strike, years, volatility, rate, True)
    put = price(spot, strike, years, volatility, rate, False)
    discounted = strike * math.exp(-rate * max(0.0, given_["years"]))
    rounding = 1e-12 * (spot + discounted).item()
    assert (call - put - (spot - discounted)).abs().item() <= rounding
    floors = ((spot - discounted).clamp(min=0), (discounted - spot).clamp(min=0))
    exactly = spot - strike * torch.exp(-rate * years.clamp(min=0.0))
    assert call.item() >= exactly.item() and put.item() >= -exactly.item()
    assert min(call.item(), put.item()) >= 0.0
    for value, floor, ceiling in zip((call, put), floors, (spot, discounted), strict=True):
        assert (floor - rounding).item() <= value.item() <= (ceiling + rounding).item()
    for is_call, value in ((True, call), (False, put)):
        direction = 1 if is_call else -1
        higher_spot = price(1.01 * spot, strike, years, volatility, rate, is_call)
        higher_strike = price(spot, 1.01 * strike, years, volatility, rate, is_call)
        higher_volatility = price(spot, strike, years, volatility + 0.01, rate, is_call)
        assert direction * (higher_spot - value).item() >= -rounding
        assert direction * (higher_strike - value).item() <= rounding
        assert (higher_volatility - value).item() >= -rounding
    step = delta(spot, strike, years, volatility, rate, True)
    assert 0.0 <= step.item() <= 1.0
    assert (step - delta(spot, strike, years, volatility, rate, False)).item() == pytest.approx(1.0)


@examples(40)
@given(inputs.filter(lambda given_: given_["years"] > 0.02 and given_["volatility"] > 0.05))
def test_delta_is_the_derivative_of_the_price(given_: dict[str, float]) -> None:
    spot = number(given_["spot"]).requires_grad_()
    others = [number(given_[name]) for name in ("strike", "years", "volatility", "rate")]
    is_call = bool(given_["is_call"])
    (by_spot,) = torch.autograd.grad(price(spot, *others, is_call), [spot])
    found = delta(spot, *others, is_call).item()
    assert found == pytest.approx(by_spot.item(), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("is_call", [True, False])
def test_delta_is_the_difference_of_the_price(is_call: bool) -> None:
    strike, years, volatility = numbers(95.0, 0.4, 0.3)
    higher, lower = (
        price(number(spot), strike, years, volatility, 0.05, is_call).item()
        for spot in (100.0 + 1e-4, 100.0 - 1e-4)
    )
    found = delta(number(100.0), strike, years, volatility, 0.05, is_call).item()
    assert found == pytest.approx((higher - lower) / 2e-4, abs=1e-6)


def test_at_expiry_the_value_is_intrinsic_to_the_last_bit_and_delta_is_a_step() -> None:
    spot = torch.tensor([90.1, 100.0, 110.3], dtype=torch.float64)
    strike, volatility = number(100.0), number(0.2)
    for years in (number(0.0), number(-1.0)):
        call = price(spot, strike, years, volatility, 0.05, True)
        put = price(spot, strike, years, volatility, 0.05, False)
        assert torch.equal(call, (spot - strike).clamp(min=0))
        assert torch.equal(put, (strike - spot).clamp(min=0))
        assert delta(spot, strike, years, volatility, 0.05, True).tolist() == [0.0, 0.5, 1.0]
        assert delta(spot, strike, years, volatility, 0.05, False).tolist() == [-1.0, -0.5, 0.0]


def test_without_volatility_it_is_the_discounted_forward() -> None:
    found = price(*numbers(100.0, 100.0, 1.0, 0.0), 0.05, True).item()
    assert found == pytest.approx(100.0 * (1 - math.exp(-0.05)), rel=1e-14)


def test_a_row_at_expiry_or_at_an_extreme_poisons_neither_values_nor_gradients() -> None:
    spot = torch.tensor([1e-9, 42.0, 1e9, 40.0, 40.0, 42.0], dtype=torch.float64)
    years = torch.tensor([0.5, 0.0, 1e-9, 0.0, 1e-300, 3.0], dtype=torch.float64)
    volatility = torch.tensor([0.2, 0.2, 0.01, 0.2, 0.0, 5.0], dtype=torch.float64)
    for leaf in (spot, years, volatility):
        leaf.requires_grad_()
    is_call = torch.tensor([True, False, True, False, True, False])
    values = price(spot, number(40.0), years, volatility, 0.05, is_call)
    values.sum().backward()
    everything = [values, spot.grad, years.grad, volatility.grad]
    everything.append(delta(spot, number(40.0), years, volatility, 0.05, is_call))
    assert all(part is not None and part.isfinite().all() for part in everything)
    assert values[1].item() == 0.0 and values[2].item() == pytest.approx(1e9 - 40.0, rel=1e-12)


def test_far_out_of_the_money_the_price_keeps_its_digits() -> None:
    """N(d1) about 1e-24: a difference from 1 would leave nothing."""
    found = price(*numbers(100.0, 400.0, 0.02, 1.0), 0.0, True).item()
    # Mills's ratio to the second order gives N(-x) = pdf(x) (1/x - 1/x^3 + 3/x^5).
    deviation = math.sqrt(0.02)
    d1 = math.log(100.0 / 400.0) / deviation + deviation / 2
    d2 = d1 - deviation

    def tail(x: float) -> float:
        series = 1 / x - 1 / x**3 + 3 / x**5 - 15 / x**7 + 105 / x**9
        return NormalDist().pdf(x) * series

    assert found == pytest.approx(100.0 * tail(-d1) - 400.0 * tail(-d2), rel=1e-4)
    assert 0.0 < found < 1e-18


def test_shapes_broadcast_and_mix_calls_with_puts_in_float64() -> None:
    spot = torch.full((3, 1), 42.0)
    is_call = torch.tensor([True, False])
    values = price(spot, torch.tensor(40.0), torch.tensor(0.5), torch.tensor(0.2), 0.1, is_call)
    assert values.shape == (3, 2) and values.dtype == torch.float64
    assert [round(value, 2) for value in values[0].tolist()] == [4.76, 0.81]
    slope = delta(spot, torch.tensor(40.0), torch.tensor(0.5), torch.tensor(0.2), 0.1, True)
    assert slope.dtype == torch.float64


def test_the_smile_has_its_lowest_point_at_the_money_and_is_symmetric_in_the_logarithm() -> None:
    strike = 100.0 * torch.exp(torch.tensor([-0.2, 0.0, 0.2], dtype=torch.float64))
    found = implied_volatility(number(0.25), number(100.0), strike, 1.5).tolist()
    assert found == pytest.approx([0.25 + 1.5 * 0.04, 0.25, 0.25 + 1.5 * 0.04])
