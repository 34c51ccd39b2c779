"""Laws of the options market, under random legal actions in both action spaces."""

from __future__ import annotations

import copy
import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes.options_bookkeeper import Bookkeeper, option_price
from tests.unit.recipes.options_markets import (
    lognormal_ends,
    market,
    place,
    random_legal,
    random_walk,
)

from muster.rl.environment import ACTION_MASK
from muster_recipes.clstm_ppo.actions import action_space, payoff
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.options_env import OptionsEnv

pytestmark = pytest.mark.thorough

Space = Literal["31", "91"]
SPACES: tuple[Space, ...] = ("31", "91")


def _env(
    space: Space,
    num_envs: int = 4,
    *,
    seed: int = 0,
    costs: bool = True,
    episode_bars: int = 60,
    capital: float = 100_000.0,
) -> OptionsEnv:
    config = ClstmPpoConfig(
        action_space=space, episode_bars=episode_bars, costs=costs, capital=capital
    )
    return OptionsEnv(
        random_walk(seed=seed, episode_bars=episode_bars),
        "train",
        config,
        place(num_envs, seed=seed),
    )


@pytest.mark.parametrize("space", SPACES)
@given(
    seed=st.integers(0, 2**20),
    capital=st.sampled_from([8_000.0, 100_000.0, 2e6]),
    costs=st.booleans(),
)
@examples(6)
def test_a_slow_bookkeeper_agrees_in_every_step(
    space: Space, seed: int, capital: float, costs: bool
) -> None:
    """Cash and value change by price moves, decay and costs, and by nothing else."""
    env = _env(space, 2, seed=seed, costs=costs, capital=capital)
    generator = torch.Generator().manual_seed(seed)
    mask = env.reset()[ACTION_MASK]
    books = [
        Bookkeeper(env_market, space, int(bar), capital, with_costs=costs)
        for env_market, bar in zip(
            [random_walk(seed=seed)] * 2, env.rows["bar"].tolist(), strict=True
        )
    ]
    value = [capital, capital]
    for _ in range(59):
        actions = random_legal(mask, generator)
        outcome = env.step(actions)
        for i, book in enumerate(books):
            assert book.act(int(actions[i])), "an unmasked action must be possible"
            assert book.cash > -1e-9
            book.next_bar()
            assert float(env.rows["cash"][i]) == pytest.approx(book.cash, abs=1e-6)
            now = book.value()
            assert float(env.rows["value"][i]) == pytest.approx(now, abs=1e-6)
            change = (now - value[i]) / capital
            assert float(outcome.reward[i]) == pytest.approx(change, rel=1e-5, abs=1e-9)
            value[i] = now
            paid = float(env.rows["tally"][i, -1])
            assert paid == pytest.approx(book.costs_paid, abs=1e-6)
        mask = outcome.observation[ACTION_MASK]
        if bool(outcome.starts.any()):
            return


@pytest.mark.parametrize("space", SPACES)
@given(seed=st.integers(0, 2**20), capital=st.sampled_from([8_000.0, 100_000.0]))
@examples(3)
def test_the_mask_is_what_the_bookkeeper_finds_possible(
    space: Space, seed: int, capital: float
) -> None:
    env = _env(space, 1, seed=seed, capital=capital)
    prices = random_walk(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = env.reset()[ACTION_MASK]
    book = Bookkeeper(prices, space, int(env.rows["bar"]), capital)
    for step in range(30):
        if step % 6 == 0:
            possible = [copy.deepcopy(book).act(a) for a in range(env.space.num_actions)]
            assert mask[0].tolist() == possible
        actions = random_legal(mask, generator, hold=0.1)
        book.act(int(actions))
        book.next_bar()
        outcome = env.step(actions)
        mask = outcome.observation[ACTION_MASK]
        if bool(outcome.starts.any()):
            return


@pytest.mark.parametrize("space", SPACES)
def test_an_impossible_action_is_a_hold(space: Space) -> None:
    """Above all: what is not held cannot be sold."""
    first, second = (_env(space, 3, capital=9_000.0) for _ in range(2))
    mask = first.reset()[ACTION_MASK]
    second.reset()
    generator = torch.Generator().manual_seed(1)
    num_impossible = 0
    for _ in range(150):
        actions = torch.randint(first.space.num_actions, (3,), generator=generator)
        is_legal = mask.gather(1, actions[:, None])[:, 0]
        num_impossible += int((~is_legal).sum())
        outcome = first.step(actions)
        same = second.step(torch.where(is_legal, actions, 0))
        assert torch.equal(outcome.reward, same.reward)
        assert bool((first.rows["cash"] >= 0).all())
        mask = outcome.observation[ACTION_MASK]
    assert num_impossible > 50
    assert all(torch.equal(first.rows[name], second.rows[name]) for name in first.rows)


def test_nothing_can_be_closed_that_was_not_opened() -> None:
    env = _env("31", 5)
    assert not env.reset()[ACTION_MASK][:, 21:].any()
    for slot in range(10):
        outcome = env.step(torch.full((5,), 21 + slot))
        assert bool((outcome.reward == 0).all())
        assert bool((env.rows["cash"] == env.capital).all())


@given(action=st.integers(1, 20), volume=st.floats(5e4, 1e8))
@examples(15)
def test_opening_and_closing_at_once_loses_exactly_the_costs(action: int, volume: float) -> None:
    """ "At once": the next bar has the same time, price and volatility."""
    prices = market(torch.full((1, 4), 70.0), volume=volume, bar_days=0.0, episode_bars=3)
    config = ClstmPpoConfig(episode_bars=3)
    env = OptionsEnv(prices, "train", config, place(1))
    env.reset()
    opened = env.step(torch.tensor([action]))
    contracts = float(env.rows["book.contracts"][0, 0])
    env.step(torch.tensor([21]))
    lost = config.capital - float(env.rows["cash"])
    kind = "call" if action <= 10 else "put"
    strike = 70.0 * (1 + (action - 1) / 100 if action <= 10 else 1 - (action - 11) / 100)
    mid = option_price(kind, 70.0, strike, 30 / 365, 0.2, 1.0)
    share = contracts / (volume * 0.05 / 100)
    rate = next(r for b, r in ((0.01, 0.001), (0.05, 0.005), (0.1, 0.01), (1, 0.02)) if share < b)
    half = (0.02 + 0.03 * abs(1 - strike / 70.0)) / 2
    both_sides = 2 * (100 * mid * (half + rate) + 0.69)
    sale = 100 * mid * (1 - half - rate) * 0.00278 / 1000 + 100 * 0.000166
    assert lost == pytest.approx(contracts * (both_sides + sale), abs=1e-8)
    assert float(env.rows["tally"][0, -1]) == pytest.approx(lost, abs=1e-8)
    assert float(opened.reward[0]) < 0


@given(spot=st.floats(5, 900), volatility=st.floats(0.05, 1.0), elapsed=st.integers(1, 29))
@examples(20)
def test_put_call_parity_holds_between_marked_positions(
    spot: float, volatility: float, elapsed: int
) -> None:
    """Call - put = S - K exp(-rT), of marks at mid some days after the opening."""
    closes = spot * torch.linspace(1.0, 1.1, elapsed + 2, dtype=torch.float64)[None]
    bars = elapsed + 1
    prices = market(closes, volatility=volatility, volume=1e9, episode_bars=bars)
    config = ClstmPpoConfig(episode_bars=bars, costs=False, capital=1e7)
    env = OptionsEnv(prices, "train", config, place(2))
    env.reset()
    for step in range(elapsed):
        env.step(torch.tensor([1, 11]) if step == 0 else torch.zeros(2).long())
    mark = env.rows["mark"][:, 0] / env.rows["book.contracts"][:, 0] / 100
    forward = float(closes[0, elapsed]) - spot * math.exp(-0.05 * (30 - elapsed) / 365)
    assert float(mark[0] - mark[1]) == pytest.approx(forward, abs=1e-9 * spot)


@pytest.mark.parametrize("space", SPACES)
@given(end=st.floats(0.7, 1.4), data=st.data())
@examples(15)
def test_expiry_settles_to_intrinsic(space: Space, end: float, data: st.DataObject) -> None:
    """Every strategy, 40 days later, cost-free: cash in hand is what its payoff says."""
    strategies = action_space(space).strategies
    action = data.draw(st.integers(1, len(strategies)))
    closes = torch.tensor([[50.0, 50.0 * end, 50.0, 50.0]], dtype=torch.float64)
    prices = market(closes, bar_days=40, episode_bars=3)
    env = OptionsEnv(
        prices, "train", ClstmPpoConfig(action_space=space, episode_bars=3, costs=False), place(1)
    )
    env.reset()
    env.step(torch.tensor([action]))
    strategy = strategies[action - 1]
    assert float(env.rows["book.kind"].sum()) == 0
    assert float(env.rows["mark"].sum()) == 0
    assert float(env.rows["cash"]) == float(env.rows["value"])
    settled = 100 * 50 * payoff(strategy, end) + strategy.shares * 50 * end
    book = Bookkeeper(prices, space, 0, 100_000.0, with_costs=False)
    assert book.act(action)
    position = book.slots[0]
    assert position is not None
    expected = book.cash + position.contracts * settled
    assert float(env.rows["cash"]) == pytest.approx(expected, abs=1e-6)
    assert position.contracts * settled >= -position.owed - 1e-6


def _mean_gains(drift: float, days: float, actions: list[int], costs: bool) -> list[float]:
    """Expected change of value, in dollars, of opening and letting expire; every path once."""
    num_paths = 512
    prices = lognormal_ends(num_paths, drift=drift, volatility=0.2, days=days)
    config = ClstmPpoConfig(action_space="91", episode_bars=1, skew=0.0, costs=costs)
    env = OptionsEnv(prices, "train", config, place(num_paths))
    env.reset()
    start = env.state()
    start["rows.bar"] = 2 * torch.arange(num_paths)
    gains = []
    for action in actions:
        env.restore(start)
        outcome = env.step(torch.full((num_paths,), action))
        gains.append(float(outcome.reward.double().mean()) * config.capital)
    return gains


def _premium(action: int) -> float:
    """Paid at mid for the position, in dollars (negative: received)."""
    prices = lognormal_ends(1, drift=0.0, volatility=0.2, days=1)
    book = Bookkeeper(prices, "91", 0, 100_000.0, skew=0.0, with_costs=False)
    assert book.act(action)
    return 100_000.0 - book.cash


@pytest.mark.parametrize("days", [7.0, 14.0, 21.0, 28.0, 30.0, 35.0])
def test_no_strategy_earns_where_the_price_drifts_at_the_rate_and_nothing_costs(
    days: float,
) -> None:
    """The market without an edge is the one whose drift is the options' rate: there the expected
    gain is the rate's on the money paid, for cash earns none. Not a sample: an integral."""
    space = action_space("91")
    actions = [a for a, s in enumerate(space.strategies, start=1) if (s.days or 30.0) == days]
    growth = math.expm1(0.05 * days / 365)
    for action, gain in zip(actions, _mean_gains(0.05, days, actions, costs=False), strict=True):
        paid = _premium(action)
        assert gain == pytest.approx(growth * paid, abs=0.2), space.strategies[action - 1]


def test_without_any_drift_calls_lose_and_puts_gain_what_the_rate_says() -> None:
    """Options are priced at 5 %, so a price that does not drift is a known edge: expected payoffs
    are those of the undiscounted price at rate 0."""
    call, put, straddle = _mean_gains(0.0, 30.0, [8, 23, 1], costs=False)
    assert call < -100 < 100 < put
    assert straddle < 0
    years, contracts_call = 30 / 365, _premium(8) / option_price("call", 100, 100, 30 / 365, 0.2, 0)
    # At rate 0 and at the money, a call is worth S x (2 N(sigma sqrt(T) / 2) - 1).
    worth = 100 * math.erf(0.2 * math.sqrt(years) / 2 / math.sqrt(2))
    assert call == pytest.approx(contracts_call * worth - _premium(8), abs=0.2)


def test_with_costs_every_bought_option_loses_where_there_is_no_edge() -> None:
    actions = [*range(1, 31), *range(61, 71), *range(81, 91)]
    assert max(_mean_gains(0.05, 30.0, actions, costs=True)) < -5.0


@pytest.mark.parametrize("space", SPACES)
def test_environments_never_influence_each_other(space: Space) -> None:
    """An environment alone does, bit for bit, what it does among others."""
    together = _env(space, 4, seed=3)
    config = ClstmPpoConfig(action_space=space, episode_bars=60)
    alone = OptionsEnv(random_walk(seed=3), "train", config, place(1, seed=3, first_env=2))
    mask = together.reset()[ACTION_MASK]
    assert torch.equal(alone.reset()[ACTION_MASK], mask[2:3])
    generator = torch.Generator().manual_seed(0)
    for _ in range(130):
        actions = random_legal(mask, generator)
        outcome = together.step(actions)
        single = alone.step(actions[2:3])
        assert torch.equal(single.reward, outcome.reward[2:3])
        assert all(torch.equal(alone.rows[name], together.rows[name][2:3]) for name in alone.rows)
        mask = outcome.observation[ACTION_MASK]
