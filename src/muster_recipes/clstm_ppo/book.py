"""The positions of an account: ``NUM_SLOTS`` slots per environment, as tensors.

Pure functions. Every position is a number of contracts of one strategy of the action table; its
strikes follow from the price of the underlying when it was opened. An agent sees its own account as
numbers of order one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import NUM_SLOTS, SHARES_PER_CONTRACT, ActionSpace
from muster_recipes.clstm_ppo.offers import Order
from muster_recipes.clstm_ppo.quotes import (
    SECONDS_PER_DAY,
    SECONDS_PER_YEAR,
    Conditions,
    Legs,
    Rules,
    mid_and_delta,
)


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
    """What positions are worth at a bar, [num_envs, slots]: ``value`` in dollars at mid, at expiry
    intrinsic; ``delta`` of one contract per share; ``exit_cost`` of selling it now, in dollars,
    and whether the volume lets it: ``can_exit``."""

    value: Tensor
    delta: Tensor
    exit_cost: Tensor
    can_exit: Tensor

    def without(self, gone: Tensor) -> Marks:
        kept = (~gone).double()
        return Marks(
            self.value * kept, self.delta * kept, self.exit_cost * kept, self.can_exit & ~gone
        )


def empty_book(num_envs: int, slots: int, device: torch.device) -> Book:
    zeros = torch.zeros(num_envs, slots, dtype=torch.float64, device=device)
    return Book(zeros.long(), zeros, zeros, zeros, zeros, zeros)


def opened(book: Book, kind: Tensor, order: Order, bars: Conditions, legs: Legs) -> Book:
    """The book with a position of ``kind`` [num_envs] in its first free slot; kind 0 opens none."""
    free = book.kind == 0
    first = free & (free.cumsum(-1) == 1)
    here = (first & (kind > 0)[:, None]).double()
    expiry = bars.time + legs.seconds[kind]
    new = (bars.spot, expiry, order.contracts, order.outlay, order.owed)
    # A free slot holds zeros, so adding is putting.
    return Book(
        book.kind + here.long() * kind[:, None],
        *(torch.addcmul(old, here, x[:, None]) for old, x in zip(book[1:], new, strict=True)),
    )


def without(book: Book, gone: Tensor) -> Book:
    """The book with its slots emptied where ``gone`` [num_envs, slots]."""
    kept = (~gone).double()
    return Book(book.kind.masked_fill(gone, 0), *(x * kept for x in book[1:]))


def marks(book: Book, bars: Conditions, legs: Legs, rules: Rules) -> Marks:
    """Mark the positions at ``bars`` [num_envs]. Where nothing can be closed, exits are zeros."""
    # Positions in one row, legs in front: broadcasting is then over whole rows, which is fast.
    num_envs, slots = book.kind.shape
    at = Conditions(*(x[:, None].expand(-1, slots).reshape(-1) for x in bars))
    kind, opened_at, expiry, contracts = (x.reshape(-1) for x in book[:4])
    # An empty slot is priced as if opened now, and counts 0 times: nothing overflows.
    opened_at = torch.where(kind > 0, opened_at, at.spot)
    strike, ratio, is_call = (
        table.index_select(1, kind) for table in (legs.strike, legs.ratio, legs.is_call)
    )
    strike = strike * opened_at
    years = (expiry - at.time) / SECONDS_PER_YEAR
    mids, deltas = mid_and_delta(at, strike, years, is_call, rules)
    shares = legs.shares.index_select(0, kind)
    value = contracts * (SHARES_PER_CONTRACT * (ratio * mids).sum(0) + shares * at.spot)
    delta = (ratio * deltas).sum(0) + shares / SHARES_PER_CONTRACT
    exit_cost, can_exit = torch.zeros_like(value), torch.zeros_like(kind, dtype=torch.bool)
    if rules.can_close:
        order = contracts * legs.order.index_select(0, kind)
        share = order / costs.series_contracts(at.volume)
        can_exit = share < costs.MAX_ORDER_SHARE
    if rules.can_close and rules.with_costs:
        unit = costs.option_cost(mids, strike / at.spot, (ratio > 0).double())
        fixed, per_slippage = ((ratio.abs() * x).sum(0) for x in unit)
        exit_cost = contracts * (fixed + costs.slippage(share) * per_slippage)
    return Marks(*(x.view(num_envs, slots) for x in (value, delta, exit_cost, can_exit)))


ACCOUNT = ("cash", "value", "drawdown", "step")
SLOT = ("moneyness", "months_left", "delta", "unrealised", "committed")


class Account(NamedTuple):
    """Shares of the capital, but ``drawdown`` (of the peak value) and ``step`` (of the episode's
    bars); [num_envs]."""

    cash: Tensor
    value: Tensor
    drawdown: Tensor
    step: Tensor


def portfolio_names(space: ActionSpace) -> tuple[str, ...]:
    """Names of the entries of ``portfolio``: the account's, each number of all slots, one-hots."""
    numbers = [f"slot {i} {name}" for name in SLOT for i in range(NUM_SLOTS)]
    kinds = [f"slot {i} is {family}" for i in range(NUM_SLOTS) for family in space.families]
    return (*ACCOUNT, *numbers, *kinds)


def one_hot_families(space: ActionSpace, device: torch.device) -> Tensor:
    """Float32 [kinds, families]; no position is all zeros."""
    rows = torch.zeros(1 + len(space.strategies), len(space.families))
    for kind, strategy in enumerate(space.strategies, start=1):
        rows[kind, space.families.index(strategy.family)] = 1.0
    return rows.to(device)


def portfolio(
    account: Account,
    book: Book,
    marks: Marks,
    bars: Conditions,
    legs: Legs,
    one_hot: Tensor,
    capital: float,
) -> Tensor:
    """Float32 [num_envs, len(portfolio_names)].

    Of a slot: ln(K / S) with the mean strike K, months of 30 days to expiry, delta of one
    contract per share, unrealised gain (costs paid included) and money committed (paid and
    locked up), both as shares of the capital, and the one-hot of its family.
    """
    bars = bars.expanded(1)
    is_held = book.kind > 0
    centre = legs.centre.index_select(0, book.kind.flatten()).view_as(book.expiry)
    centre = centre * torch.where(is_held, book.opened_at, bars.spot)
    numbers = torch.cat(
        [
            torch.stack(account, dim=-1),
            is_held * torch.log(centre / bars.spot),
            is_held * (book.expiry - bars.time) / (30.0 * SECONDS_PER_DAY),
            marks.delta,
            (marks.value - book.paid) / capital,
            (book.paid + book.owed) / capital,
        ],
        dim=-1,
    )
    families = one_hot.index_select(0, book.kind.flatten()).view(len(numbers), -1)
    return torch.cat([numbers.float(), families], dim=-1)
