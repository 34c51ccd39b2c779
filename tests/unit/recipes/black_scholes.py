"""The reference: Black and Scholes's price of a European option without dividends, and its delta.

Source: Black and Scholes (1973), "The Pricing of Options and Corporate Liabilities"; in the form
of Hull, "Options, Futures, and Other Derivatives", chapters "The Black-Scholes-Merton model" and
"The Greek letters". Other derivatives are autograd's.

In every function ``spot``, ``strike`` (greater than 0), ``years`` to expiry and ``volatility``
(per year) are tensors that broadcast; ``rate`` (continuous, per year) and ``is_call`` are tensors
or plain values. Results are float64, on the tensors' device, and never NaN. Where no uncertainty
is left (``years`` <= 0 or ``volatility`` <= 0) they are the limits: the discounted intrinsic
value, which at expiry is the intrinsic value to the last bit, and a delta that steps from 0 to 1.
Nothing here makes the host wait.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def price_and_delta(
    spot: Tensor,
    strike: Tensor,
    years: Tensor,
    volatility: Tensor,
    rate: Tensor | float,
    is_call: Tensor | bool,
) -> tuple[Tensor, Tensor]:
    """The price and the delta of one option on one share.

    The price is within its bounds without arbitrage in spite of rounding. Delta is 0 to 1 for a
    call and -1 to 0 for a put; at expiry it is a step that is one half at the strike.
    """
    spot, strike = spot.double(), strike.double()
    years, volatility = years.double(), volatility.double()
    # Both branches of every `where` are kept finite: a NaN in the branch that is not taken would
    # still poison a gradient.
    is_open = (years > 0.0) & (volatility > 0.0)
    left = years.clamp(min=0.0)
    discounted = strike * torch.exp(-rate * left)
    deviation = torch.where(is_open, volatility, 1.0) * torch.sqrt(torch.where(is_open, left, 1.0))
    d1 = torch.log(spot / discounted) / deviation + 0.5 * deviation
    sign = 2 * is_call - 1
    step = 0.5 * (1.0 + torch.sign(sign * (spot - discounted)))
    in_spot = torch.where(is_open, _normal_cdf(sign * d1), step)
    in_strike = torch.where(is_open, _normal_cdf(sign * (d1 - deviation)), step)
    intrinsic = (sign * (spot - discounted)).clamp(min=0.0)
    value = torch.maximum(sign * (spot * in_spot - discounted * in_strike), intrinsic)
    return torch.where(is_open, value, intrinsic), sign * in_spot


def implied_volatility(level: Tensor, spot: Tensor, strike: Tensor, skew: float) -> Tensor:
    """A smile: the market's ``level`` of volatility + ``skew`` x (ln strike/spot)^2, per year."""
    return level.double() + skew * torch.log(strike.double() / spot.double()) ** 2


def _normal_cdf(x: Tensor) -> Tensor:
    """Accurate far to the left too, where ``torch.special.ndtr`` cancels to 0 from -8.3 on."""
    return 0.5 * torch.erfc(-math.sqrt(0.5) * x)
