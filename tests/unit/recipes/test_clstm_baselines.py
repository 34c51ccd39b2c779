"""The players an agent is compared with, and the comparison."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev, stdev

import pytest
import torch
from tests.unit.recipes.options_markets import market, place, random_walk
from torch import Tensor

from muster.rl.environment import ACTION_MASK
from muster.rl.evaluation import Episodes, play
from muster_recipes.clstm_ppo import comparison
from muster_recipes.clstm_ppo.actions import action_space
from muster_recipes.clstm_ppo.clusters import Clusters
from muster_recipes.clstm_ppo.comparison import at_the_money, baselines, stock_episodes
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.figure import curves, draw
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.options_env import EXTRAS, OptionsEnv

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
NUM, STEPS = 12, 60


def spied(name: str, space: str, of: Market, seed: int = 0) -> tuple[Episodes, Tensor, Tensor]:
    """A baseline's episodes, its actions [T, N] and the masks it saw [T, N, A]."""
    config = ClstmPpoConfig(action_space=space, episode_bars=STEPS)  # type: ignore[arg-type]
    rule = baselines(action_space(config.action_space), NUM, seed, CPU)[name]
    actions, masks = [], []

    def watched(observation: dict[str, Tensor], step: int) -> Tensor:
        masks.append(observation[ACTION_MASK])
        actions.append(rule(observation, step))
        return actions[-1]

    env = OptionsEnv(of, "test", config, place(NUM))
    episodes = play(watched, env, deterministic=True, seed=0, num_episodes=NUM, device=CPU)
    return episodes, torch.stack(actions), torch.stack(masks)


@pytest.mark.parametrize("space", ["31", "91"])
def test_hold_keeps_the_capital_exactly(space: str) -> None:
    episodes, actions, _ = spied("hold", space, random_walk(jumps=3.0))
    assert not actions.any()
    assert not episodes.rewards.any()
    assert not episodes.extras["trades"].any()


def test_the_actions_of_the_rolled_options() -> None:
    small, large = action_space("31"), action_space("91")
    for space, call, put in ((small, 1, 11), (large, 8, 23)):
        assert at_the_money(space, "call") == call
        assert at_the_money(space, "put") == put


@pytest.mark.parametrize("space", ["31", "91"])
@pytest.mark.parametrize(("name", "option"), [("buy_and_hold", "call"), ("always_sell", "put")])
def test_an_option_is_rolled_when_it_has_ended(space: str, name: str, option: str) -> None:
    """Daily bars and options of 30 days: bought at bars 0, 30 and nothing in between."""
    of = market(torch.full((2, 100), 100.0), episode_bars=STEPS)
    episodes, actions, _ = spied(name, space, of)
    expected = torch.zeros(STEPS, NUM, dtype=torch.int64)
    expected[[0, 30]] = at_the_money(action_space(space), option)  # type: ignore[arg-type]
    assert torch.equal(actions[:STEPS], expected)
    assert (episodes.extras["trades"] == 2).all()


@pytest.mark.parametrize(("name", "sign"), [("buy_and_hold", 1), ("always_sell", -1)])
def test_calls_win_where_prices_rise_and_puts_where_they_fall(name: str, sign: int) -> None:
    days = torch.arange(100, dtype=torch.float64)
    for slope in (0.005, -0.005):
        of = market(100 * torch.exp(slope * days).expand(2, -1), episode_bars=STEPS)
        episodes, *_ = spied(name, "31", of)
        assert ((episodes.returns > 0) == (sign * slope > 0)).all()


@pytest.mark.parametrize("space", ["31", "91"])
def test_random_actions_are_legal_and_reach_everything(space: str) -> None:
    _, actions, masks = spied("random", space, random_walk())
    assert masks.gather(2, actions.unsqueeze(-1)).all()
    # How often each is expected, and within five standard deviations (Poisson) it was taken.
    expected = (masks / masks.sum(2, keepdim=True)).flatten(0, 1).sum(0)
    taken = torch.bincount(actions.flatten(), minlength=masks.shape[2])
    assert ((taken - expected).abs() <= 5 * expected.sqrt()).all()
    assert torch.equal(actions, spied("random", space, random_walk())[1])
    assert not torch.equal(actions, spied("random", space, random_walk(), seed=1)[1])


def test_every_baseline_plays_the_same_episodes() -> None:
    bars = [spied(name, "31", random_walk())[0].first["bar"] for name in ("hold", "random")]
    assert torch.equal(*bars)
    assert len(bars[0].unique()) > 3


def test_buying_the_stock_by_hand() -> None:
    of = random_walk(symbols=2, bars=30)
    bars = torch.tensor([0, 7, 35])
    episodes = stock_episodes(of, bars, 10)
    assert tuple(episodes.extras) == EXTRAS
    for episode, bar in enumerate(bars.tolist()):
        close = of.close[bar : bar + 11].tolist()
        change = [b / a - 1 for a, b in pairwise(close)]
        worst = max(1 - close[j] / max(close[: j + 1]) for j in range(11))
        row = {name: float(values[episode]) for name, values in episodes.extras.items()}
        assert float(episodes.returns[episode]) == pytest.approx(close[-1] / close[0] - 1)
        assert row["final_return"] == pytest.approx(close[-1] / close[0] - 1)
        assert row["max_drawdown"] == pytest.approx(worst)
        assert row["sharpe"] == pytest.approx(mean(change) / pstdev(change) * math.sqrt(252))
        assert curves(episodes)[:, episode].tolist() == pytest.approx([c / close[0] for c in close])


def test_the_environments_sharpe_and_drawdown_are_those_of_the_curve() -> None:
    """The stock's figures and the environment's are defined alike."""
    episodes, *_ = spied("random", "31", random_walk())
    value = curves(episodes)
    change = value[1:] / value[:-1] - 1
    sharpe = change.mean(0) / change.std(0, correction=0) * math.sqrt(252)
    assert torch.allclose(episodes.extras["sharpe"], sharpe, rtol=1e-3, atol=1e-3)
    worst = (1 - value / value.cummax(0).values).max(0).values
    assert torch.allclose(episodes.extras["max_drawdown"], worst, atol=1e-5)


def played() -> dict[str, Episodes]:
    of = random_walk()
    found = {name: spied(name, "31", of)[0] for name in ("hold", "random", "buy_and_hold")}
    stock = stock_episodes(of, found["hold"].first["bar"], STEPS)
    return {"agent": found["random"], "agent_sampled": found["buy_and_hold"], **found,
            "buy_stock": stock}  # fmt: skip


def test_differences_are_paired_by_episode(tmp_path: Path) -> None:
    episodes = played()
    clusters = Clusters(torch.arange(NUM).flip(0), NUM, "symbol")
    caveats = ["Said first.", "Said then."]
    compared = {"caveats": caveats, **comparison.compare(episodes, clusters, seed=0)}
    assert set(compared["differences"]) == {"agent", "agent_sampled"}
    assert set(compared["differences"]["agent"]) == {"hold", "random", "buy_and_hold", "buy_stock"}
    gaps = (episodes["agent"].returns - episodes["buy_stock"].returns).tolist()
    found = compared["differences"]["agent"]["buy_stock"]
    assert found["middle"] == pytest.approx(mean(gaps))
    half = 2.2009852 * stdev(gaps) / math.sqrt(NUM)  # t, 11 degrees of freedom
    assert found["high"] - found["middle"] == pytest.approx(half)
    # Against itself there is no difference, in any episode.
    assert compared["differences"]["agent"]["random"] == {
        "middle": 0.0, "low": 0.0, "high": 0.0, "num": NUM, "clusters": NUM,
    }  # fmt: skip

    comparison.write(tmp_path, compared)
    assert json.loads((tmp_path / "comparison.json").read_text()) == compared
    with (tmp_path / "comparison.csv").open() as file:
        assert [next(file), next(file)] == ["# Said first.\n", "# Said then.\n"]
        rows = {row["player"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(episodes)
    assert float(rows["random"]["return"]) == compared["players"]["random"]["return"]["middle"]
    assert float(rows["buy_stock"]["agent_minus_it_high"]) == found["high"]
    assert rows["agent"]["agent_minus_it"] == ""
    assert rows["hold"]["episodes"] == rows["hold"]["clusters"] == str(NUM)


def test_differences_of_one_cluster_are_one(tmp_path: Path) -> None:
    """Three clusters of four episodes: two degrees of freedom, whatever the episodes are."""
    episodes = played()
    of = torch.arange(NUM) % 3
    compared = comparison.compare(episodes, Clusters(of, 3, "symbol"), seed=0)
    gaps = (episodes["agent"].returns - episodes["buy_stock"].returns).view(4, 3).mean(0).tolist()
    found = compared["differences"]["agent"]["buy_stock"]
    half = 4.3026527 * stdev(gaps) / math.sqrt(3)
    assert found["low"] == pytest.approx(mean(gaps) - half)
    assert (found["num"], found["clusters"]) == (NUM, 3)
    alone = comparison.compare(episodes, Clusters(torch.zeros_like(of), 1, "symbol"), seed=0)
    assert alone["players"]["agent"]["return"]["low"] is None
    comparison.write(tmp_path, {"caveats": [], **alone})
    with (tmp_path / "comparison.csv").open() as file:
        assert {row["return_low"] for row in csv.DictReader(file)} == {""}


def test_a_curve_stays_flat_after_an_early_end() -> None:
    episodes = Episodes(
        index=torch.arange(1),
        returns=torch.tensor([-0.3], dtype=torch.float64),
        lengths=torch.tensor([2]),
        terminated=torch.tensor([True]),
        extras={},
        rewards=torch.tensor([[0.2], [-0.5], [0.0]], dtype=torch.float64),
        first={},
    )
    assert curves(episodes).flatten().tolist() == pytest.approx([1.0, 1.2, 0.7, 0.7])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    episodes = played()
    for num in (1, 4):
        clusters = Clusters(torch.arange(NUM) % num, num, "symbol")
        path = tmp_path / f"{num}.png"
        draw(episodes, clusters, "Test split, SIMULATED market", "a note", path)
        assert path.read_bytes().startswith(b"\x89PNG")
