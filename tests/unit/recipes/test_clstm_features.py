"""Indicators against slow loops from their definitions; and none of them looks ahead."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster_recipes.clstm_ppo.bars import Array, Bars, Calendar, calendar_of
from muster_recipes.clstm_ppo.features import (
    bollinger_position,
    exponential_average,
    features_of,
    log_return,
    macd,
    realised_volatility,
    rsi,
    z_score,
)

DAILY = Calendar(spacing_s=86_400.0, bars_per_day=1.0, trades_weekends=False)
HOURLY = Calendar(spacing_s=3_600.0, bars_per_day=7.0, trades_weekends=False)

prices = st.lists(st.floats(1.0, 200.0), min_size=1, max_size=60).map(np.array)


def walk(number: int, seed: int = 0) -> Array:
    stream = np.random.default_rng(seed)
    return 100.0 * np.exp(np.cumsum(stream.normal(0.0, 0.02, number)))


def slow_rsi(close: list[float]) -> float:
    """Of the last bar: 100 - 100 / (1 + RS), Wilder's averages written out."""
    changes = [after - before for before, after in pairwise(close)]
    if len(changes) < 14:
        return 50.0
    gain = sum(max(change, 0.0) for change in changes[:14]) / 14
    loss = sum(max(-change, 0.0) for change in changes[:14]) / 14
    for change in changes[14:]:
        gain = (gain * 13 + max(change, 0.0)) / 14
        loss = (loss * 13 + max(-change, 0.0)) / 14
    if gain == loss == 0.0:
        return 50.0
    return 100.0 if loss == 0.0 else 100.0 - 100.0 / (1.0 + gain / loss)


def slow_average(values: list[float], num_bars: int) -> float:
    average = values[0]
    for value in values[1:]:
        average = value * 2 / (num_bars + 1) + average * (1 - 2 / (num_bars + 1))
    return average


# The worked example of StockCharts's ChartSchool, "Relative Strength Index (RSI)": QQQQ, 33 closes.
PUBLISHED_CLOSES = [
    44.3389, 44.0902, 44.1497, 43.6124, 44.3278, 44.8264, 45.0955, 45.4245, 45.8433, 46.0826,
    45.8931, 46.0328, 45.6140, 46.2820, 46.2820, 46.0028, 46.0328, 46.4116, 46.2222, 45.6439,
    46.2122, 46.2521, 45.7137, 46.4515, 45.7835, 45.3548, 44.0288, 44.1783, 44.2181, 44.5672,
    43.4205, 42.6628, 43.1314,
]  # fmt: skip
PUBLISHED_RSI = [
    70.53, 66.32, 66.55, 69.41, 66.36, 57.97, 62.93, 63.26, 56.06, 62.38, 54.71, 50.42, 39.99,
    41.46, 41.87, 45.46, 37.30, 33.08, 37.77,
]  # fmt: skip


def test_rsi_is_the_published_one() -> None:
    found = rsi(np.array(PUBLISHED_CLOSES))[14:]
    np.testing.assert_allclose(found, PUBLISHED_RSI, atol=0.015)


@examples(60)
@given(prices)
def test_rsi_is_wilders(close: Array) -> None:
    expected = [slow_rsi(close[: bar + 1].tolist()) for bar in range(len(close))]
    np.testing.assert_allclose(rsi(close), expected, rtol=1e-9, atol=1e-7)


def test_rsi_at_its_ends() -> None:
    assert rsi(np.arange(1.0, 40.0))[-1] == 100.0
    assert rsi(np.arange(40.0, 1.0, -1.0))[-1] == 0.0
    assert (rsi(np.ones(40)) == 50.0).all()
    assert (rsi(walk(14)) == 50.0).all() and rsi(walk(15))[-1] != 50.0


@examples(60)
@given(prices)
def test_macd_is_appels(close: Array) -> None:
    line, histogram = macd(close)
    slow_line = [
        slow_average(close[: bar + 1].tolist(), 12) - slow_average(close[: bar + 1].tolist(), 26)
        for bar in range(len(close))
    ]
    signal = [slow_average(slow_line[: bar + 1], 9) for bar in range(len(close))]
    np.testing.assert_allclose(line, slow_line, atol=1e-9)
    np.testing.assert_allclose(histogram, np.array(slow_line) - signal, atol=1e-9)
    np.testing.assert_allclose(exponential_average(close, 1), close)


@examples(60)
@given(prices)
def test_windows_are_of_the_last_bars_and_shorter_at_the_start(close: Array) -> None:
    z, bands = z_score(close, 20), bollinger_position(close)
    for bar in range(len(close)):
        window = close[max(0, bar - 19) : bar + 1].tolist()
        deviation = pstdev(window)
        if deviation > 1e-9:
            expected = (close[bar] - fmean(window)) / deviation
            assert z[bar] == pytest.approx(expected, abs=1e-6)
            upper = fmean(window) + 2 * deviation
            lower = fmean(window) - 2 * deviation
            position = 2 * (close[bar] - lower) / (upper - lower) - 1
            assert bands[bar] == pytest.approx(position, abs=1e-6)
    assert (z_score(np.full(30, 0.1), 20) == 0.0).all()


@examples(60)
@given(prices, st.sampled_from([1, 5, 20]))
def test_returns_and_realised_volatility(close: Array, num_bars: int) -> None:
    returns = log_return(close, num_bars)
    volatility = realised_volatility(close, 252.0)
    for bar in range(len(close)):
        assert returns[bar] == pytest.approx(math.log(close[bar] / close[max(0, bar - num_bars)]))
        steps = [math.log(close[i] / close[i - 1]) for i in range(max(1, bar - 19), bar + 1)]
        mean = fmean(step**2 for step in steps) if steps else 0.0
        assert volatility[bar] == pytest.approx(math.sqrt(252.0 * mean), rel=1e-9, abs=1e-12)


def bars_of(closes: list[Array], spacing_s: int = 86_400) -> Bars:
    close = np.concatenate(closes)
    stream = np.random.default_rng(len(close))
    first = 1_704_205_800  # a Tuesday, 14:30 UTC
    return Bars(
        source="test",
        symbols=tuple(f"S{number}" for number in range(len(closes))),
        symbol=np.repeat(np.arange(len(closes)), [len(part) for part in closes]),
        time=np.concatenate([first + spacing_s * np.arange(len(part)) for part in closes]),
        open=close,
        high=1.01 * close,
        low=0.99 * close,
        close=close,
        volume=stream.lognormal(10.0, 1.0, len(close)),
    )


@examples(40)
@given(
    symbol=st.integers(0, 1),
    bar=st.integers(0, 59),
    factor=st.sampled_from([1e-3, 0.5, 1.001, 1e3]),
    calendar=st.sampled_from([DAILY, HOURLY]),
)
def test_a_bar_changes_no_feature_before_it_nor_of_another_symbol(
    symbol: int, bar: int, factor: float, calendar: Calendar
) -> None:
    bars = bars_of([walk(60, seed=1), walk(60, seed=2)])
    _, before = features_of(bars, calendar)
    at = 60 * symbol + bar
    for name in ("open", "high", "low", "close", "volume"):
        getattr(bars, name)[at] *= factor
    _, after = features_of(bars, calendar)
    same = np.arange(120) < at if symbol == 1 else (np.arange(120) < at) | (np.arange(120) >= 60)
    np.testing.assert_array_equal(before[same], after[same])
    if bar >= 1:  # and it does change its own
        assert (before[at] != after[at]).any()


@examples(20)
@given(st.integers(1, 59))
def test_a_shorter_history_has_the_same_features(number: int) -> None:
    whole, part = bars_of([walk(60)]), bars_of([walk(60)[:number]])
    part.volume[:] = whole.volume[:number]
    np.testing.assert_array_equal(
        features_of(whole, DAILY)[1][:number], features_of(part, DAILY)[1]
    )


def test_names_and_finite_values_from_the_first_bar_on() -> None:
    names, values = features_of(bars_of([walk(50), np.ones(50), walk(1)]), DAILY)
    assert names == (
        "log_return_1", "log_return_5", "log_return_20", "rsi", "macd", "macd_histogram",
        "bollinger", "realised_volatility", "volume_z", "weekday_sin", "weekday_cos",
    )  # fmt: skip
    assert values.shape == (101, 11) and values.dtype == np.float32
    assert np.isfinite(values).all()
    first = dict(zip(names, values[0].tolist(), strict=True))
    del first["weekday_sin"], first["weekday_cos"]
    assert set(first.values()) == {0.0}


def test_time_is_a_place_in_the_week_and_in_the_day() -> None:
    bars = bars_of([walk(24 * 14)], spacing_s=3_600)
    names, values = features_of(bars, calendar_of(bars))
    at = {name: values[:, i] for i, name in enumerate(names)}
    # The first bar is on a Tuesday at 14:30.
    assert at["weekday_sin"][0] == pytest.approx(math.sin(2 * math.pi / 7), abs=1e-6)
    assert at["hour_cos"][0] == pytest.approx(math.cos(2 * math.pi * 14.5 / 24), abs=1e-6)
    np.testing.assert_allclose(at["hour_sin"][24:], at["hour_sin"][:-24], atol=1e-6)
    np.testing.assert_allclose(at["weekday_cos"][168:], at["weekday_cos"][:-168], atol=1e-6)
