"""Mid prices of options at a bar, and the legs of strategies as tensors.

Rate, smile and day count are the market's convention: 5 % continuous, implied volatility =
current volatility + skew x (ln K/S)^2, calendar days over 365. Cash earns no interest: the
portfolio changes by price moves, decay and costs only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo.actions import ActionSpace, most_owed

#: Interest per year: of option prices, and so of what a simulated market grows by without drift.
RATE = 0.05
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY
#: So short that a price one rounding step (1e-16) from the strike is many deviations from it.
_INSTANT_YEARS = 1e-36


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a market that are the same at every bar.

    ``with_shares``: some strategy holds shares; ``can_close``: positions can be closed before they
    expire.
    """

    skew: float
    with_costs: bool
    with_shares: bool
    can_close: bool


class Conditions(NamedTuple):
    """Some bars of a market: float64 of one shape. ``time``: seconds, exact in float64."""

    spot: Tensor
    volatility: Tensor
    volume: Tensor
    time: Tensor

    def expanded(self, dimensions: int) -> Conditions:
        """The same bars with so many dimensions of size 1 at the end."""
        return Conditions(*(x.view(*x.shape, *[1] * dimensions) for x in self))


class Legs(NamedTuple):
    """Legs by kind: row 0 is no position, row k the strategy that action k opens. float64.

    ``strike`` (multiple of the opening price), ``ratio`` and ``is_call`` (1.0 or 0.0) are
    [max_legs, kinds], a missing leg having ratio 0. ``shares`` of the underlying per contract,
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
    ratio = torch.zeros(width, kinds, dtype=torch.float64)
    strike, is_call = torch.ones_like(ratio), torch.ones_like(ratio)
    rows: list[tuple[float, ...]] = [(0.0, 0.0, 0.0, 0.0, 1.0, 1.0)]
    for kind, strategy in enumerate(space.strategies, start=1):
        for i, leg in enumerate(strategy.legs):
            ratio[i, kind], strike[i, kind] = leg.ratio, leg.strike
            is_call[i, kind] = float(leg.option == "call")
        days = expiry_days if strategy.days is None else strategy.days
        order = max(abs(leg.ratio) for leg in strategy.legs)
        centre = sum(leg.strike for leg in strategy.legs) / len(strategy.legs)
        seconds = days * SECONDS_PER_DAY
        owed = most_owed(strategy)
        rows.append((strategy.shares, seconds, owed, strategy.at_risk, order, centre))
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return Legs(*(x.contiguous().to(device) for x in (strike, ratio, is_call, *columns)))


def mid_and_delta(
    bars: Conditions, strike: Tensor, years: Tensor, is_call: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """The price at mid and the delta of one option per share, by Black and Scholes (1973).

    The form is Hull's ("Options, Futures, and Other Derivatives", "The Black-Scholes-Merton
    model"), without dividends; the volatility is the smile's, which is above 0. This is most of a
    step's work, so it has no branch: ``torch.where`` with a number is not vectorised on CPUs and
    takes ten times as long. An instant before expiry the formula gives the intrinsic value up to
    rounding, so expiry needs no branch either.
    """
    left = years.clamp(min=_INSTANT_YEARS)
    discounted = strike * torch.exp(-RATE * left)
    volatility = bars.volatility + rules.skew * torch.log(strike / bars.spot).square()
    deviation = volatility * torch.sqrt(left)
    d1 = torch.log(bars.spot / discounted) / deviation + 0.5 * deviation
    sign = 2.0 * is_call - 1.0
    # N(x) = erfc(-x / sqrt(2)) / 2 keeps its digits far to the left, where ndtr cancels to 0.
    scaled = -math.sqrt(0.5) * sign
    in_spot = 0.5 * torch.erfc(scaled * d1)
    in_strike = 0.5 * torch.erfc(scaled * (d1 - deviation))
    delta = sign * in_spot
    price = delta * bars.spot - sign * in_strike * discounted
    return price.clamp(min=0.0), delta
