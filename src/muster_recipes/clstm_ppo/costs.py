"""What trading costs. Pure functions on float64 tensors that broadcast; money in dollars.

The specification's numbers, and where it leaves a choice:

- A cost is charged once, when an order is filled. Value is marked at mid; nothing is charged on
  marks, nor for options that settle at expiry.
- The spread is (2 % + 3 % |1 - K/S|) of mid in total, half of it per side; at most all of mid.
- One series of options trades ``SERIES_VOLUME`` of the underlying's volume in the same bar,
  counted in shares. An order's share of that volume sets its slippage, as a part of mid.
- A sale's SEC fee is charged on what is received: mid less half the spread less slippage.
- Shares have no spread and no commission here: slippage on both sides, SEC and TAF on sales.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo.actions import SHARES_PER_CONTRACT

COMMISSION_PER_CONTRACT = 0.65
OCC_PER_CONTRACT = 0.04
SEC_PER_DOLLAR_SOLD = 0.00278 / 1000.0
TAF_PER_SHARE_SOLD = 0.000166
SPREAD_AT_THE_MONEY = 0.02
SPREAD_PER_DISTANCE = 0.03
MAX_SPREAD = 1.0
#: Slippage by order / volume: (below this share, this part of mid).
SLIPPAGE = ((0.01, 0.001), (0.05, 0.005), (0.10, 0.01), (0.20, 0.02))
#: An order of this share of the volume or more cannot be filled.
MAX_ORDER_SHARE = SLIPPAGE[-1][0]
SERIES_VOLUME = 0.05


class UnitCost(NamedTuple):
    """What one contract costs in dollars: ``fixed`` + slippage x ``per_slippage``."""

    fixed: Tensor
    per_slippage: Tensor


def half_spread(strike_to_spot: Tensor) -> Tensor:
    """Half the spread between bid and ask, as a part of mid."""
    spread = SPREAD_AT_THE_MONEY + SPREAD_PER_DISTANCE * (1.0 - strike_to_spot).abs()
    return 0.5 * spread.clamp(max=MAX_SPREAD)


def slippage(order_share: Tensor) -> Tensor:
    """Slippage as a part of mid, by order / volume; beyond the last step that of the last."""
    rate = torch.full_like(order_share, SLIPPAGE[0][1])
    for (begin, low), (_, high) in pairwise(SLIPPAGE):
        # As a float64 factor: faster than a mask, and a factor of bool would give float32.
        rate = rate + (high - low) * (order_share >= begin).to(rate.dtype)
    return rate


def series_contracts(volume: Tensor) -> Tensor:
    """How many contracts of one series trade in a bar in which ``volume`` shares do."""
    return volume * (SERIES_VOLUME / SHARES_PER_CONTRACT)


def least_volume() -> float:
    """The volume of the underlying in a bar, in shares, up to which no contract can be filled."""
    return SHARES_PER_CONTRACT / SERIES_VOLUME / MAX_ORDER_SHARE


def option_cost(mid: Tensor, strike_to_spot: Tensor, is_sale: Tensor) -> UnitCost:
    """What it costs to trade one contract of ``mid`` per share; ``is_sale`` is 1.0 or 0.0."""
    notional = SHARES_PER_CONTRACT * mid
    spread = notional * half_spread(strike_to_spot)
    taf = SHARES_PER_CONTRACT * TAF_PER_SHARE_SOLD
    sale = SEC_PER_DOLLAR_SOLD * (notional - spread) + taf
    fixed = spread + (COMMISSION_PER_CONTRACT + OCC_PER_CONTRACT) + is_sale * sale
    return UnitCost(fixed, notional * (1.0 - is_sale * SEC_PER_DOLLAR_SOLD))


def shares_cost(spot: Tensor, shares: Tensor, volume: Tensor, is_sale: bool) -> Tensor:
    """What it costs to trade ``shares`` at ``spot`` while ``volume`` shares trade in the bar."""
    notional = spot * shares
    slipped = notional * slippage(shares / volume.clamp(min=1.0))
    if not is_sale:
        return slipped
    return slipped + SEC_PER_DOLLAR_SOLD * (notional - slipped) + TAF_PER_SHARE_SOLD * shares
