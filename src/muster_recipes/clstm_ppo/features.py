"""The features of a market at a bar: functions of the symbol's bars up to that one.

Nothing looks ahead: changing a bar changes no feature before it. All values are finite. Where an
indicator needs more bars than there are yet, it has a value all the same:

* log returns of k bars: since the first bar; 0 at the first bar;
* RSI: neutral (0) until there are 14 changes;
* moving averages, Bollinger position, volume z-score and realised volatility: over the bars there
  are; 0 at the first bar.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from muster_recipes.clstm_ppo.bars import DAY_S, Array, Bars, Calendar, Integers

RETURN_BARS = (1, 5, 20)
RSI_BARS = 14
MACD_FAST, MACD_SLOW, MACD_SIGNAL = 12, 26, 9
BOLLINGER_BARS, BOLLINGER_WIDTH = 20, 2.0
VOLATILITY_BARS = 20
VOLUME_BARS = 20


def features_of(bars: Bars, calendar: Calendar) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Names, and values [B, number of names]."""
    symbols = [_of_symbol(bars, part, calendar.bars_per_year) for part in bars.ranges()]
    columns = {name: np.concatenate([each[name] for each in symbols]) for name in symbols[0]}
    columns |= _of_time(bars.time, calendar.is_intraday)
    return tuple(columns), np.stack(list(columns.values()), axis=1).astype(np.float32)


def _of_symbol(bars: Bars, part: slice, bars_per_year: float) -> dict[str, Array]:
    close, volume = bars.close[part], bars.volume[part]
    line, histogram = macd(close)
    return {
        **{f"log_return_{num}": log_return(close, num) for num in RETURN_BARS},
        "rsi": rsi(close) / 50.0 - 1.0,
        "macd": line / close,
        "macd_histogram": histogram / close,
        "bollinger": bollinger_position(close),
        "realised_volatility": realised_volatility(close, bars_per_year),
        "volume_z": z_score(np.log1p(volume), VOLUME_BARS),
    }


def _of_time(time_s: Integers, is_intraday: bool) -> dict[str, Array]:
    """Sine and cosine of the place in the week and, within days, in the day; all UTC."""
    # 1970-01-01 was a Thursday: Monday is 0.
    weekday = 2.0 * np.pi * ((time_s // DAY_S + 3) % 7) / 7.0
    columns: dict[str, Array] = {"weekday_sin": np.sin(weekday), "weekday_cos": np.cos(weekday)}
    if is_intraday:
        hour = 2.0 * np.pi * (time_s % DAY_S) / DAY_S
        columns |= {"hour_sin": np.sin(hour), "hour_cos": np.cos(hour)}
    return columns


def log_return(close: Array, num_bars: int) -> Array:
    """ln(close now / close ``num_bars`` ago)."""
    logs = np.log(close)
    ago = np.maximum(np.arange(len(close)) - num_bars, 0)
    returns: Array = logs - logs[ago]
    return returns


def rsi(close: Array) -> Array:
    """Relative strength index, 0 to 100, over 14 bars (Wilder 1978, "New Concepts in Technical
    Trading Systems"): 100 x average gain / (average gain + average loss). The first averages are
    plain means of 14 changes; each following one keeps 13/14 of the one before. 50 where the price
    has not moved at all.
    """
    changes = np.diff(close)
    index = np.full(len(close), 50.0)
    if len(changes) < RSI_BARS:
        return index
    gain = _wilder(np.maximum(changes, 0.0))
    loss = _wilder(np.maximum(-changes, 0.0))
    moved = gain + loss
    index[RSI_BARS:] = np.where(moved > 0.0, 100.0 * gain / np.where(moved > 0.0, moved, 1.0), 50.0)
    return index


def _wilder(changes: Array) -> Array:
    first = float(changes[:RSI_BARS].mean())
    rest = changes[RSI_BARS:].tolist()
    return np.array(
        list(accumulate(rest, lambda mean, x: mean + (x - mean) / RSI_BARS, initial=first))
    )


def macd(close: Array) -> tuple[Array, Array]:
    """Line and histogram (Appel 2005, "Technical Analysis: Power Tools for Active Investors"): the
    exponential average over 12 bars less that over 26; and that less its own average over 9.
    """
    line = exponential_average(close, MACD_FAST) - exponential_average(close, MACD_SLOW)
    return line, line - exponential_average(line, MACD_SIGNAL)


def exponential_average(values: Array, num_bars: int) -> Array:
    """Weight 2 / (``num_bars`` + 1) on the newest; begins with the first value."""
    weight = 2.0 / (num_bars + 1)
    return np.array(list(accumulate(values.tolist(), lambda mean, x: mean + weight * (x - mean))))


def bollinger_position(close: Array) -> Array:
    """-1 at the lower band, 1 at the upper (Bollinger 2001, "Bollinger on Bollinger Bands"): bands
    two population standard deviations from the mean of 20 closes.
    """
    return z_score(close, BOLLINGER_BARS) / BOLLINGER_WIDTH


def realised_volatility(close: Array, bars_per_year: float) -> Array:
    """Volatility per year: the root mean square of the log returns of 20 bars."""
    squares = np.diff(np.log(close)) ** 2
    means = np.concatenate([[0.0], np.nanmean(_windows(squares, VOLATILITY_BARS), axis=1)])
    return np.sqrt(bars_per_year * means)


def z_score(values: Array, num_bars: int) -> Array:
    """Distance from the mean of the last ``num_bars``, this one included, in population standard
    deviations; 0 where these do not differ beyond rounding.
    """
    windows = _windows(values, num_bars)
    mean, deviation = np.nanmean(windows, axis=1), np.nanstd(windows, axis=1)
    differs = deviation > 1e-12 * np.abs(mean)
    score: Array = np.where(differs, (values - mean) / np.where(differs, deviation, 1.0), 0.0)
    return score


def _windows(values: Array, num_bars: int) -> Array:
    """[len(values), num_bars]: the last ones up to each, NaN before the first."""
    if not len(values):
        return np.empty((0, num_bars))
    padded = np.concatenate([np.full(num_bars - 1, np.nan), values])
    return np.lib.stride_tricks.sliding_window_view(padded, num_bars)
