"""The simulated market against the theory of what it simulates.

Every tolerance is four standard errors that follow from the model; the seeds are fixed.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.unit.recipes.black_scholes import price_and_delta

from muster import UsageError
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.generator import Simulated, simulate, simulated_bars
from muster_recipes.clstm_ppo.quotes import RATE

SYMBOLS, BARS, DT = 200, 2520, 1 / 365.25
CONFIG = ClstmPpoConfig(
    sim_symbols=SYMBOLS,
    sim_bars=BARS,
    sim_seed=7,
    sim_drift=0.0,
    sim_volatility=0.4,
    sim_vol_of_vol=0.6,
    sim_mean_reversion=3.0,
    sim_correlation=-0.5,
)
KAPPA, THETA, SIGMA, RHO = 3.0, 0.16, 0.6, -0.5
#: The stationary law of the variance is a gamma with this shape and scale.
SHAPE, SCALE = 2 * KAPPA * THETA / SIGMA**2, SIGMA**2 / (2 * KAPPA)
YEARS = SYMBOLS * BARS * DT


@cache
def paths() -> Simulated:
    return simulate(CONFIG)


@cache
def drifting() -> Simulated:
    """The same shocks with a drift of 0.4 that holds for 50 bars in the mean."""
    return simulate(replace(CONFIG, sim_drift=0.4, sim_switch_bars=50.0))


def test_the_variance_has_its_stationary_mean() -> None:
    # The mean over a time T of a process with autocovariance s^2 exp(-kappa t) has the variance
    # 2 s^2 / (kappa T).
    error = math.sqrt(2 * SHAPE * SCALE**2 / (KAPPA * YEARS))
    assert abs(paths().variance.mean() - THETA) < 4 * error
    assert error < 0.02 * THETA


def test_the_variance_has_its_stationary_variance() -> None:
    expected = THETA * SIGMA**2 / (2 * KAPPA)
    assert expected == pytest.approx(SHAPE * SCALE**2)
    # (v - theta)^2 has two parts, along Laguerre polynomials, that decay with kappa and 2 kappa.
    first, second = 4 * SHAPE * SCALE**4, (2 * SHAPE**2 + 2 * SHAPE) * SCALE**4
    error = math.sqrt(2 / YEARS * (first / KAPPA + second / (2 * KAPPA)))
    assert abs(((paths().variance - THETA) ** 2).mean() - expected) < 4 * error
    assert error < 0.04 * expected


@pytest.mark.parametrize("lag", [1, 20, 84])
def test_the_variance_forgets_exponentially(lag: int) -> None:
    deviation = paths().variance - THETA
    per_symbol = (deviation[:, lag:] * deviation[:, :-lag]).mean(axis=1)
    scale = (deviation**2).mean()
    # Symbols are independent: the error of the mean over them, of the part the lag explains.
    slopes = per_symbol - math.exp(-KAPPA * lag * DT) * (deviation**2).mean(axis=1)
    error = slopes.std() / math.sqrt(SYMBOLS) / scale
    found = per_symbol.mean() / scale
    assert abs(found - math.exp(-KAPPA * lag * DT)) < 4 * error
    assert error < 0.02


def test_log_returns_have_the_mean_and_the_variance_of_the_model() -> None:
    returns = np.diff(np.log(paths().close), axis=1)
    years = SYMBOLS * (BARS - 1) * DT
    # Mean: r - theta / 2 per year. Its error: of the diffusion and of the wandering variance; they
    # correlate, so the sum bounds it.
    error = math.sqrt(THETA / years) + 0.5 * math.sqrt(2 * SHAPE * SCALE**2 / (KAPPA * years))
    assert abs(returns.mean() / DT - (RATE - THETA / 2)) < 4 * error
    # Variance: theta per year. Given v, squared returns scatter by 2 v^2.
    noise = 2 * (SHAPE * SCALE**2 + THETA**2) / (returns.size)
    error = math.sqrt(noise + 2 * SHAPE * SCALE**2 / (KAPPA * years))
    assert abs(returns.var() / DT - THETA) < 4 * error


def test_returns_and_variance_move_together_as_much_as_they_should() -> None:
    variance = paths().variance
    returns = np.diff(np.log(paths().close), axis=1)
    level = np.sqrt(np.maximum(variance[:, :-1], 1e-4) * DT)
    first = (returns - RATE * DT + variance[:, :-1] / 2 * DT) / level
    second = (np.diff(variance, axis=1) - KAPPA * (THETA - variance[:, :-1]) * DT) / (SIGMA * level)
    usual = variance[:, :-1] > 0.04  # where it hardly changes within a bar
    found = np.corrcoef(first[usual], second[usual])[0, 1]
    # 4 standard errors, and the change of the level within a bar: of the order of its variance.
    assert abs(found - RHO) < 4 * (1 - RHO**2) / math.sqrt(usual.sum()) + 0.003


def test_without_drift_the_discounted_price_is_a_martingale() -> None:
    for bars in (63, 252, 756):
        years = bars * DT
        growth = paths().close[:, bars:] / paths().close[:, :-bars] * math.exp(-RATE * years)
        per_symbol = growth.mean(axis=1)
        assert abs(per_symbol.mean() - 1) < 4 * per_symbol.std() / math.sqrt(SYMBOLS)
    pieces = paths().close[:, 20::20] / paths().close[:, :-20:20] * math.exp(-RATE * 20 * DT)
    # Non-overlapping stretches do not correlate: exp(theta T) - 1 is their variance, nearly.
    error = math.sqrt(1.5 * (math.exp(THETA * 20 * DT) - 1) / pieces.size)
    assert abs(pieces.mean() - 1) < 4 * error
    assert error < 0.001  # a drift of 0.05 per year would add 0.004


def test_options_are_fair_where_nothing_but_the_price_moves() -> None:
    """Without drift and with constant variance, Black and Scholes's market."""
    config = replace(CONFIG, sim_vol_of_vol=0.0, sim_bars=510)
    close = torch.from_numpy(simulate(config).close)
    spot, after = close[:, :-21:21].ravel(), close[:, 21::21].ravel()
    years, volatility = torch.tensor(21 * DT), torch.tensor(math.sqrt(THETA))
    for is_call in (True, False):
        for moneyness in (0.95, 1.0, 1.05):
            strike = moneyness * spot
            prices, _ = price_and_delta(spot, strike, years, volatility, RATE, is_call)
            paid = prices / spot
            payoff = ((after - strike) if is_call else (strike - after)).clamp(min=0.0) / spot
            gain = math.exp(-RATE * 21 * DT) * payoff - paid
            assert abs(gain.mean()) < 4 * gain.std() / math.sqrt(len(gain))
            assert gain.std() / math.sqrt(len(gain)) < 0.04 * paid.mean()


def test_the_drift_holds_for_its_mean_time_and_moves_the_price() -> None:
    drift = drifting().drift
    assert set(np.unique(drift)) == {-0.4, 0.4}
    switches = int((np.diff(drift, axis=1) != 0).sum())
    chances = SYMBOLS * (BARS - 1)
    error = math.sqrt(chances * 0.02 * 0.98)
    assert abs(switches - chances / 50) < 4 * error
    # Half of the time each; the correlation time of a sign is about half the holding time.
    assert abs((drift > 0).mean() - 0.5) < 4 * 0.5 * math.sqrt(50 / chances)
    # The same seed without drift has the same shocks: the difference is the drift alone.
    moved = np.log(drifting().close / paths().close)
    np.testing.assert_allclose(moved, np.cumsum(drift, axis=1) * DT, atol=1e-10)


def test_holding_times_are_geometric() -> None:
    drift = drifting().drift
    lengths = np.concatenate([np.diff(np.flatnonzero(np.diff(row) != 0)) for row in drift])
    for bars in (10, 50, 100):
        expected = 0.98**bars
        error = math.sqrt(expected * (1 - expected) / len(lengths))
        # Stretches cut off by the end are left out, which favours short ones by about 2 %.
        assert abs((lengths > bars).mean() - expected) < 4 * error + 0.02


def test_a_switch_of_the_drift_tells_nothing_of_the_shocks() -> None:
    switched = np.diff(drifting().drift, axis=1) != 0
    variance = paths().variance[:, :-1]
    night = np.log(paths().open[:, 1:] / paths().close[:, :-1]) / np.sqrt(variance * DT / 8)
    chosen = night[switched & (variance > 0.01)]
    assert abs(chosen.mean()) < 4 / math.sqrt(len(chosen)) + 0.02  # RATE and the mean of the log
    assert abs((chosen**2).mean() - 1) < 4 * math.sqrt(2 / len(chosen))


def test_bars_are_consistent_and_begin_and_go_on_as_prices_do() -> None:
    found = paths()
    assert (found.low <= np.minimum(found.open, found.close)).all()
    assert (found.high >= np.maximum(found.open, found.close)).all()
    assert (found.low > 0).all() and (found.volume > 0).all() and (found.variance >= 0).all()
    # A night is an eighth of the variance of a day.
    night = np.log(found.open[:, 1:] / found.close[:, :-1]).var()
    day = np.diff(np.log(found.close), axis=1).var()
    assert night / day == pytest.approx(1 / 8, rel=0.02)


def test_volume_grows_with_the_size_of_the_move() -> None:
    size = np.abs(np.diff(np.log(paths().close), axis=1))
    logs = np.log(paths().volume[:, 1:])
    assert np.corrcoef(size.ravel(), logs.ravel())[0, 1] > 0.3


def test_a_larger_market_begins_with_the_smaller_and_another_seed_is_another_market() -> None:
    small = simulate(replace(CONFIG, sim_symbols=3, sim_bars=40))
    for few, many in zip(small, paths(), strict=True):
        np.testing.assert_array_equal(few, many[:3, :40])
    other = simulate(replace(CONFIG, sim_symbols=3, sim_bars=40, sim_seed=8))
    assert abs(np.corrcoef(np.diff(other.close[0]), np.diff(small.close[0]))[0, 1]) < 0.6
    assert not np.array_equal(other.close, small.close)
    closes = np.diff(np.log(paths().close[:50]), axis=1)
    between = np.corrcoef(closes)[np.triu_indices(50, 1)]
    assert np.abs(between).max() < 5 / math.sqrt(BARS)


def test_bars_are_all_days_of_named_symbols() -> None:
    bars, found = simulated_bars(replace(CONFIG, sim_symbols=3, sim_bars=30))
    assert bars.symbols == ("SIM00", "SIM01", "SIM02")
    days = bars.time[:30].astype("datetime64[s]").astype("datetime64[D]")
    assert str(days[0]) == "2000-01-03" and (np.diff(days).astype(int) == 1).all()
    np.testing.assert_array_equal(bars.close[bars.ranges()[2]], found.close[2])


def test_the_extremes_of_the_settings_stay_finite() -> None:
    for changes in (
        {"sim_vol_of_vol": 0.0},
        {"sim_vol_of_vol": 2.0, "sim_mean_reversion": 0.1},  # far from Feller's condition
        {"sim_correlation": -1.0},
        {"sim_correlation": 1.0, "sim_switch_bars": 1.0},
        {"sim_bars": 1, "sim_symbols": 1},
    ):
        config = replace(CONFIG, **{"sim_symbols": 4, "sim_bars": 60, **changes})
        assert all(np.isfinite(part).all() for part in simulate(config)), changes
    with pytest.raises(UsageError, match="--sim-switch-bars must be 1 or more"):
        replace(CONFIG, sim_switch_bars=0.5)
