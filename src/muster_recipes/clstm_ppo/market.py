"""A market: bars of one or several symbols, and what may be known at each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from muster.agents import Split


@dataclass(frozen=True, kw_only=True)
class Market:
    """The symbols' bars one after another on one axis of B bars, in time within each symbol.

    Attributes
        source: the file read, or ``simulated``.
        symbols: names; ``symbol`` int64 [B] says whose bar it is.
        time: int64 [B], seconds since 1970 (UTC).
        open, high, low, close, volume: float64 [B].
        volatility: float64 [B], the level of implied volatility at a bar, per year: the square
            root of the variance of a simulated market, an estimate from bars <= t of a real one.
        features: float32 [B, F], of bars <= t only; ``feature_names`` has F names.
        bars_per_year: 252 for daily bars.
        starts: of a split, int64 [.]: the bars at which an episode may begin. The whole window
            before it and the whole episode after it lie in the split and in one symbol.
        truth: what a simulated market knows and no feature tells (the drift per year, float64 [B]);
            empty for a real one. It is for tests, never for the policy.
    """

    source: str
    symbols: tuple[str, ...]
    symbol: Tensor
    time: Tensor
    open: Tensor
    high: Tensor
    low: Tensor
    close: Tensor
    volume: Tensor
    volatility: Tensor
    features: Tensor
    feature_names: tuple[str, ...]
    bars_per_year: float
    starts: Mapping[Split, Tensor]
    truth: Mapping[str, Tensor]
