"""An agent beside the baselines: numbers with intervals, as values, a CSV and a JSON file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from muster.agents import Episodes
from muster_recipes.clstm_ppo.clusters import Clusters, clustered, clustered_median, record

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
