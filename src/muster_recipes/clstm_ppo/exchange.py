"""What accounts share: everything about an options market that does not depend on an account."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster_recipes.clstm_ppo.actions import ActionSpace, action_space
from muster_recipes.clstm_ppo.book import Book, Marks, marks
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.offers import Offers, Order, offers_of, order
from muster_recipes.clstm_ppo.quotes import Conditions, Legs, Rules, legs_of


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """``bars`` float64 [bars, 4] has the columns of ``Conditions``."""

    space: ActionSpace
    bars: Tensor
    legs: Legs
    rules: Rules
    offers: Offers

    @staticmethod
    def of(market: Market, config: ClstmPpoConfig, device: torch.device) -> Exchange:
        space = action_space(config.action_space)
        legs = legs_of(space, config.expiry_days, device)
        columns = (market.close, market.volatility, market.volume, market.time.double())
        bars = torch.stack(columns, dim=-1).to(device)
        rules = Rules(
            skew=config.skew,
            with_costs=config.costs,
            with_shares=any(strategy.shares for strategy in space.strategies),
            can_close=space.num_closing > 0,
        )
        return Exchange(
            space=space,
            bars=bars,
            legs=legs,
            rules=rules,
            offers=offers_of(Conditions(*bars.unbind(-1)), legs, rules),
        )

    def bars_at(self, bar: Tensor) -> Conditions:
        return Conditions(*self.bars.index_select(0, bar).unbind(-1))

    def order(
        self, bar: Tensor, bars: Conditions, kind: Tensor, value: Tensor, free_cash: Tensor
    ) -> Order:
        """The order for strategy ``kind`` [num_envs], 1 or more; ``bars`` are those of ``bar``."""
        terms = self.offers.terms[bar, :, kind - 1]
        return order(terms, bars, self.legs, kind, value, free_cash, self.rules)

    def marks(self, book: Book, bars: Conditions) -> Marks:
        return marks(book, bars, self.legs, self.rules)

    def mask(self, bar: Tensor, book: Book, marks: Marks, cash: Tensor) -> Tensor:
        """Bool [num_envs, actions]: hold; open, if a slot is free and one contract can be paid
        for and filled; close, if the slot is held and can be sold without cash falling short.
        """
        is_held = book.kind > 0
        free_cash = cash - book.owed.sum(-1)
        within = torch.where(is_held.all(-1), -torch.inf, free_cash)
        needed = self.offers.needed.index_select(0, bar)
        parts = [torch.ones_like(is_held[:, :1]), needed <= within[:, None]]
        if self.rules.can_close:
            proceeds = marks.value - marks.exit_cost + book.owed
            parts.append(is_held & marks.can_exit & (proceeds + free_cash[:, None] >= 0))
        return torch.cat(parts, dim=-1)
