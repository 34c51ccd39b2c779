"""An estimated volatility must not be a source of income where prices hold none."""

from __future__ import annotations

import dataclasses
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from muster.agents import Place, interval
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.load import load_market
from muster_recipes.clstm_ppo.options_env import OptionsEnv

pytestmark = pytest.mark.thorough

NUM_SYMBOLS, NUM_BARS, EPISODE = 48, 340, 200
#: After as many bars as an estimate needs to mean something.
FIRST = 120


def brownian(folder: Path) -> Path:
    """Daily closes of geometric Brownian motions: 20 % a year, growing by the rate of 5 %."""
    dates: list[date] = []
    day = date(2015, 1, 1)
    while len(dates) < NUM_BARS:
        if day.weekday() < 5:
            dates.append(day)
        day += timedelta(days=1)
    steps = np.random.default_rng(0).normal(0.03 / 252, 0.2 / 252**0.5, (NUM_SYMBOLS, NUM_BARS))
    lines = ["timestamp,symbol,open,high,low,close,volume"]
    for number, closes in enumerate(100 * np.exp(steps.cumsum(1))):
        lines += [
            f"{day},S{number:02},{p},{p},{p},{p},5000000"
            for day, p in zip(dates, closes, strict=True)
        ]
    path = folder / "brownian.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def low_is_bought_high_is_sold(level: Tensor, mask: Tensor, kind: Tensor) -> Tensor:
    """Below 17.5 % a call or a put, of which there are fewer; above 20 % the first that can be
    sold."""
    calls = ((kind >= 1) & (kind <= 10)).sum(1)
    bought = torch.where(calls <= (kind > 10).sum(1), 1, 11)
    bought = torch.where(mask.gather(1, bought[:, None]).squeeze(1), bought, 0)
    sold = torch.where(mask[:, 21:].any(1), 21 + mask[:, 21:].int().argmax(1), 0)
    return torch.where(level < 0.175, bought, torch.where(level > 0.2, sold, 0))


def test_buying_cheap_volatility_earns_nothing_where_volatility_is_constant(
    tmp_path: Path,
) -> None:
    """With costs. From an estimate that followed its own noise this rule earned a fifth a year."""
    config = ClstmPpoConfig(
        data=brownian(tmp_path), val_share=0.05, test_share=0.85, window=3, episode_bars=10
    )
    market = load_market(config, lambda _: None)
    starts = torch.arange(NUM_SYMBOLS) * NUM_BARS + FIRST
    market = dataclasses.replace(market, starts=dict.fromkeys(("train", "val", "test"), starts))
    config = dataclasses.replace(config, episode_bars=EPISODE)
    place = Place(num_envs=NUM_SYMBOLS, first_env=0, seed=0, device=torch.device("cpu"))
    env = OptionsEnv(market, "test", config, place, spread=True)
    seen, total = env.reset(), torch.zeros(NUM_SYMBOLS, dtype=torch.float64)
    assert torch.equal(seen["bar"], starts)
    for _ in range(EPISODE):
        level = market.volatility[seen["bar"]]
        outcome = env.step(
            low_is_bought_high_is_sold(level, seen["action_mask"], env.rows["book.kind"])
        )
        total += outcome.reward
        seen = env.observe()
    earned = interval(total)
    assert earned.low < 0.0, earned
    assert abs(earned.middle) < 0.05, earned
