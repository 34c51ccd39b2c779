"""What an agent sees of its own account, as numbers of order one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.clstm_ppo.actions import NUM_SLOTS, ActionSpace
from muster_recipes.clstm_ppo.book import Book, Marks
from muster_recipes.clstm_ppo.quotes import SECONDS_PER_DAY, Conditions, Legs

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
