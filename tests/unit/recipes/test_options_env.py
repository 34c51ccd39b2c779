"""The environment's promises to the learner, and its Gymnasium face."""

from __future__ import annotations

import dataclasses
import math
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from tests.unit.recipes.options_markets import market, place, random_legal, random_walk

from muster.base.errors import UnknownNameError, UsageError
from muster.rl.environment import ACTION_MASK, Split
from muster_recipes.clstm_ppo import gymnasium_env
from muster_recipes.clstm_ppo.actions import action_space
from muster_recipes.clstm_ppo.book import portfolio_names
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.options_env import OptionsEnv

CONFIGS = {name: ClstmPpoConfig(action_space=name, episode_bars=20) for name in ("31", "91")}


def _env(name: str = "31", num_envs: int = 4, *, seed: int = 0, first_env: int = 0) -> OptionsEnv:
    prices = random_walk(episode_bars=20)
    return OptionsEnv(
        prices, "train", CONFIGS[name], place(num_envs, seed=seed, first_env=first_env)
    )


@pytest.mark.parametrize("name", ["31", "91"])
def test_observations_are_as_the_spec_says(name: str) -> None:
    env = _env(name)
    generator = torch.Generator().manual_seed(0)
    observation = env.reset()
    for _ in range(30):
        assert observation.keys() == env.spec.observation.keys()
        for key, entry in env.spec.observation.items():
            assert observation[key].shape == (4, *entry.shape)
            assert observation[key].dtype == entry.dtype
        assert bool(observation["portfolio"].isfinite().all())
        assert bool(observation[ACTION_MASK][:, 0].all())
        observation = env.step(random_legal(observation[ACTION_MASK], generator)).observation


def test_the_portfolio_says_what_is_held() -> None:
    """One call at 102 % and nine more days, by name."""
    closes = 50.0 * torch.linspace(1, 1.18, 30, dtype=torch.float64)[None]
    config = ClstmPpoConfig(episode_bars=20)
    env = OptionsEnv(market(closes, episode_bars=29), "train", config, place(1))
    env.reset()
    env.step(torch.tensor([3]))
    for _ in range(8):
        outcome = env.step(torch.tensor([0]))
    seen = dict(
        zip(
            portfolio_names(action_space("31")),
            outcome.observation["portfolio"][0].tolist(),
            strict=True,
        )
    )
    rows, spot = env.rows, float(closes[0, 9])
    assert seen["cash"] == pytest.approx(float(rows["cash"]) / 1e5)
    assert seen["value"] == pytest.approx(float(rows["value"]) / 1e5)
    assert seen["step"] == pytest.approx(9 / 20)
    assert seen["drawdown"] == pytest.approx(1 - float(rows["value"] / rows["peak"]), abs=1e-6)
    assert seen["slot 0 moneyness"] == pytest.approx(math.log(1.02 * 50 / spot))
    assert seen["slot 0 months_left"] == pytest.approx(21 / 30)
    assert 0.5 < seen["slot 0 delta"] < 1
    gain = float(rows["mark"][0, 0] - rows["book.paid"][0, 0]) / 1e5
    assert seen["slot 0 unrealised"] == pytest.approx(gain, rel=1e-5)
    assert 0.02 < seen["slot 0 committed"] < 0.035
    assert (seen["slot 0 is call"], seen["slot 0 is put"]) == (1, 0)
    assert all(seen[key] == 0 for key in seen if key.startswith("slot 1"))


def test_an_episode_has_its_length_and_tells_its_figures() -> None:
    env = _env()
    generator = torch.Generator().manual_seed(3)
    outcome, mask = None, env.reset()[ACTION_MASK]
    rewards = []
    for step in range(20):
        outcome = env.step(random_legal(mask, generator))
        rewards.append(outcome.reward.double())
        mask = outcome.observation[ACTION_MASK]
        assert bool((outcome.truncated == (step == 19)).all())
        assert not outcome.terminated.any()
    assert outcome is not None
    assert bool(outcome.starts.all())
    extras, total = outcome.extras, torch.stack(rewards)
    assert tuple(extras) == env.spec.extras
    assert torch.allclose(extras["final_return"], total.sum(0), atol=1e-6)
    values = 1 + torch.cat([torch.zeros(1, 4).double(), total.cumsum(0)])
    returns = values[1:] / values[:-1] - 1
    sharpe = returns.mean(0) / returns.std(0, correction=0) * math.sqrt(252)
    assert torch.allclose(extras["sharpe"], sharpe, rtol=1e-3)
    worst = (1 - values / values.cummax(0).values).max(0).values
    assert torch.allclose(extras["max_drawdown"], worst, atol=1e-6)
    assert bool((extras["trades"] >= 1).all())
    assert bool((extras["costs"] > 0).all())
    fresh = outcome.observation["portfolio"]
    assert bool((fresh[:, :2] == 1).all()) and bool((fresh[:, 2:] == 0).all())


def test_holding_changes_nothing_at_all() -> None:
    env = _env()
    env.reset()
    for _ in range(20):
        outcome = env.step(torch.zeros(4).long())
        assert bool((outcome.reward == 0).all())
    extras = {name: values.tolist() for name, values in outcome.extras.items()}
    assert all(values == [0.0] * 4 for values in extras.values())


def test_win_rate_counts_positions_that_ended_with_a_gain() -> None:
    """Price up by a tenth: of a call and a put, closed after a bar, one has won."""
    closes = torch.tensor([[50.0, 50.0, 50.0, 55.0, 55.0, 55.0]], dtype=torch.float64)
    env = OptionsEnv(
        market(closes, episode_bars=5), "train", ClstmPpoConfig(episode_bars=5), place(1)
    )
    env.reset()
    for action in (1, 11, 0, 21, 22):
        outcome = env.step(torch.tensor([action]))
    assert float(outcome.extras["trades"]) == 2
    assert float(outcome.extras["win_rate"]) == 0.5


def test_ruin_terminates() -> None:
    """Ten covered calls on a price that falls to nothing."""
    closes = torch.cat([torch.full((12,), 100.0), torch.full((3,), 0.01)]).double()[None]
    config = ClstmPpoConfig(action_space="91", episode_bars=14)
    env = OptionsEnv(market(closes, episode_bars=14), "train", config, place(1))
    env.reset()
    for _ in range(11):
        outcome = env.step(torch.tensor([45]))
        assert not outcome.terminated.any()
    for _ in range(2):
        outcome = env.step(torch.tensor([0]))
        if bool(outcome.terminated):
            break
    assert bool(outcome.terminated) and not bool(outcome.truncated)
    assert bool(outcome.starts)
    assert float(outcome.extras["final_return"]) < -0.8


def test_what_lies_ahead_is_not_seen() -> None:
    """The same market with another future: the same observations until then."""
    prices = random_walk(symbols=1, bars=60, episode_bars=50)
    cut = 30

    def changed(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:cut], 1.5 * values[cut:]])

    other = dataclasses.replace(
        prices,
        close=changed(prices.close),
        volatility=changed(prices.volatility),
        volume=changed(prices.volume),
    )
    starts: dict[Split, torch.Tensor] = {"train": torch.tensor([5])}
    envs = [
        OptionsEnv(
            dataclasses.replace(m, starts=starts),
            "train",
            ClstmPpoConfig(episode_bars=50),
            place(3),
        )
        for m in (prices, other)
    ]
    generator = torch.Generator().manual_seed(0)
    seen = [env.reset() for env in envs]
    for bar in range(5, cut):
        assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
        actions = random_legal(seen[0][ACTION_MASK], generator, hold=0.1)
        seen = [env.step(actions).observation for env in envs]
        assert int(seen[0]["bar"][0]) == bar + 1
    assert not torch.equal(seen[0]["portfolio"], seen[1]["portfolio"])


@pytest.mark.parametrize("name", ["31", "91"])
def test_a_restored_environment_goes_on_bit_for_bit(name: str) -> None:
    first = _env(name, seed=7)
    generator = torch.Generator().manual_seed(0)
    mask = first.reset()[ACTION_MASK]
    for _ in range(25):
        mask = first.step(random_legal(mask, generator)).observation[ACTION_MASK]
    second = _env(name, seed=7)
    seen = second.restore({key: values.clone() for key, values in first.state().items()})
    assert seen is not None and torch.equal(seen[ACTION_MASK], mask)
    for _ in range(25):
        actions = random_legal(mask, generator)
        one, two = first.step(actions), second.step(actions)
        assert torch.equal(one.reward, two.reward)
        assert all(torch.equal(one.observation[k], two.observation[k]) for k in one.observation)
        mask = one.observation[ACTION_MASK]


def test_episodes_begin_at_starts_of_the_split_and_differ() -> None:
    prices = random_walk(episode_bars=20)
    starts = {**prices.starts, "val": prices.starts["train"][::7]}
    env = OptionsEnv(
        dataclasses.replace(prices, starts=starts), "val", CONFIGS["31"], place(64, seed=1)
    )
    first = env.reset()["bar"]
    for _ in range(20):
        second = env.step(torch.zeros(64).long()).observation["bar"]
    assert set(first.tolist()) <= set(starts["val"].tolist())
    assert len(set(first.tolist())) > 10
    assert not torch.equal(first, second)


def test_a_market_that_breaks_its_promises_is_refused() -> None:
    prices = random_walk(symbols=2, bars=40, episode_bars=20)
    for starts, problem in (
        ([], "has 0 starts"), ([70], "needs 20 bars after it"), ([30], "cross from one symbol"),
    ):  # fmt: skip
        broken = dataclasses.replace(
            prices, starts={"train": torch.tensor(starts, dtype=torch.int64)}
        )
        with pytest.raises(ValueError, match=problem):
            OptionsEnv(broken, "train", CONFIGS["31"], place(1))


def test_bars_without_volume_allow_nothing_but_holding() -> None:
    volume = torch.zeros(1, 30)
    volume[0, 3] = 5e6  # one start at which something can be opened
    prices = market(torch.full((1, 30), 20.0), volume=volume, episode_bars=20)
    env = OptionsEnv(prices, "train", CONFIGS["31"], place(40))
    seen = env.reset()
    is_traded = seen["bar"] == 3
    assert 0 < int(is_traded.sum()) < 40
    assert torch.equal(seen[ACTION_MASK][:, 1:11].any(1), is_traded)
    assert (seen[ACTION_MASK][~is_traded].sum(1) == 1).all()
    assert (env.step(torch.ones(40).long()).reward[~is_traded] == 0).all()


SETTINGS: dict[str, Any] = {"sim_bars": 600, "sim_symbols": 2, "episode_bars": 30}


@pytest.fixture
def registered() -> None:
    gymnasium_env.register()
    gymnasium_env.register()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["31", "91"])
def test_gymnasium_checks_the_environment(name: str) -> None:
    env = gymnasium.make("muster/Options-v0", action_space=name, **SETTINGS)
    check_env(env.unwrapped, skip_render_check=True)
    features = env.observation_space.shape
    assert features is not None
    assert features[0] > len(portfolio_names(action_space("31" if name == "31" else "91")))
    env.close()


@pytest.mark.usefixtures("registered")
def test_the_vector_is_one_batch_of_the_same_environments() -> None:
    single = gymnasium.make("muster/Options-v0", split="val", **SETTINGS)
    several = gymnasium.make_vec("muster/Options-v0", num_envs=3, split="val", **SETTINGS)
    one, _ = single.reset(seed=5)
    many, infos = several.reset(seed=5)
    assert (many[0] == one).all()
    assert infos["action_mask"].shape == (3, 31)
    for action in (1, 12, 0, 21):
        one, reward, *_ = single.step(action)
        many, rewards, *_ = several.step([action] * 3)
        assert (many[0] == one).all()
        assert rewards[0] == reward
    single.close()
    several.close()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"split": "tests"}, "split"), ({"action_spaces": "91"}, "setting")],
)
def test_wrong_names_are_told_with_the_right_ones(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        gymnasium.make("muster/Options-v0", **wrong)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"action_space": 30}, "must be 31 or 91"),
        ({"action_space": "both"}, "must be 31 or 91"),
        ({"data": "none.csv"}, "none.csv does not exist"),
        ({"capital": float("nan")}, "finite"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gymnasium.make("muster/Options-v0", **wrong)


@pytest.mark.usefixtures("registered")
def test_data_may_be_text_and_the_action_space_a_number(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    first = date(2020, 1, 1)
    rows = [f"{first + timedelta(days=day)},{20 + day % 7},30,10,20,50000" for day in range(400)]
    path.write_text("\n".join(["date,open,high,low,close,volume", *rows]) + "\n", encoding="utf-8")
    env = gymnasium.make(
        "muster/Options-v0", data=str(path), action_space=91, window=5, episode_bars=20
    )
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    assert env.action_space.n == 91
    env.close()


def test_episodes_can_be_spread_over_the_symbols() -> None:
    prices = random_walk(symbols=3, bars=80, episode_bars=60)
    of_two = prices.starts["train"][prices.symbol[prices.starts["train"]] != 1]
    prices = dataclasses.replace(prices, starts={"train": of_two[2:]})
    config = ClstmPpoConfig(episode_bars=60)
    env = OptionsEnv(prices, "train", config, place(200, first_env=1), spread=True)
    bars = env.reset()["bar"]
    assert prices.symbol[bars].tolist() == [2, 0] * 100
    assert set(bars.tolist()) == set(of_two[2:].tolist())
