"""What it costs to open each strategy at each bar, computed once, ahead of all episodes.

Offers depend on the bar alone, so an environment only looks them up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import SHARES_PER_CONTRACT
from muster_recipes.clstm_ppo.quotes import SECONDS_PER_YEAR, Conditions, Legs, Rules, mid_and_delta

#: An order is made so small that it is at most this share of its series's volume, unless that
#: would be less than one contract. It leaves room to close in a bar with less volume.
MAX_SHARE_SOUGHT = 0.04
#: Dollars per contract: the least that sizing takes a contract to risk, however cheap it is.
_LEAST_RISK = 1.0
_BARS_AT_ONCE = 4096


class Offers(NamedTuple):
    """Float64, in dollars per contract, 32 bytes per bar and strategy.

    ``terms`` [bars, 3, strategies]: the price at mid of all legs and shares (negative where
    received); the fixed cost; the cost per unit of slippage. ``needed`` [bars, strategies]: free
    cash that one contract takes, infinite where the volume cannot fill it.
    """

    terms: Tensor
    needed: Tensor


class Order(NamedTuple):
    """An order that opens a position. ``outlay``: cash paid (received where negative), ``cost``
    included; ``owed``: cash locked up until it ends.
    """

    contracts: Tensor
    outlay: Tensor
    cost: Tensor
    owed: Tensor


def offers_of(bars: Conditions, legs: Legs, rules: Rules) -> Offers:
    """What it costs to open each strategy at each of ``bars`` [bars]."""
    chunks = zip(*(torch.split(x, _BARS_AT_ONCE) for x in bars), strict=True)
    parts = [_offers(Conditions(*chunk), legs, rules) for chunk in chunks]
    return Offers(*(torch.cat(each) for each in zip(*parts, strict=True)))


def order(
    terms: Tensor,
    bars: Conditions,
    legs: Legs,
    kind: Tensor,
    value: Tensor,
    free_cash: Tensor,
    rules: Rules,
) -> Order:
    """The order for ``kind`` [n] on ``terms`` [n, 3] that a portfolio of ``value`` sends.

    Size: so many contracts that at most the strategy's share of the value can be lost; at most
    ``MAX_SHARE_SOUGHT`` of the volume; no more than ``free_cash`` pays for, what becomes locked
    up included; and at least one.
    """
    price, owed = terms[:, 0], SHARES_PER_CONTRACT * bars.spot * legs.owed[kind]
    fillable = costs.series_contracts(bars.volume) / legs.order[kind]
    wanted = legs.at_risk[kind] * value / (price + owed).clamp(min=_LEAST_RISK)
    most = torch.minimum(wanted, MAX_SHARE_SOUGHT * fillable).floor().clamp(min=1.0)

    shares = legs.shares[kind]
    # Slippage grows with the size, so that what the largest order costs per contract is enough.
    per_contract = price + owed + _cost(most, fillable, terms, shares, bars, rules) / most
    paid_for = (free_cash / per_contract.clamp(min=1e-9)).floor()
    contracts = torch.minimum(most, paid_for).clamp(min=1.0)
    cost = _cost(contracts, fillable, terms, shares, bars, rules)
    return Order(contracts, contracts * price + cost, cost, contracts * owed)


def _cost(
    contracts: Tensor,
    fillable: Tensor,
    terms: Tensor,
    shares: Tensor,
    bars: Conditions,
    rules: Rules,
) -> Tensor:
    if not rules.with_costs:
        return torch.zeros_like(contracts)
    rate = costs.slippage(contracts / fillable)
    cost = contracts * (terms[:, 1] + rate * terms[:, 2])
    if not rules.with_shares:
        return cost
    return cost + costs.shares_cost(bars.spot, contracts * shares, bars.volume, is_sale=False)


def _offers(bars: Conditions, legs: Legs, rules: Rules) -> tuple[Tensor, Tensor]:
    ratio, shares = legs.ratio[:, 1:], legs.shares[1:]
    # Many strategies share a leg; each is priced once.
    each = torch.stack([legs.strike, legs.seconds.expand_as(legs.strike), legs.is_call])
    each, back = torch.unique(each[..., 1:].flatten(1), dim=1, return_inverse=True)
    strike, seconds, is_call = each
    bars = bars.expanded(1)
    years = seconds / SECONDS_PER_YEAR
    mids, _ = mid_and_delta(bars, bars.spot * strike, years, is_call, rules)
    mids = mids[:, back].view(-1, *ratio.shape)
    price = SHARES_PER_CONTRACT * (ratio * mids).sum(1) + bars.spot * shares
    needed = price + SHARES_PER_CONTRACT * bars.spot * legs.owed[1:]
    share = legs.order[1:] / costs.series_contracts(bars.volume)
    fixed = per_slippage = torch.zeros_like(price)
    if rules.with_costs:
        unit = costs.option_cost(mids, legs.strike[:, 1:], (ratio < 0).double())
        fixed, per_slippage = ((ratio.abs() * x).sum(1) for x in unit)
        needed = needed + fixed + costs.slippage(share) * per_slippage
        needed = needed + costs.shares_cost(bars.spot, shares, bars.volume, is_sale=False)
    needed = needed.masked_fill(~(share < costs.MAX_ORDER_SHARE), torch.inf)
    return torch.stack([price, fixed, per_slippage], dim=1), needed
