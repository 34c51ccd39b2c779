"""Bars of one or several symbols, and the calendar that follows from their spacing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

DAY_S = 86_400
TRADING_DAYS_PER_YEAR = 252.0
CALENDAR_DAYS_PER_YEAR = 365.25
#: Days in which the weights of the recent mean of squared returns halve: a month.
HALF_LIFE_YEARS = 1.0 / 12.0
#: Standard errors by which the recent mean must differ before it counts.
SURPRISE = 2.0
#: No implied volatility is below this, per year: a constant price may still move.
VOLATILITY_FLOOR = 0.01
#: The columns of ``Bars``, one value of each per bar.
COLUMNS = ("symbol", "time", "open", "high", "low", "close", "volume")


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The symbols' bars one after another, [B], in time within each symbol.

    ``symbol``: whose bar it is, the number in ``symbols``. ``time``: seconds since 1970 (UTC).
    ``row``: of a file, which row of data each bar was, from 0, and ``lines`` the line on which
    each row ends; None where there is no such thing.
    """

    source: str
    symbols: tuple[str, ...]
    symbol: Integers
    time: Integers
    open: Array
    high: Array
    low: Array
    close: Array
    volume: Array
    row: Integers | None = None
    lines: Sequence[int] | None = None

    def ranges(self) -> list[slice]:
        """The places of each symbol's bars."""
        ends = np.searchsorted(self.symbol, np.arange(len(self.symbols)), side="right")
        starts = np.searchsorted(self.symbol, np.arange(len(self.symbols)), side="left")
        return [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Calendar:
    """How the bars of a market follow each other.

    Attributes
        spacing_s: the median time between bars of a symbol.
        bars_per_day: bars of a day of trading; 1 for daily bars, less for weekly ones.
        trades_weekends: whether bars are spread over all seven days of the week.
    """

    spacing_s: float
    bars_per_day: float
    trades_weekends: bool

    @property
    def is_intraday(self) -> bool:
        return self.bars_per_day > 1.0

    @property
    def is_round_the_clock(self) -> bool:
        return self.is_intraday and self.bars_per_day * self.spacing_s > 0.95 * DAY_S

    @property
    def bars_per_year(self) -> float:
        """Bars of a trading day times 252, or 365.25 if weekends are traded; of bars longer than a
        day, as many as fit into a calendar year.
        """
        if self.bars_per_day < 1.0:
            return CALENDAR_DAYS_PER_YEAR * DAY_S / self.spacing_s
        days = CALENDAR_DAYS_PER_YEAR if self.trades_weekends else TRADING_DAYS_PER_YEAR
        return days * self.bars_per_day

    def missing(self, before_s: Integers, after_s: Integers) -> Array:
        """How many bars should be between two that follow each other; less than 1 if none.

        Ordinary are nights and, unless they are traded, weekends. A holiday counts as a day.
        """
        elapsed = (after_s - before_s).astype(np.float64)
        first, last = before_s // DAY_S, after_s // DAY_S
        if self.trades_weekends:
            weekend_days: NDArray[np.float64] = np.zeros(len(elapsed))
        else:
            weekdays = np.busday_count(first.astype("datetime64[D]"), last.astype("datetime64[D]"))
            weekend_days = (last - first - weekdays).astype(np.float64)
        if self.bars_per_day < 1.0 or self.is_round_the_clock:
            offset = weekend_days * DAY_S if self.is_round_the_clock else 0.0
            return (elapsed - offset) / self.spacing_s - 1.0
        days = (last - first) - weekend_days
        within_day = elapsed / self.spacing_s - 1.0
        return np.where(first == last, within_day, (days - 1.0) * self.bars_per_day)


def calendar_of(bars: Bars) -> Calendar:
    """Read the calendar off the median spacing within symbols and the days that have bars.

    A day is a UTC date here. Fewer than two bars per symbol count as daily.
    """
    pieces = [bars.time[part] for part in bars.ranges()]
    spacings = np.concatenate([np.diff(piece) for piece in pieces])
    if not len(spacings):
        return Calendar(spacing_s=float(DAY_S), bars_per_day=1.0, trades_weekends=False)
    spacing_s = float(np.median(spacings))
    days = np.concatenate([piece // DAY_S for piece in pieces])
    # Markets of five days leave a day nearly empty even if they open on Sunday evening, or if their
    # Monday begins on Sunday in UTC.
    trades_weekends = bool((np.bincount(days % 7, minlength=7) > 0.05 * len(days)).all())
    if spacing_s > 1.5 * DAY_S:
        per_day = DAY_S / spacing_s
    elif spacing_s > 0.75 * DAY_S:
        per_day = 1.0
    else:
        counts = [np.unique(piece // DAY_S, return_counts=True)[1] for piece in pieces]
        per_day = max(1.0, float(np.median(np.concatenate(counts))))
    return Calendar(spacing_s=spacing_s, bars_per_day=per_day, trades_weekends=trades_weekends)


def estimated_volatility(close: Array, bars_per_year: float) -> Array:
    """Estimate, from one symbol's bars <= t, the level of implied volatility per year.

    Per bar, the square root of l (s / l)^w. Of the n squared log returns so far l is the mean, s
    the mean with weights that halve within a month, and w is, by James and Stein's positive-part
    rule (1961), max(0, 1 - c (q - 1/n) k / ln(s / l)^2): k is the squares' variance / l^2, at
    least the normal's 2, and q the sum of the squares of the weights of s (which add up to 1).
    (q - 1/n) k is the variance of ln(s / l) as long as volatility does not change, so that s counts
    only where it is more than ``SURPRISE`` standard errors, sqrt(c), from l, and the more the
    further it is. Two months after volatility has doubled or halved, most of it is in the level.

    Why not s alone: its noise fades within weeks, and whoever bought options while it happened to
    be low and sold them while it was high would earn from prices of independent returns, where
    there is nothing to earn. The first bar, which has no return, and quiet ones get the floor.
    """
    squares = np.diff(np.log(close)) ** 2
    decay = 0.5 ** (1.0 / max(1.0, HALF_LIFE_YEARS * bars_per_year))
    levels = np.zeros(len(close))
    mean = deviations = recent = weight = weight_squares = 0.0
    for n, square in enumerate(squares.tolist(), start=1):
        # Welford's running mean and sum of squared deviations (1962).
        change = square - mean
        mean += change / n
        deviations += change * (square - mean)
        weight = decay * weight + 1.0
        weight_squares = decay * decay * weight_squares + 1.0
        recent += (square - recent) / weight
        levels[n] = mean
        if mean > 0.0 and recent > 0.0:
            spread = max(2.0, deviations / n / mean**2)
            noise = SURPRISE**2 * max(0.0, weight_squares / weight**2 - 1.0 / n) * spread
            apart = math.log(recent / mean)
            share = 1.0 - noise / apart**2 if apart**2 > noise else 0.0
            levels[n] *= math.exp(share * apart)
    return np.maximum(np.sqrt(bars_per_year * levels), VOLATILITY_FLOOR)
