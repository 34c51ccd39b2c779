"""The market that the settings ask for: read or simulated, with features and splits.

Splits are consecutive in time, without overlap, and of the same dates for all symbols.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from muster import UsageError
from muster.agents import Split
from muster_recipes.clstm_ppo.bar_checks import check_gaps
from muster_recipes.clstm_ppo.bar_files import read_bars
from muster_recipes.clstm_ppo.bars import (
    CALENDAR_DAYS_PER_YEAR,
    COLUMNS,
    TRADING_DAYS_PER_YEAR,
    VOLATILITY_FLOOR,
    Array,
    Bars,
    Calendar,
    Integers,
    calendar_of,
    estimated_volatility,
)
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.costs import least_volume
from muster_recipes.clstm_ppo.features import features_of
from muster_recipes.clstm_ppo.generator import BARS_PER_YEAR, simulated_bars
from muster_recipes.clstm_ppo.market import Market

#: A sentence that is shown for every market that is read.
ESTIMATED = (
    "implied volatility is estimated from the bars, not quoted: what a policy earns from the "
    "estimate, a real market would not pay"
)

_DAILY_EPISODE_BARS, _EPISODE_BARS = 252, 200


def load_market(config: ClstmPpoConfig, say: Callable[[str], None]) -> Market:
    """Load the market, on the CPU, and describe it in a few sentences to ``say``.

    Loading the same again costs nothing as long as the file stays as it is.

    Raises:
        UsageError: the file cannot be used, the market is too short (see ``read_bars`` and
            ``split_bars``) or a split has too little volume to trade in.
    """
    market, sentences = _loaded(config, _stamp(config.data))
    for sentence in sentences:
        say(sentence)
    return market


def episode_bars_of(config: ClstmPpoConfig, bars_per_year: float) -> int:
    """Bars per episode: as configured, else 252 of daily bars and 200 of others."""
    if config.episode_bars is not None:
        return config.episode_bars
    is_daily = bars_per_year in (TRADING_DAYS_PER_YEAR, CALENDAR_DAYS_PER_YEAR)
    return _DAILY_EPISODE_BARS if is_daily else _EPISODE_BARS


def no_opening(market: Market, split: Split, capital: float) -> UsageError:
    """The error for a ``split`` at whose starts nothing but holding is possible."""
    volume = float(market.volume.cpu()[market.starts[split].cpu()].median())
    return UsageError(
        f"No position can be opened at any start of the {split} split of {market.source}: the "
        f"median volume there is {volume:g} and --capital {capital:g}; one contract takes a bar of "
        f"more than {least_volume():g} shares and the money that it costs.",
        hint="the column volume counts shares of the underlying, not lots, thousands or dollars.",
    )


def fingerprint(market: Market) -> str:
    """SHA-256 of all that was read: symbols, times, prices, volumes; "" of a simulated market,
    which its settings identify.
    """
    if market.source == "simulated":
        return ""
    digest = hashlib.sha256(json.dumps(market.symbols).encode())
    for name in COLUMNS:
        digest.update(getattr(market, name).cpu().numpy().tobytes())
    return digest.hexdigest()


def _stamp(path: Path | None) -> tuple[int, int] | None:
    if path is None or not path.exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _loaded(config: ClstmPpoConfig, _: tuple[int, int] | None) -> tuple[Market, tuple[str, ...]]:
    if config.data is None:
        bars, paths = simulated_bars(config)
        calendar = Calendar(spacing_s=86_400.0, bars_per_day=1.0, trades_weekends=True)
        assert calendar.bars_per_year == BARS_PER_YEAR
        level = np.maximum(np.sqrt(paths.variance.reshape(-1)), VOLATILITY_FLOOR)
        truth = {"drift": paths.drift.reshape(-1)}
    else:
        bars = read_bars(config.data)
        calendar = calendar_of(bars)
        check_gaps(bars, calendar, config.max_gap_bars)
        level = np.concatenate(
            [estimated_volatility(bars.close[part], calendar.bars_per_year)
             for part in bars.ranges()]
        )  # fmt: skip
        truth = {}
    episode_bars = episode_bars_of(config, calendar.bars_per_year)
    splits = split_bars(
        bars,
        val_share=config.val_share,
        test_share=config.test_share,
        window=config.window,
        episode_bars=episode_bars,
    )
    market = _market(bars, calendar, level, splits, truth)
    for split, starts in market.starts.items():
        if bool((market.volume[starts] <= least_volume()).all()):
            raise no_opening(market, split, config.capital)
    return market, _sentences(market, splits, episode_bars)


def _market(
    bars: Bars, calendar: Calendar, level: Array, splits: Splits, truth: Mapping[str, Array]
) -> Market:
    names, values = features_of(bars, calendar)
    return Market(
        source=bars.source,
        symbols=bars.symbols,
        **{name: torch.from_numpy(getattr(bars, name)) for name in COLUMNS},
        volatility=torch.from_numpy(level),
        features=torch.from_numpy(values),
        feature_names=names,
        bars_per_year=calendar.bars_per_year,
        starts={split: torch.from_numpy(splits.starts[split]) for split in SPLITS},
        truth={name: torch.from_numpy(values) for name, values in truth.items()},
    )


def _sentences(market: Market, splits: Splits, episode_bars: int) -> tuple[str, ...]:
    num_symbols = len(market.symbols)
    kind = "Simulated market" if market.source == "simulated" else f"Market of {market.source}"
    spans = "; ".join(
        f"{split} {_day(splits.bounds[split][0])} to {_day(splits.bounds[split][1] - 1)}"
        for split in SPLITS
    )
    sentences = [
        f"{kind}: {len(market.time)} bars of {num_symbols} symbol{'s' * (num_symbols > 1)}, "
        f"{market.bars_per_year:g} bars per year, episodes of {episode_bars} bars.",
        f"Splits: {spans}.",
    ]
    if market.source != "simulated":
        sentences.append(f"note: {ESTIMATED}.")
    too_thin = float((market.volume <= least_volume()).double().mean())
    if too_thin > 0.5:
        sentences.append(
            f"WARNING: in {too_thin:.0%} of the bars nothing can be opened: their volume is at "
            f"most {least_volume():g} shares, too little to fill one contract. Is the volume "
            "counted in shares?"
        )
    sentences += [
        f"{splits.num_unused[split]} of {num_symbols} symbols are too short for an episode in "
        f"the {split} split and are not used there."
        for split in SPLITS
        if splits.num_unused[split]
    ]
    return tuple(sentences)


def _day(time_s: int) -> str:
    return str(np.datetime64(time_s, "s").astype("datetime64[D]"))


SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """``starts``: of each split, the bars at which an episode may begin, int64 in order.
    ``bounds``: of each split, its first time and the first time after it, seconds since 1970.
    ``num_unused``: of each split, symbols that are too short there to start in.
    """

    starts: Mapping[Split, Integers]
    bounds: Mapping[Split, tuple[int, int]]
    num_unused: Mapping[Split, int]


def split_bars(
    bars: Bars, *, val_share: float, test_share: float, window: int, episode_bars: int
) -> Splits:
    """Cut the times at which there are bars at two points: the last ``test_share`` of them are the
    test split, ``val_share`` before them validation, the rest training.

    An episode may begin at a bar that has ``window`` bars of its symbol before it and
    ``episode_bars`` after it, all within the split.

    Raises:
        UsageError: a split has no such bar; with the numbers and the flags that change them.
    """
    times = np.unique(bars.time)
    test_from = len(times) - round(test_share * len(times))
    val_from = test_from - round(val_share * len(times))
    # The end is after the last bar; an empty split begins where the next one does.
    edges = [*times[[0]], *(_edge(times, at) for at in (val_from, test_from, len(times)))]
    starts: dict[Split, Integers] = {}
    bounds: dict[Split, tuple[int, int]] = {}
    num_unused: dict[Split, int] = {}
    longest: dict[Split, int] = {}
    for split, begin, end in zip(SPLITS, edges[:-1], edges[1:], strict=True):
        found, lengths = [], []
        for part in bars.ranges():
            first, after = part.start + np.searchsorted(bars.time[part], [begin, end])
            found.append(np.arange(first + window, after - episode_bars, dtype=np.int64))
            lengths.append(int(after - first))
        starts[split] = np.concatenate(found)
        bounds[split] = int(begin), int(end)
        num_unused[split] = sum(not len(piece) for piece in found)
        longest[split] = max(lengths)
    _check_lengths(bars, starts, longest, window, episode_bars)
    return Splits(starts=starts, bounds=bounds, num_unused=num_unused)


def _edge(times: Integers, at: int) -> int:
    return int(times[at]) if at < len(times) else int(times[-1]) + 1


def _check_lengths(
    bars: Bars,
    starts: Mapping[Split, Integers],
    longest: Mapping[Split, int],
    window: int,
    episode_bars: int,
) -> None:
    short = [split for split in SPLITS if not len(starts[split])]
    if not short:
        return
    needed = window + episode_bars + 1
    lengths = ", ".join(f"{split} {longest[split]}" for split in SPLITS)
    is_simulated = bars.source == "simulated"
    what = "The simulated market" if is_simulated else bars.source
    more = "simulate more with --sim-bars" if is_simulated else "use a longer file"
    raise UsageError(
        f"{what} is too short: each split must have {needed} bars of one symbol (window "
        f"{window} + episode {episode_bars} + 1), but the longest have: {lengths} (too short: "
        f"{', '.join(short)}).",
        hint=f"{more}, or shorten --episode-bars or --window, or share the time out differently "
        "with --val-share and --test-share.",
    )
