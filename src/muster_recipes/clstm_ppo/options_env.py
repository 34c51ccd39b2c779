"""The options market as batched environments: one account per environment.

A step: the agent has seen bar t; it trades at bar t's close; then bar t + 1 comes, what has
expired settles at its close, and the account is marked at mid. The reward is the change of that
value / initial capital. Cash earns no interest.

How the specification is read where it leaves a choice (more in ``actions``, ``costs``, ``offers``):

- An action that the mask excludes is not executed: it is a hold.
- A position expires at the first bar at or after its expiry, at that bar's close. Options are
  settled in cash without a cost; a covered call's shares are sold, with costs.
- Every order is paid and every debt that can arise is locked up when it is opened, so there is no
  margin call short of ruin. Ruin: the account's value is below ``RUINED_BELOW`` of the capital, or
  its cash below 0; the episode terminates.
- At the end of an episode open positions stay marked at mid; they are not sold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muster.agents import (
    ACTION_MASK,
    BatchedEnv,
    Change,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Place,
    Split,
    streams,
)
from muster_recipes.clstm_ppo import costs
from muster_recipes.clstm_ppo.actions import NUM_SLOTS, ActionSpace
from muster_recipes.clstm_ppo.book import (
    Account,
    Book,
    Marks,
    empty_book,
    one_hot_families,
    opened,
    portfolio,
    portfolio_names,
    without,
)
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.exchange import Exchange
from muster_recipes.clstm_ppo.load import episode_bars_of, no_opening
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.quotes import Conditions

RUINED_BELOW = 0.01
#: Dollars below 0 that rounding may leave.
_ROUNDING = 0.01
#: What is reported of a finished episode. Sharpe: mean / standard deviation of the bars' returns,
#: annualised, 0 without any variation. ``win_rate``: of positions that have ended; 0 without any.
EXTRAS = ("final_return", "max_drawdown", "sharpe", "trades", "win_rate", "costs")
#: Columns of the row ``tally``: sums over the episode so far.
_TALLY = ("returns", "returns_squared", "trades", "ended", "won", "costs")


class OptionsEnv(BatchedEnv):
    """One account of ``config.capital`` per environment, on bars of one split."""

    def __init__(
        self,
        market: Market,
        split: Split,
        config: ClstmPpoConfig,
        place: Place,
        exchange: Exchange | None = None,
        show: Literal["bar", "features"] = "bar",
        spread: bool = False,
    ) -> None:
        """``exchange``: of the same market and config on the same device, to be shared by several
        environments; it takes up to a second to make. ``show``: the number of the bar, for a
        policy that has the market, or the market's features at it, for one that has not.
        ``spread``: environment i begins all its episodes in the symbol number i modulo how many
        there are, not in a random one.

        Raises:
            UsageError: an account could do nothing at any start of the split.
        """
        self.exchange = exchange or Exchange.of(market, config, place.device)
        self.space = self.exchange.space
        self.episode_bars = episode_bars_of(config, market.bars_per_year)
        seen = {"bar": Entry((), torch.int64)}
        self.features: Tensor | None = None
        if show == "features":
            seen = {"features": Entry((len(market.feature_names),))}
            self.features = market.features.to(place.device)
        super().__init__(_spec(self.space, seen, self.episode_bars, place.num_envs), place)
        self.capital = config.capital
        self.bars_per_year = market.bars_per_year
        self.starts = _checked(market, split, self.episode_bars).to(self.device)
        self.one_hot = one_hot_families(self.space, self.device)
        self.slots = torch.arange(NUM_SLOTS, device=self.device)
        self._blank = self._blank_rows(place.num_envs)
        self._first_mask = self._masks_of_starts()
        self._offered = self._symbols_of(market.symbol) if spread else None
        if not bool(self._first_mask[:, 1:].any()):
            raise no_opening(market, split, self.capital)

    def fresh(self) -> dict[str, Tensor]:
        seed, episode = self.place.seed, self.episode.clamp(min=0)
        first, num = self._offered or (0, len(self.starts))
        start = first + streams.integers(seed, streams.EPISODE, self.index, episode, num)
        mask = self._first_mask.index_select(0, start)
        return {**self._blank, "bar": self.starts[start], "mask": mask}

    def observe(self) -> Observation:
        # Everything that is seen was computed once, by ``advance``.
        bar = self.rows["bar"]
        seen = {"bar": bar} if self.features is None else {"features": self.features[bar]}
        return {
            **seen,
            "portfolio": self.rows["portfolio"],
            ACTION_MASK: self.rows["mask"],
        }

    def advance(self, actions: Tensor) -> Change:
        rows = self.rows
        book = Book(*(rows[f"book.{name}"] for name in Book._fields))
        is_legal = rows["mask"].gather(1, actions[:, None]).squeeze(1)
        traded = self._trade(torch.where(is_legal, actions, 0), book)
        bar, step = rows["bar"] + 1, rows["step"] + 1
        bars = self.exchange.bars_at(bar)
        settled = self._settle(traded.book, bars)
        book, marked = settled.book, settled.marks

        cash = rows["cash"] + traded.cash + settled.cash
        value = cash + marked.value.sum(-1)
        change = value - rows["value"]
        growth = change / rows["value"]
        ended, won = traded.ended + settled.ended, traded.won + settled.won
        news = (growth, growth * growth, traded.opened, ended, won, traded.cost + settled.cost)
        tally = rows["tally"] + torch.stack(news, dim=-1)
        peak = torch.maximum(rows["peak"], value)
        drawdown = 1.0 - value / peak
        account = Account(
            cash / self.capital, value / self.capital, drawdown, step / self.episode_bars
        )
        seen = portfolio(
            account,
            book,
            marked,
            bars,
            self.exchange.legs,
            self.one_hot,
            self.capital,
        )
        self.rows = {
            "bar": bar,
            "step": step,
            "cash": cash,
            "value": value,
            "peak": peak,
            "max_drawdown": torch.maximum(rows["max_drawdown"], drawdown),
            "tally": tally,
            "mark": marked.value,
            "exit_cost": marked.exit_cost,
            "portfolio": seen,
            "mask": self.exchange.mask(bar, book, marked, cash),
            **{f"book.{name}": x for name, x in zip(Book._fields, book, strict=True)},
        }
        return Change(
            reward=(change / self.capital).float(),
            terminated=(value < RUINED_BELOW * self.capital) | (cash < -_ROUNDING),
            truncated=step >= self.episode_bars,
            extras=self._extras(),
        )

    def _trade(self, actions: Tensor, book: Book) -> _Trades:
        """Trade at the close of the bar that was seen; all ``actions`` are possible."""
        rows, strategies = self.rows, self.space.strategies
        is_open = (actions >= 1) & (actions <= len(strategies))
        kind = torch.where(is_open, actions, 0)
        free_cash = rows["cash"] - book.owed.sum(-1)
        bars = self.exchange.bars_at(rows["bar"])
        bought = self.exchange.order(rows["bar"], bars, kind.clamp(min=1), rows["value"], free_cash)
        cash = torch.where(is_open, -bought.outlay, 0.0)
        cost = torch.where(is_open, bought.cost, 0.0)
        ended = won = torch.zeros_like(cash)
        if self.exchange.rules.can_close:
            is_closed = (actions[:, None] - 1 - len(strategies)) == self.slots
            received = is_closed * (rows["mark"] - rows["exit_cost"])
            cash, cost = cash + received.sum(-1), cost + (is_closed * rows["exit_cost"]).sum(-1)
            ended, won = is_closed.sum(-1).double(), _won(is_closed, received, book)
            book = without(book, is_closed)
        book = opened(book, kind, bought, bars, self.exchange.legs)
        return _Trades(book, cash, cost, is_open.double(), ended, won)

    def _settle(self, book: Book, bars: Conditions) -> _Settled:
        """Mark everything at ``bars`` and end what has expired by then."""
        legs, rules = self.exchange.legs, self.exchange.rules
        marked = self.exchange.marks(book, bars)
        bars = bars.expanded(1)
        is_expired = (book.kind > 0) & (bars.time >= book.expiry)
        received, cost = is_expired * marked.value, torch.zeros_like(bars.spot).squeeze(1)
        if rules.with_costs and rules.with_shares:
            shares = is_expired * book.contracts * legs.shares[book.kind]
            each = costs.shares_cost(bars.spot, shares, bars.volume, is_sale=True)
            received, cost = received - each, each.sum(-1)
        return _Settled(
            book=without(book, is_expired),
            marks=marked.without(is_expired),
            cash=received.sum(-1),
            cost=cost,
            ended=is_expired.sum(-1).double(),
            won=_won(is_expired, received, book),
        )

    def _extras(self) -> dict[str, Tensor]:
        rows = self.rows
        returns, squared, trades, ended, won, paid = rows["tally"].unbind(-1)
        mean = returns / rows["step"]
        deviation = (squared / rows["step"] - mean * mean).clamp(min=0.0).sqrt()
        numbers = (
            rows["value"] / self.capital - 1.0,
            rows["max_drawdown"],
            mean / deviation.clamp(min=1e-12) * self.bars_per_year**0.5,
            trades,
            won / ended.clamp(min=1.0),
            paid,
        )
        return dict(zip(EXTRAS, numbers, strict=True))

    def _blank_rows(self, num_envs: int) -> dict[str, Tensor]:
        """The state of an account at the start of an episode, without the bar where it starts."""
        device = self.device
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
            "tally": zeros[:, None].repeat(1, len(_TALLY)),
            "mark": book.paid,
            "exit_cost": book.paid,
            "portfolio": seen,
            "mask": torch.zeros(num_envs, self.space.num_actions, dtype=torch.bool, device=device),
            **{f"book.{name}": x for name, x in zip(Book._fields, book, strict=True)},
        }

    def _symbols_of(self, symbol: Tensor) -> tuple[Tensor, Tensor]:
        """The first start of each environment's symbol and how many starts it has, [num_envs]."""
        of_start = symbol.to(self.device)[self.starts]
        _, nums = torch.unique_consecutive(of_start, return_counts=True)
        which = self.index % len(nums)
        return (nums.cumsum(0) - nums)[which], nums[which]

    def _masks_of_starts(self) -> Tensor:
        """Bool [starts, actions]: what an account without positions can do there."""
        book = empty_book(len(self.starts), NUM_SLOTS, self.device)
        marked = Marks(book.paid, book.paid, book.paid, book.kind > 0)
        capital = torch.full_like(book.paid[:, 0], self.capital)
        return self.exchange.mask(self.starts, book, marked, capital)


class _Trades(NamedTuple):
    """What trading did to the accounts, [num_envs]: cash received, costs paid (in it), positions
    opened, ended, and ended with a gain; float64.
    """

    book: Book
    cash: Tensor
    cost: Tensor
    opened: Tensor
    ended: Tensor
    won: Tensor


class _Settled(NamedTuple):
    """What the next bar did to the accounts; as ``_Trades``."""

    book: Book
    marks: Marks
    cash: Tensor
    cost: Tensor
    ended: Tensor
    won: Tensor


def _won(is_ended: Tensor, received: Tensor, book: Book) -> Tensor:
    return (is_ended & (received > book.paid)).sum(-1).double()


def _spec(
    space: ActionSpace, seen: Mapping[str, Entry], episode_bars: int, num_envs: int
) -> EnvSpec:
    return EnvSpec(
        name=f"options-{space.num_actions}",
        num_envs=num_envs,
        observation={
            **seen,
            "portfolio": Entry((len(portfolio_names(space)),)),
            ACTION_MASK: Entry((space.num_actions,), torch.bool),
        },
        actions=Discrete(space.num_actions),
        extras=EXTRAS,
        min_truncation_steps=episode_bars,
    )


def _checked(market: Market, split: Split, bars: int) -> Tensor:
    """The starts of ``split``. Raises ValueError where an episode from one would not fit."""
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
