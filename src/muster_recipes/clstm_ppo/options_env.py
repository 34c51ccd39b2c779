"""The options market as batched environments: one account per environment.

A step: the agent has seen bar t; it trades at bar t's close; then bar t + 1 comes, what has
expired settles at its close, and the account is marked at mid. The reward is the change of that
value / initial capital. Cash earns no interest.

Reading of the specification where it leaves a choice (more in ``actions``, ``costs``, ``offers``):

- An action that the mask excludes is not executed: it is a hold.
- A position expires at the first bar at or after its expiry, at that bar's close. Options are
  settled in cash without a cost; a covered call's shares are sold, with costs.
- Every order is paid and every debt that can arise is locked up when it is opened, so there is no
  margin call short of ruin. Ruin: the account's value is below ``RUINED_BELOW`` of the capital, or
  its cash below 0; the episode terminates.
- At the end of an episode open positions stay marked at mid; they are not sold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muster.rl.batched import BatchedEnv, Change
from muster.rl.environment import (
    ACTION_MASK,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Place,
    Split,
)
from muster.rl.streams import EPISODE, integers
from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import NUM_SLOTS, action_space
from muster_recipes.clstm_ppo.book import Book, Marks, empty_book, marks, opened, without
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.offers import Order, Terms, offers, order
from muster_recipes.clstm_ppo.portfolio import (
    Account,
    one_hot_families,
    portfolio,
    portfolio_names,
)
from muster_recipes.clstm_ppo.quotes import Bars, legs_of

RUINED_BELOW = 0.01
#: Dollars below 0 that rounding may leave.
_ROUNDING = 0.01
#: What is told of a finished episode. Sharpe: mean / standard deviation of the bars' returns,
#: annualised, 0 without any variation. ``win_rate``: of positions that have ended; 0 without any.
EXTRAS = ("final_return", "max_drawdown", "sharpe", "trades", "win_rate", "costs")
#: Columns of the row ``tally``: sums over the episode so far.
_TALLY = ("returns", "returns_squared", "trades", "ended", "won", "costs")


class OptionsEnv(BatchedEnv):
    """One account of ``config.capital`` per environment, on bars of one split."""

    def __init__(self, market: Market, split: Split, config: ClstmPpoConfig, place: Place) -> None:
        space = action_space(config.action_space)
        names = portfolio_names(space)
        self.episode_bars = episode_bars(market, config)
        spec = EnvSpec(
            name=f"options-{config.action_space}",
            num_envs=place.num_envs,
            observation={
                "bar": Entry((), torch.int64),
                "portfolio": Entry((len(names),)),
                ACTION_MASK: Entry((space.num_actions,), torch.bool),
            },
            actions=Discrete(space.num_actions),
            extras=EXTRAS,
            min_truncation_steps=self.episode_bars,
        )
        super().__init__(spec, place)
        device = place.device
        self.config = config
        self.capital = config.capital
        self.space = space
        self.bars_per_year = market.bars_per_year
        self.starts = _checked(market, split, self.episode_bars).to(device)
        self.legs = legs_of(space, config.expiry_days, device)
        self.one_hot = one_hot_families(space, device)
        self.slots = torch.arange(NUM_SLOTS, device=device)
        bars = Bars(market.close, market.volatility, market.volume, market.time.double())
        #: [bars, 4] and [bars, 3, strategies].
        self.bars = torch.stack(bars, dim=-1).to(device)
        self.offers = offers(Bars(*self.bars.unbind(-1)), self.legs, config.skew, config.costs)
        self._blank = self._blank_rows()
        self._first_mask = self._masks_of_starts()

    def fresh(self) -> dict[str, Tensor]:
        start = integers(
            self.place.seed, EPISODE, self.index, self.episode.clamp(min=0), len(self.starts)
        )
        return {
            **self._blank,
            "bar": self.starts[start],
            "mask": self._first_mask[start],
        }

    def observe(self) -> Observation:
        # Everything that is seen was computed once, by ``advance``.
        return {
            "bar": self.rows["bar"],
            "portfolio": self.rows["portfolio"],
            ACTION_MASK: self.rows["mask"],
        }

    def advance(self, actions: Tensor) -> Change:
        rows = self.rows
        bars = self._bars_at(rows["bar"])
        book = Book(*(rows[f"book.{name}"] for name in Book._fields))
        legal = rows["mask"].gather(1, actions[:, None]).squeeze(1)
        actions = torch.where(legal, actions, 0)

        is_open = (actions >= 1) & (actions <= len(self.space.strategies))
        kind = torch.where(is_open, actions, 0)
        bought = self._order(rows["bar"], bars, kind, rows["value"])
        is_closed = self._is_closed(actions)
        sold = is_closed * (rows["mark"] - rows["exit_cost"])
        cash = rows["cash"] - is_open * bought.outlay + sold.sum(-1)
        paid_costs = is_open * bought.cost + (is_closed * rows["exit_cost"]).sum(-1)
        won = is_closed & (sold > book.paid)
        book = opened(without(book, is_closed), kind, bought, bars, self.legs)

        bar, step = rows["bar"] + 1, rows["step"] + 1
        bars = self._bars_at(bar)
        marked = marks(book, bars, self.legs, self.config.skew, self.config.costs)
        is_expired = (book.kind > 0) & (bars.time[:, None] >= book.expiry)
        share_costs = is_expired * self._share_costs(book, bars)
        settled = is_expired * (marked.value - share_costs)
        cash = cash + settled.sum(-1)
        paid_costs = paid_costs + share_costs.sum(-1)
        won = won | (is_expired & (settled > book.paid))
        book = without(book, is_expired)
        marked = Marks(*(x.masked_fill(is_expired, 0) for x in marked))

        value = cash + marked.value.sum(-1)
        change = value - rows["value"]
        ratio = change / rows["value"]
        ended = (is_closed | is_expired).sum(-1)
        news = (ratio, ratio * ratio, is_open, ended, won.sum(-1), paid_costs)
        tally = rows["tally"] + torch.stack([x.double() for x in news], dim=-1)
        peak = torch.maximum(rows["peak"], value)
        drawdown = 1.0 - value / peak
        worst = torch.maximum(rows["max_drawdown"], drawdown)
        account = Account(
            cash / self.capital, value / self.capital, drawdown, step / self.episode_bars
        )
        self.rows = {
            "bar": bar,
            "step": step,
            "cash": cash,
            "value": value,
            "peak": peak,
            "max_drawdown": worst,
            "tally": tally,
            "mark": marked.value,
            "exit_cost": marked.exit_cost,
            "portfolio": portfolio(
                account, book, marked, bars, self.legs, self.one_hot, self.capital
            ),
            "mask": self._mask(bar, bars, book, marked, cash, value),
            **{f"book.{name}": x for name, x in zip(Book._fields, book, strict=True)},
        }
        return Change(
            reward=(change / self.capital).float(),
            terminated=(value < RUINED_BELOW * self.capital) | (cash < -_ROUNDING),
            truncated=step >= self.episode_bars,
            extras=self._extras(value, worst, tally, step),
        )

    def _bars_at(self, bar: Tensor) -> Bars:
        return Bars(*self.bars[bar].unbind(-1))

    def _order(self, bar: Tensor, bars: Bars, kind: Tensor, value: Tensor) -> Order:
        """The order of ``kind`` at ``bar``, [num_envs]; of any strategy where kind is 0."""
        kind = kind.clamp(min=1)
        offer = self.offers[bar, :, kind - 1].unbind(-1)
        return order(offer, self._terms(bars, kind), value, self.config.costs)

    def _terms(self, bars: Bars, kind: Tensor | slice) -> Terms:
        legs = self.legs
        return Terms(
            spot=bars.spot,
            volume=bars.volume,
            owed=legs.owed[kind],
            at_risk=legs.at_risk[kind],
            order=legs.order[kind],
            shares=legs.shares[kind],
        )

    def _is_closed(self, actions: Tensor) -> Tensor:
        """Bool [num_envs, slots]."""
        first = 1 + len(self.space.strategies)
        return (actions[:, None] - first) == self.slots

    def _share_costs(self, book: Book, bars: Bars) -> Tensor:
        """Of selling the shares of each position."""
        if not self.config.costs or not any(s.shares for s in self.space.strategies):
            return torch.zeros_like(book.paid)
        shares = book.contracts * self.legs.shares[book.kind]
        bars = bars.expanded(1)
        return costs.shares_cost(bars.spot, shares, bars.volume, is_sale=True)

    def _mask(
        self, bar: Tensor, bars: Bars, book: Book, marked: Marks, cash: Tensor, value: Tensor
    ) -> Tensor:
        """Bool [num_envs, actions]: hold, open, close."""
        free_cash = (cash - book.owed.sum(-1))[:, None]
        wanted = order(
            self.offers[bar].unbind(1),
            self._terms(bars.expanded(1), slice(1, None)),
            value[:, None],
            self.config.costs,
        )
        is_held = book.kind > 0
        can_open = wanted.is_filled & (wanted.outlay + wanted.owed <= free_cash)
        can_open = can_open & ~is_held.all(-1, keepdim=True)
        hold = torch.ones_like(can_open[:, :1])
        if not self.space.num_closing:
            return torch.cat([hold, can_open], dim=-1)
        proceeds = marked.value - marked.exit_cost
        can_close = is_held & marked.can_exit & (proceeds + book.owed + free_cash >= 0)
        return torch.cat([hold, can_open, can_close], dim=-1)

    def _extras(
        self, value: Tensor, worst: Tensor, tally: Tensor, step: Tensor
    ) -> dict[str, Tensor]:
        returns, squared, trades, ended, won, paid = tally.unbind(-1)
        mean = returns / step
        deviation = (squared / step - mean * mean).clamp(min=0.0).sqrt()
        sharpe = mean / deviation.clamp(min=1e-12) * self.bars_per_year**0.5
        numbers = (
            value / self.capital - 1.0,
            worst,
            sharpe,
            trades,
            won / ended.clamp(min=1.0),
            paid,
        )
        return dict(zip(EXTRAS, numbers, strict=True))

    def _blank_rows(self) -> dict[str, Tensor]:
        """What every episode begins with, but for where."""
        num_envs, device = self.place.num_envs, self.device
        book = empty_book(num_envs, NUM_SLOTS, device)
        capital = torch.full((num_envs,), self.capital, dtype=torch.float64, device=device)
        zeros = torch.zeros_like(capital)
        seen = torch.zeros(num_envs, *self.spec.observation["portfolio"].shape, device=device)
        seen[:, :2] = 1.0
        return {
            "bar": zeros.long(),
            "step": zeros.long(),
            "cash": capital,
            "value": capital,
            "peak": capital,
            "max_drawdown": zeros,
            "tally": zeros[:, None].expand(-1, len(_TALLY)).contiguous(),
            "mark": book.paid,
            "exit_cost": book.paid,
            "portfolio": seen,
            "mask": torch.zeros(num_envs, self.space.num_actions, dtype=torch.bool, device=device),
            **{f"book.{name}": x for name, x in zip(Book._fields, book, strict=True)},
        }

    def _masks_of_starts(self) -> Tensor:
        """Bool [starts, actions]: what an account without positions can do there."""
        parts = []
        for bar in torch.split(self.starts, 4096):
            bars = self._bars_at(bar)
            book = empty_book(len(bar), NUM_SLOTS, self.device)
            marked = Marks(book.paid, book.paid, book.paid, book.kind > 0)
            capital = torch.full_like(bars.spot, self.capital)
            parts.append(self._mask(bar, bars, book, marked, capital, capital))
        return torch.cat(parts)


def episode_bars(market: Market, config: ClstmPpoConfig) -> int:
    """252 of daily bars, 200 of others, if not configured."""
    if config.episode_bars is not None:
        return config.episode_bars
    return 252 if market.bars_per_year == 252 else 200


def _checked(market: Market, split: Split, bars: int) -> Tensor:
    """The starts of ``split``; ValueError where the market breaks its promises about them."""
    starts = market.starts[split]
    last = starts + bars
    if len(starts) == 0 or int(last.max()) >= len(market.symbol):
        raise ValueError(
            f"The {split} split has {len(starts)} starts, the last of which needs {bars} bars "
            f"after it; the market has {len(market.symbol)} bars."
        )
    if bool((market.symbol[starts] != market.symbol[last]).any()):
        raise ValueError(f"An episode of the {split} split would cross from one symbol to another.")
    return starts
