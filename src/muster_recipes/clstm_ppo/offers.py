"""What opening each strategy takes at each bar: computed once, ahead of all episodes.

Offers depend on the bar alone, so an environment only looks them up. A bar takes 24 bytes per
strategy: 0.5 KB with 31 actions, 2.2 KB with 91.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import SHARES_PER_CONTRACT
from muster_recipes.clstm_ppo.quotes import SECONDS_PER_YEAR, Bars, Legs, mid

#: An order is made so small that it is at most this share of its series's volume, unless that
#: would be less than one contract. It leaves room to close in a bar with less volume.
MAX_SHARE_SOUGHT = 0.04
#: Dollars per contract: the least that sizing takes a contract to risk, however cheap it is.
_LEAST_RISK = 1.0
_BARS_AT_ONCE = 4096


class Terms(NamedTuple):
    """What an order depends on beside the offer; tensors that broadcast."""

    spot: Tensor
    volume: Tensor
    owed: Tensor
    at_risk: Tensor
    order: Tensor
    shares: Tensor


class Order(NamedTuple):
    """To open a position. ``outlay``: cash paid (received where negative), ``cost`` included;
    ``owed``: cash locked up until it ends; ``is_filled``: the volume suffices."""

    contracts: Tensor
    outlay: Tensor
    cost: Tensor
    owed: Tensor
    is_filled: Tensor


def offers(bars: Bars, legs: Legs, skew: float, with_costs: bool) -> Tensor:
    """Float64 [bars, 3, strategies], in dollars per contract: the price at mid of all legs and
    shares (negative where received); the fixed cost; the cost per unit of slippage."""
    parts = [
        _offers(Bars(*chunk), legs, skew, with_costs)
        for chunk in zip(*(x.split(_BARS_AT_ONCE) for x in bars), strict=True)
    ]
    return torch.cat(parts)


def order(offer: tuple[Tensor, ...], terms: Terms, value: Tensor, with_costs: bool) -> Order:
    """The order that a portfolio of ``value`` sends. ``offer``: the three figures of ``offers``.

    Size: so many contracts that at most ``at_risk`` of the value can be lost, at most
    ``MAX_SHARE_SOUGHT`` of the volume, and at least one.
    """
    price, fixed, per_slippage = offer
    owed = SHARES_PER_CONTRACT * terms.spot * terms.owed
    fillable = costs.series_contracts(terms.volume) / terms.order
    wanted = terms.at_risk * value / (price + owed).clamp(min=_LEAST_RISK)
    contracts = torch.minimum(wanted, MAX_SHARE_SOUGHT * fillable).floor().clamp(min=1.0)
    share = contracts / fillable
    cost = contracts * (fixed + costs.slippage(share) * per_slippage)
    if with_costs:
        cost = cost + costs.shares_cost(
            terms.spot, contracts * terms.shares, terms.volume, is_sale=False
        )
    return Order(
        contracts=contracts,
        outlay=contracts * price + cost,
        cost=cost,
        owed=contracts * owed,
        is_filled=share < costs.MAX_ORDER_SHARE,
    )


def _offers(bars: Bars, legs: Legs, skew: float, with_costs: bool) -> Tensor:
    # Many strategies share a leg; each is priced once.
    each = torch.stack([legs.strike, legs.seconds[:, None].expand_as(legs.strike), legs.is_call])
    each, back = torch.unique(each[:, 1:].flatten(1), dim=1, return_inverse=True)
    strike, seconds, is_call = each
    bars = bars.expanded(1)
    mids = mid(bars, bars.spot * strike, seconds / SECONDS_PER_YEAR, is_call, skew)
    ratio = legs.ratio[1:]
    mids = mids[:, back].view(-1, *ratio.shape)
    price = SHARES_PER_CONTRACT * (ratio * mids).sum(-1) + bars.spot * legs.shares[1:]
    if not with_costs:
        return torch.stack([price, torch.zeros_like(price), torch.zeros_like(price)], dim=1)
    unit = costs.option_cost(mids, legs.strike[1:], (ratio < 0).double())
    fixed, per_slippage = ((ratio.abs() * x).sum(-1) for x in unit)
    return torch.stack([price, fixed, per_slippage], dim=1)
