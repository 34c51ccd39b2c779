"""An agent beside the baselines: numbers with intervals, as values, a CSV and a JSON file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.agents import Episodes, interval, median_interval

#: The players that have learnt; all others are baselines.
AGENTS = ("agent", "agent_sampled")
_COLUMNS = ("return", "sharpe", "max_drawdown", "win_rate", "trades", "costs")


def compare(played: Mapping[str, Episodes], seed: int) -> dict[str, Any]:
    """Means with 95 % t-intervals of every player, the median return with a bootstrap interval,
    and the mean difference in return of each agent to each baseline, paired by episode."""
    return {
        "players": {name: _numbers(episodes, seed) for name, episodes in played.items()},
        "differences": {
            agent: {
                name: interval(played[agent].returns - episodes.returns).record()
                for name, episodes in played.items()
                if name not in AGENTS
            }
            for agent in AGENTS
        },
    }


def write(folder: Path, compared: Mapping[str, Any]) -> None:
    """``comparison.json`` and ``comparison.csv``, a row per player."""
    text = json.dumps(compared, indent=2, allow_nan=False) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    with (folder / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [_row(name, compared) for name in compared["players"]]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _numbers(episodes: Episodes, seed: int) -> dict[str, Any]:
    values = {"return": episodes.returns, **episodes.extras}
    return {
        **{name: interval(values[name]).record() for name in _COLUMNS},
        "median_return": median_interval(episodes.returns, seed=seed).record(),
        "ruined": int(episodes.terminated.sum()),
    }


def _row(name: str, compared: Mapping[str, Any]) -> dict[str, Any]:
    numbers = compared["players"][name]
    row: dict[str, Any] = {"player": name, "episodes": numbers["return"]["num"]}
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
