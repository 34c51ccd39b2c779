"""The task as a whole: what a run says at the start and shows at the end."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from muster import UsageError
from muster.rl.config import PpoConfig
from muster.rl.environment import Place
from muster.rl.evaluation import Episodes
from muster_recipes.clstm_ppo import task as module
from muster_recipes.clstm_ppo.clusters import Clusters
from muster_recipes.clstm_ppo.config import AGENT, ClstmPpoConfig
from muster_recipes.clstm_ppo.load import fingerprint, load_market
from muster_recipes.clstm_ppo.network import CascadedPolicy
from muster_recipes.clstm_ppo.options_env import EXTRAS, OptionsEnv
from muster_recipes.clstm_ppo.task import ClstmPpoTask

CPU = torch.device("cpu")
SMALL = ClstmPpoConfig(sim_symbols=2, sim_bars=260, window=5, hidden=8, episode_bars=20)
PLAYERS = ["agent", "agent_sampled", "buy_stock", "hold", "buy_and_hold", "always_sell", "random"]


def place(num_envs: int) -> Place:
    return Place(num_envs=num_envs, first_env=0, seed=3, device=CPU)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    task = ClstmPpoTask(SMALL)
    folder = tmp_path_factory.mktemp("finish")
    torch.manual_seed(0)
    policy = task.policy(task.environments("train", place(2)).spec)
    policy.eval()
    return dict(task.finish(policy, CPU, 5, folder)), folder


def test_the_recipe_is_read_without_torch() -> None:
    """The command line reads the flags of every recipe before anything heavy."""
    code = (
        "import sys; import muster_recipes.clstm_ppo.config, muster_recipes.ppo.config; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_defaults_are_settings_of_the_training() -> None:
    config = PpoConfig.of(AGENT.defaults, num_episodes=1000)
    assert config.num_episodes == 1000
    assert config.num_envs % config.batch_size == 0
    assert ClstmPpoTask.defaults is AGENT.defaults


def test_the_best_is_the_one_of_the_best_sharpe() -> None:
    assert ClstmPpoTask.monitor in EXTRAS
    assert ClstmPpoTask.better == "higher"


def test_environments_and_policy_fit() -> None:
    task = ClstmPpoTask(SMALL)
    env = task.environments("val", place(3))
    policy = task.policy(env.spec)
    assert isinstance(policy, CascadedPolicy)
    assert (policy.window, policy.hidden) == (5, 8)
    output, state = policy.act(
        env.reset(), policy.initial_state(3, CPU), torch.ones(3, dtype=torch.bool)
    )
    assert output.parameters.shape == (3, 31)
    assert set(state) == {"actor_h", "actor_c", "critic_h", "critic_c"}


def test_remarks_say_what_is_traded_and_what_it_costs() -> None:
    said = "\n".join(ClstmPpoTask(SMALL).remarks())
    assert "Simulated market: 520 bars of 2 symbols" in said
    assert "20 bars; possible starts: train " in said
    assert "costs      on" in said
    free = ClstmPpoTask(dataclasses.replace(SMALL, costs=False)).remarks()
    assert "costs      OFF: these are not trading results" in free


def test_the_end_shows_every_player_on_the_same_episodes(
    finished: tuple[dict[str, Any], Path],
) -> None:
    result, folder = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "comparison.csv", "comparison.json", "equity.png",
    ]  # fmt: skip
    told = {name: value for name, value in result.items() if name != "metrics"}
    assert json.loads((folder / "comparison.json").read_text()) == told
    means = result["metrics"]["test"]  # the one result of the test split, beside the validation's
    assert means["return"] == told["players"]["agent"]["return"]["middle"]
    assert result["is_simulated"] is True and result["split"] == "test"
    assert result["episodes"] == 128 and result["episode_bars"] == 20
    assert result["clusters_by"] == "symbol and stretch of time"
    caveats = result["caveats"]
    assert isinstance(caveats, list) and len(caveats) == 1
    assert "overlap in time" in caveats[0] and f"({result['clusters']} here" in caveats[0]
    players = result["players"]
    assert isinstance(players, dict)
    assert sorted(players) == sorted(PLAYERS)
    for numbers in players.values():
        assert numbers["return"]["num"] == 128
        assert numbers["return"]["clusters"] == result["clusters"]
        assert numbers["return"]["low"] <= numbers["return"]["middle"] <= numbers["return"]["high"]
    nothing = {"middle": 0.0, "low": 0.0, "high": 0.0, "num": 128}
    assert players["hold"]["return"] == {**nothing, "clusters": result["clusters"]}
    assert players["random"]["costs"]["middle"] > 0
    # Untrained, its sampled actions are nearly those of the random player, legal ones only.
    trades = [players[name]["trades"]["middle"] for name in ("agent_sampled", "random")]
    assert trades[0] == pytest.approx(trades[1], rel=0.1)
    with (folder / "comparison.csv").open() as file:
        assert file.readline() == f"# {caveats[0]}\n"
        rows = list(csv.DictReader(file))
    assert [row["player"] for row in rows] == list(players)
    assert {(row["episodes"], row["clusters"]) for row in rows} == {
        ("128", str(result["clusters"]))
    }


def test_the_end_repeats_itself(finished: tuple[dict[str, object], Path], tmp_path: Path) -> None:
    task = ClstmPpoTask(SMALL)
    torch.manual_seed(0)
    policy = task.policy(task.environments("train", place(2)).spec)
    assert dict(task.finish(policy, CPU, 5, tmp_path)) == finished[0]


def test_a_picture_of_a_simulated_market_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    titles: list[str] = []
    shown: list[Mapping[str, Episodes]] = []

    def noted(
        played: Mapping[str, Episodes], clusters: Clusters, title: str, notes: str, path: Path
    ) -> None:
        titles.append(title)
        assert ("Implied volatility is estimated" in notes) is ("prices.csv" in title)
        shown.append(played)

    monkeypatch.setattr(module, "draw", noted)
    simulated = load_market(SMALL, lambda _: None)
    real = dataclasses.replace(simulated, source="prices.csv", truth={})
    for config, of in ((SMALL, simulated), (dataclasses.replace(SMALL, costs=False), real)):
        task = ClstmPpoTask(config, of)
        policy = task.policy(task.environments("train", place(2)).spec)
        assert task.finish(policy, CPU, 0, tmp_path)["is_simulated"] is (of is simulated)
    assert titles == [
        "Test split, SIMULATED market: 128 episodes of 20 bars",
        "Test split, market of prices.csv: 128 episodes of 20 bars, NO COSTS",
    ]
    for played in shown:
        bars = [episodes.first["bar"] for episodes in played.values()]
        assert all(torch.equal(bars[0], others) for others in bars)
        assert torch.isin(bars[0], simulated.starts["test"]).all()
        assert simulated.symbol[bars[0]].bincount().tolist() == [64, 64]


def test_environments_of_a_task_share_what_the_market_is_worth() -> None:
    task = ClstmPpoTask(SMALL)
    first, second = task.environments("train", place(2)), task.environments("val", place(3))
    assert isinstance(first, OptionsEnv) and isinstance(second, OptionsEnv)
    assert first.exchange is second.exchange


def test_the_data_that_were_read_are_the_identity() -> None:
    assert ClstmPpoTask(SMALL).identity() == {}
    simulated = load_market(SMALL, lambda _: None)
    real = dataclasses.replace(simulated, source="prices.csv", truth={})
    assert ClstmPpoTask(SMALL, real).identity() == {"data": fingerprint(real)}


def test_a_market_without_volume_or_an_account_without_money_is_refused() -> None:
    market = load_market(SMALL, lambda _: None)
    still = dataclasses.replace(market, volume=torch.zeros_like(market.volume))
    with pytest.raises(UsageError, match="the median volume there is 0"):
        ClstmPpoTask(SMALL, still).environments("val", place(2))
    poor = dataclasses.replace(SMALL, capital=1.0)
    with pytest.raises(UsageError, match="--capital 1;"):
        ClstmPpoTask(poor, market).environments("train", place(2))
