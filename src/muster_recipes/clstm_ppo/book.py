"""The positions of an account: ``NUM_SLOTS`` slots per environment, as tensors.

Pure functions. Every position is a number of contracts of one strategy of the action table; its
strikes follow from the price of the underlying when it was opened.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import SHARES_PER_CONTRACT
from muster_recipes.clstm_ppo.offers import Order
from muster_recipes.clstm_ppo.quotes import SECONDS_PER_YEAR, Bars, Legs, delta, mid


class Book(NamedTuple):
    """[num_envs, slots]; an empty slot has ``kind`` 0 and zeros.

    ``kind`` int64: the action that opened it. The rest float64: ``opened_at`` (price of the
    underlying), ``expiry`` (seconds since 1970), ``contracts``, ``paid`` (dollars, costs
    included; negative where received) and ``owed`` (dollars locked up).
    """

    kind: Tensor
    opened_at: Tensor
    expiry: Tensor
    contracts: Tensor
    paid: Tensor
    owed: Tensor


class Marks(NamedTuple):
    """Of positions at a bar, [num_envs, slots]: ``value`` in dollars at mid, at expiry intrinsic;
    ``delta`` of one contract per share; ``exit_cost`` of selling it now, in dollars, and whether
    the volume ``can_exit``."""

    value: Tensor
    delta: Tensor
    exit_cost: Tensor
    can_exit: Tensor


def empty_book(num_envs: int, slots: int, device: torch.device) -> Book:
    zeros = torch.zeros(num_envs, slots, dtype=torch.float64, device=device)
    return Book(zeros.long(), zeros, zeros, zeros, zeros, zeros)


def opened(book: Book, kind: Tensor, order: Order, bars: Bars, legs: Legs) -> Book:
    """With a position of ``kind`` [num_envs] in the first free slot; 0: nothing is opened."""
    free = book.kind == 0
    first = free & (free.cumsum(-1) == 1)
    here = first & (kind > 0)[:, None]
    new = (
        kind,
        bars.spot,
        bars.time + legs.seconds[kind],
        order.contracts,
        order.outlay,
        order.owed,
    )
    return Book(*(torch.where(here, x[:, None], y) for x, y in zip(new, book, strict=True)))


def without(book: Book, gone: Tensor) -> Book:
    """With the slots emptied where ``gone`` [num_envs, slots]."""
    return Book(*(x.masked_fill(gone, 0) for x in book))


def marks(book: Book, bars: Bars, legs: Legs, skew: float, with_costs: bool) -> Marks:
    """At ``bars`` [num_envs]."""
    wide, slot = bars.expanded(2), bars.expanded(1)
    ratio, is_call = legs.ratio[book.kind], legs.is_call[book.kind]
    # An empty slot is priced as if opened now, and counts 0 times: nothing overflows.
    opened_at = torch.where(book.kind > 0, book.opened_at, slot.spot)
    strike = legs.strike[book.kind] * opened_at[..., None]
    years = ((book.expiry - slot.time) / SECONDS_PER_YEAR)[..., None]
    mids = mid(wide, strike, years, is_call, skew)
    shares = legs.shares[book.kind]
    per_contract = SHARES_PER_CONTRACT * (ratio * mids).sum(-1) + shares * slot.spot
    deltas = (ratio * delta(wide, strike, years, is_call, skew)).sum(-1)
    unit = costs.option_cost(mids, strike / wide.spot, (ratio > 0).double())
    fixed, per_slippage = ((ratio.abs() * x).sum(-1) for x in unit)
    share = book.contracts * legs.order[book.kind] / costs.series_contracts(slot.volume)
    return Marks(
        value=book.contracts * per_contract,
        delta=deltas + shares / SHARES_PER_CONTRACT,
        exit_cost=with_costs * book.contracts * (fixed + costs.slippage(share) * per_slippage),
        can_exit=share < costs.MAX_ORDER_SHARE,
    )
