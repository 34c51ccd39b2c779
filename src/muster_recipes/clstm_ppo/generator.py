"""A simulated market: Heston's stochastic volatility around a drift that switches now and then.

The model (Heston 1993, "A Closed-Form Solution for Options with Stochastic Volatility"):

    dS = (rate + drift) S dt + sqrt(v) S dW1
    dv = kappa (theta - v) dt + sigma sqrt(v) dW2,     corr(dW1, dW2) = rho

``drift`` is plus or minus ``sim_drift``, a Markov chain of two states that stays in one for
``sim_switch_bars`` bars in the mean. Without drift the discounted price is a martingale, so that
options are fair apart from what the implied volatility of the recipe leaves out. The variance is
stepped by the Euler scheme with full truncation (Lord, Koekkoek, van Dijk 2010, "A comparison of
biased simulation schemes for stochastic volatility models"), the price by its logarithm, several
steps per bar.

Every random number is a function of (``sim_seed``, symbol, bar): a market with more symbols or more
bars begins with the smaller one, and is the same everywhere up to the rounding of log and cos.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from muster.agents import streams
from muster_recipes.clstm_ppo.bars import CALENDAR_DAYS_PER_YEAR, COLUMNS, Array, Bars
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.quotes import RATE

#: The market is open every day. With weekends, 30 days would hold 21 or 22 bars of a 252nd of a
#: year each: more variance than options over 30 days are priced with.
BARS_PER_YEAR = CALENDAR_DAYS_PER_YEAR
#: The first step of a bar is the night: the bar opens after it.
STEPS_PER_BAR = 8
FIRST_PRICE = 100.0
FIRST_DAY = np.datetime64("2000-01-03", "D")
#: Shares per bar: log-normal, more when the price has moved far.
MEDIAN_VOLUME = 2e6
VOLUME_SPREAD = 0.3
VOLUME_BY_MOVE = 0.4
#: The variance forgets its start over so many relaxation times (1 / kappa) before the first bar,
#: as far as so many bars allow.
_RELAXATIONS, _MAX_BURN_IN = 5.0, 2520
#: No other user of a seed draws for this purpose.
_MARKET = 101


class Simulated(NamedTuple):
    """Paths [symbols, bars]. ``variance``: v at the end of a bar, per year, at least 0.
    ``drift``: what was in force during the bar, per year."""

    open: Array
    high: Array
    low: Array
    close: Array
    volume: Array
    variance: Array
    drift: Array


def simulate(config: ClstmPpoConfig) -> Simulated:
    """The paths that the settings ``sim_*`` describe."""
    relaxation_bars = BARS_PER_YEAR / config.sim_mean_reversion
    burn_in = min(math.ceil(_RELAXATIONS * relaxation_bars), _MAX_BURN_IN)
    bars = torch.arange(-burn_in, config.sim_bars)
    symbol = torch.arange(config.sim_symbols).unsqueeze(1).expand(-1, len(bars)).contiguous()
    bar = bars.expand_as(symbol).contiguous()
    # Even counters for what moves the prices, odd ones for the switches of the drift.
    normals = streams.normal(
        config.sim_seed, _MARKET, symbol, 2 * bar, 2 * STEPS_PER_BAR + 1
    ).numpy()
    switches = streams.uniform(config.sim_seed, _MARKET, symbol, 2 * bar + 1).squeeze(-1).numpy()

    shocks = normals[..., :STEPS_PER_BAR]
    rest = math.sqrt(1.0 - config.sim_correlation**2)
    variance_shocks = (
        config.sim_correlation * shocks + rest * normals[..., STEPS_PER_BAR : 2 * STEPS_PER_BAR]
    )
    before, variance = _variance(config, variance_shocks)
    before, variance, shocks = before[:, burn_in:], variance[:, burn_in:], shocks[:, burn_in:]
    drift = _drift(config, switches[:, burn_in:])

    dt = 1.0 / (BARS_PER_YEAR * STEPS_PER_BAR)
    moves = (RATE + drift[..., None] - 0.5 * before) * dt + np.sqrt(before * dt) * shocks
    logs = math.log(FIRST_PRICE) + np.cumsum(moves.reshape(len(moves), -1), axis=1)
    path = np.exp(logs.reshape(moves.shape))
    return Simulated(
        open=path[..., 0],
        high=path.max(axis=-1),
        low=path.min(axis=-1),
        close=path[..., -1],
        volume=_volume(config, moves.sum(axis=-1), normals[:, burn_in:, -1]),
        variance=variance,
        drift=drift,
    )


def simulated_bars(config: ClstmPpoConfig) -> tuple[Bars, Simulated]:
    """The paths as daily bars of the symbols SIM00, SIM01, ..., on all days from 2000 on."""
    paths = simulate(config)
    days = FIRST_DAY + np.arange(config.sim_bars)
    seconds = days.astype("datetime64[s]").astype(np.int64)
    digits = max(2, len(str(config.sim_symbols - 1)))
    bars = Bars(
        source="simulated",
        symbols=tuple(f"SIM{number:0{digits}}" for number in range(config.sim_symbols)),
        symbol=np.repeat(np.arange(config.sim_symbols), config.sim_bars),
        time=np.tile(seconds, config.sim_symbols),
        **{name: getattr(paths, name).reshape(-1) for name in COLUMNS[2:]},
    )
    return bars, paths


def _variance(config: ClstmPpoConfig, shocks: Array) -> tuple[Array, Array]:
    """The truncated variance before every step [symbols, bars, steps], and after each bar."""
    kappa, theta = config.sim_mean_reversion, config.sim_volatility**2
    dt = 1.0 / (BARS_PER_YEAR * STEPS_PER_BAR)
    # Time first, so that every step reads and writes one stretch of memory.
    kicks = config.sim_vol_of_vol * math.sqrt(dt) * shocks.reshape(len(shocks), -1).T
    truncated = np.empty((len(kicks) + 1, len(shocks)))
    variance = np.full(len(shocks), theta)
    for step, kick in enumerate(kicks):
        positive = np.maximum(variance, 0.0, out=truncated[step])
        variance = variance + kappa * dt * (theta - positive) + np.sqrt(positive) * kick
    np.maximum(variance, 0.0, out=truncated[-1])
    before = truncated[:-1].T.reshape(shocks.shape)
    after = truncated[STEPS_PER_BAR::STEPS_PER_BAR].T
    return before, after


def _drift(config: ClstmPpoConfig, uniform: Array) -> Array:
    """The drift, plus or minus ``sim_drift`` [symbols, bars]: a fair start, then a switch with
    probability 1 / ``sim_switch_bars`` before every bar."""
    switched = uniform < 1.0 / config.sim_switch_bars
    switched[:, 0] = uniform[:, 0] < 0.5
    is_down = np.cumsum(switched, axis=1) % 2 == 1
    return np.where(is_down, -config.sim_drift, config.sim_drift)


def _volume(config: ClstmPpoConfig, log_return: Array, normal: Array) -> Array:
    """Log-normal, centred where the move of the bar is of its usual size."""
    usual = config.sim_volatility / math.sqrt(BARS_PER_YEAR)
    surprise = np.abs(log_return) / usual - math.sqrt(2.0 / math.pi)
    volume: Array = np.round(
        MEDIAN_VOLUME * np.exp(VOLUME_BY_MOVE * surprise + VOLUME_SPREAD * normal)
    )
    return volume
