"""Small hand-made markets for the tests of the options environment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muster.rl.environment import Place
from muster_recipes.clstm_ppo.market import Market

DAY_S = 86_400
START_S = 1_700_000_000


def market(
    close: Tensor,
    *,
    volatility: float | Tensor = 0.2,
    volume: float | Tensor = 5e6,
    bar_days: float = 1.0,
    episode_bars: int = 1,
) -> Market:
    """``close`` [symbols, bars]. Episodes may begin at every bar that leaves room for one."""
    symbols, bars = close.shape
    flat = close.double().flatten()
    starts = torch.arange(symbols * bars).view(symbols, bars)[:, : bars - episode_bars].flatten()
    stamps = START_S + (torch.arange(bars) * bar_days * DAY_S).long()
    return Market(
        source="by hand",
        symbols=tuple(f"S{i}" for i in range(symbols)),
        symbol=torch.arange(symbols).repeat_interleave(bars),
        time=stamps.repeat(symbols),
        open=flat,
        high=flat,
        low=flat,
        close=flat,
        volume=torch.as_tensor(volume, dtype=torch.float64).expand(symbols, bars).flatten(),
        volatility=torch.as_tensor(volatility, dtype=torch.float64).expand(symbols, bars).flatten(),
        features=torch.zeros(symbols * bars, 2),
        feature_names=("a", "b"),
        bars_per_year=252.0,
        starts={"train": starts, "val": starts, "test": starts},
        truth={},
    )


def random_walk(
    symbols: int = 3, bars: int = 130, *, seed: int = 0, episode_bars: int = 60, jumps: float = 1.0
) -> Market:
    """Prices, volatilities and volumes that all move; volumes sometimes too thin for an order."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, symbols, bars, generator=generator, dtype=torch.float64)
    close = 80.0 * torch.exp((0.02 * jumps * draw[0]).cumsum(1))
    volatility = 0.25 * torch.exp(0.3 * draw[1])
    volume = 3e5 * torch.exp(1.5 * draw[2])
    return market(close, volatility=volatility, volume=volume, episode_bars=episode_bars)


def lognormal_ends(
    num_paths: int, *, drift: float, volatility: float, days: float, spot: float = 100.0
) -> Market:
    """Two bars per symbol; the second is a geometric Brownian motion ``days`` later.

    The symbols' ends are the means of its price within ``num_paths`` equally probable cells, so
    that the mean over all symbols of a payoff that is linear within cells is its expectation.
    """
    years = days / 365.0
    deviation = volatility * math.sqrt(years)
    edges = torch.special.ndtri(torch.linspace(0, 1, num_paths + 1, dtype=torch.float64))
    partial = torch.special.ndtr(edges - deviation)
    ends = spot * math.exp(drift * years) * num_paths * partial.diff()
    return market(
        torch.stack([torch.full_like(ends, spot), ends], dim=1),
        volatility=volatility,
        bar_days=days,
    )


def place(num_envs: int, *, seed: int = 0, first_env: int = 0) -> Place:
    return Place(num_envs=num_envs, first_env=first_env, seed=seed, device=torch.device("cpu"))


def random_legal(mask: Tensor, generator: torch.Generator, hold: float = 0.3) -> Tensor:
    """One possible action per row; with probability ``hold`` action 0."""
    draw = torch.rand(mask.shape, generator=generator)
    actions = torch.where(mask, draw, -1.0).argmax(-1)
    return torch.where(torch.rand(len(mask), generator=generator) < hold, 0, actions)
