"""Mid prices of options at a bar, and the legs of strategies as tensors.

Rate, smile and day count are the market's convention: 5 % continuous, implied volatility =
current volatility + skew x (ln K/S)^2, calendar days over 365. Cash earns no interest: the
portfolio changes by price moves, decay and costs only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo import black_scholes
from muster_recipes.clstm_ppo.actions import ActionSpace, most_owed

RATE = 0.05
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY


class Bars(NamedTuple):
    """Some bars of a market: float64 of one shape. ``time``: seconds, exact in float64."""

    spot: Tensor
    volatility: Tensor
    volume: Tensor
    time: Tensor

    def expanded(self, dimensions: int) -> Bars:
        """With so many dimensions of size 1 at the end."""
        return Bars(*(x.view(*x.shape, *[1] * dimensions) for x in self))


class Legs(NamedTuple):
    """Legs by kind: row 0 is no position, row k the strategy that action k opens. float64.

    ``strike`` (multiple of the opening price), ``ratio`` and ``is_call`` (1.0 or 0.0) are
    [kinds, max_legs], a missing leg having ratio 0. ``shares`` of the underlying per contract,
    ``seconds`` to expiry, ``owed`` (most_owed), ``at_risk``, ``order`` (contracts of the largest
    leg per contract of the strategy) and ``centre`` (mean strike) are [kinds].
    """

    strike: Tensor
    ratio: Tensor
    is_call: Tensor
    shares: Tensor
    seconds: Tensor
    owed: Tensor
    at_risk: Tensor
    order: Tensor
    centre: Tensor


def legs_of(space: ActionSpace, expiry_days: float, device: torch.device) -> Legs:
    kinds, width = 1 + len(space.strategies), space.max_legs
    ratio = torch.zeros(kinds, width, dtype=torch.float64)
    strike, is_call = torch.ones_like(ratio), torch.ones_like(ratio)
    rows: list[tuple[float, ...]] = [(0.0, 0.0, 0.0, 0.0, 1.0, 1.0)]
    for kind, strategy in enumerate(space.strategies, start=1):
        for i, leg in enumerate(strategy.legs):
            ratio[kind, i], strike[kind, i] = leg.ratio, leg.strike
            is_call[kind, i] = float(leg.option == "call")
        days = expiry_days if strategy.days is None else strategy.days
        order = max(abs(leg.ratio) for leg in strategy.legs)
        centre = sum(leg.strike for leg in strategy.legs) / len(strategy.legs)
        seconds = days * SECONDS_PER_DAY
        owed = most_owed(strategy)
        rows.append((strategy.shares, seconds, owed, strategy.at_risk, order, centre))
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return Legs(*(x.contiguous().to(device) for x in (strike, ratio, is_call, *columns)))


def mid(bars: Bars, strike: Tensor, years: Tensor, is_call: Tensor, skew: float) -> Tensor:
    """Per share of one option; at expiry its intrinsic value."""
    volatility = black_scholes.implied_volatility(bars.volatility, bars.spot, strike, skew)
    return black_scholes.price(bars.spot, strike, years, volatility, RATE, is_call)


def delta(bars: Bars, strike: Tensor, years: Tensor, is_call: Tensor, skew: float) -> Tensor:
    """Of one option, at the smile's volatility."""
    volatility = black_scholes.implied_volatility(bars.volatility, bars.spot, strike, skew)
    return black_scholes.delta(bars.spot, strike, years, volatility, RATE, is_call)
