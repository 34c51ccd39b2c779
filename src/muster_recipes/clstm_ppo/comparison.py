"""An agent beside the baselines: numbers with intervals, as values, a CSV and a JSON file.

The baselines are players that learn nothing, on the same episodes:

- hold: no trade at all.
- buy_stock: the underlying itself for the whole capital, straight from the closing prices and
  without costs.
- buy_and_hold: one call at the money, and a new one whenever it has ended: the underlying's
  upside as far as the action space allows, which has no shares. Sized as every position is.
- always_sell: against the underlying as far as the action space allows: one put at the money,
  and a new one whenever it has ended.
- random: every legal action with the same probability.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.agents import ACTION_MASK, Episodes, Observation, streams
from muster_recipes.clstm_ppo.actions import ActionSpace
from muster_recipes.clstm_ppo.book import portfolio_names
from muster_recipes.clstm_ppo.clusters import Clusters, clustered, clustered_median, record
from muster_recipes.clstm_ppo.market import Market

#: (observation, number of the step) -> actions.
Rule = Callable[[Observation, int], Tensor]


def baselines(
    space: ActionSpace, num_envs: int, seed: int, device: torch.device
) -> dict[str, Rule]:
    """The baselines that play in the environment, by name; environments are on ``device``."""
    return {
        "hold": lambda observation, _: torch.zeros_like(observation["bar"]),
        "buy_and_hold": _rolling(space, at_the_money(space, "call"), device),
        "always_sell": _rolling(space, at_the_money(space, "put"), device),
        "random": _random(space, num_envs, seed, device),
    }


def at_the_money(space: ActionSpace, option: str) -> int:
    """The action that buys this single option at the strike nearest to the price."""
    distance = {
        action: abs(strategy.legs[0].strike - 1.0)
        for action, strategy in enumerate(space.strategies, start=1)
        if strategy.family == option
    }
    return min(distance, key=lambda action: distance[action])


def _rolling(space: ActionSpace, action: int, device: torch.device) -> Rule:
    """``action`` whenever no position is open and it is legal."""
    is_family = [" is " in name for name in portfolio_names(space)]
    columns = torch.tensor(is_family, device=device).nonzero().squeeze(1)

    def rule(observation: Observation, _: int) -> Tensor:
        holds_nothing = (observation["portfolio"][:, columns] == 0).all(1)
        wanted = holds_nothing & observation[ACTION_MASK][:, action]
        return torch.where(wanted, action, 0)

    return rule


def _random(space: ActionSpace, num_envs: int, seed: int, device: torch.device) -> Rule:
    index = torch.arange(num_envs, device=device)

    def rule(observation: Observation, step: int) -> Tensor:
        # The legal action with the largest of independent uniform numbers.
        drawn = streams.uniform(seed, streams.EVALUATION, index, step, space.num_actions)
        return drawn.masked_fill(~observation[ACTION_MASK], -1.0).argmax(1)

    return rule


def stock_episodes(market: Market, bars: Tensor, num_steps: int) -> Episodes:
    """Buying the underlying at the close of ``bars`` [num_episodes], for ``num_steps`` bars.

    The figures are defined as the environment's are (``options_env.EXTRAS``).
    """
    steps = torch.arange(num_steps + 1).unsqueeze(1)
    close = market.close.cpu()[bars.cpu() + steps]
    value = close / close[0]
    returns = value[-1] - 1
    change = value[1:] / value[:-1] - 1
    deviation = change.std(0, correction=0).clamp(min=1e-12)
    return Episodes(
        index=torch.arange(len(bars)),
        returns=returns,
        lengths=torch.full((len(bars),), num_steps),
        terminated=torch.zeros(len(bars), dtype=torch.bool),
        extras={
            "final_return": returns,
            "max_drawdown": (1 - value / value.cummax(0).values).max(0).values,
            "sharpe": change.mean(0) / deviation * market.bars_per_year**0.5,
            "trades": torch.ones_like(returns),
            "win_rate": (returns > 0).double(),
            "costs": torch.zeros_like(returns),
        },
        rewards=value.diff(dim=0),
        first={"bar": bars},
    )


#: The players that have learnt; all others are baselines.
AGENTS = ("agent", "agent_sampled")
#: Bounds that values cannot leave, so that no interval does.
_POSSIBLE = {
    "max_drawdown": (0.0, math.inf),
    "win_rate": (0.0, 1.0),
    "trades": (0.0, math.inf),
    "costs": (0.0, math.inf),
}
_COLUMNS = ("return", "sharpe", "max_drawdown", "win_rate", "trades", "costs")


def compare(played: Mapping[str, Episodes], clusters: Clusters, seed: int) -> dict[str, Any]:
    """Compare players by means with 95 % t-intervals, and the median return with a bootstrap one.

    Each agent is also compared to each baseline by the mean difference in return, paired by
    episode. All intervals are over ``clusters`` of the episodes, which all players share.
    """
    return {
        "players": {name: _numbers(each, clusters, seed) for name, each in played.items()},
        "differences": {
            agent: {
                name: _mean(played[agent].returns - episodes.returns, clusters)
                for name, episodes in played.items()
                if name not in AGENTS
            }
            for agent in AGENTS
        },
    }


def write(folder: Path, compared: Mapping[str, Any]) -> None:
    """Write ``comparison.json`` and ``comparison.csv``.

    The CSV has a row per player, after lines that begin with # and say what the intervals are.
    """
    text = json.dumps(compared, indent=2, allow_nan=False) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    with (folder / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [_row(name, compared) for name in compared["players"]]
        file.writelines(f"# {sentence}\n" for sentence in compared["caveats"])
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _mean(values: Tensor, clusters: Clusters, name: str = "") -> dict[str, Any]:
    low, high = _POSSIBLE.get(name, (-math.inf, math.inf))
    return record(clustered(values, clusters, low=low, high=high), len(values))


def _numbers(episodes: Episodes, clusters: Clusters, seed: int) -> dict[str, Any]:
    returns = episodes.returns
    values = {"return": returns, **episodes.extras}
    return {
        **{name: _mean(values[name], clusters, name) for name in _COLUMNS},
        "median_return": record(clustered_median(returns, clusters, seed), len(returns)),
        "ruined": int(episodes.terminated.sum()),
    }


def _row(name: str, compared: Mapping[str, Any]) -> dict[str, Any]:
    numbers = compared["players"][name]
    row: dict[str, Any] = {
        "player": name,
        "episodes": numbers["return"]["num"],
        "clusters": numbers["return"]["clusters"],
    }
    for column in _COLUMNS:
        row[column] = numbers[column]["middle"]
        row[f"{column}_low"] = numbers[column]["low"]
        row[f"{column}_high"] = numbers[column]["high"]
    for agent, differences in compared["differences"].items():
        found = differences.get(name, {"middle": None, "low": None, "high": None})
        row[f"{agent}_minus_it"] = found["middle"]
        row[f"{agent}_minus_it_low"] = found["low"]
        row[f"{agent}_minus_it_high"] = found["high"]
    return row | {"ruined": numbers["ruined"]}
