"""The splits: consecutive in time, without overlap, and of the same dates for all symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from muster import UsageError
from muster_recipes.clstm_ppo.bars import Bars, Integers
from muster_recipes.clstm_ppo.market import Split

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
