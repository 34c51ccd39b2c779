"""Clusters of episodes in a final evaluation, and confidence intervals over clusters.

Episodes of one symbol in one split overlap in time: they are one piece of evidence, not many. An
interval that takes them as independent is far too short (with one symbol and a split 1.5 times as
long as an episode it holds the true value in 7 of 100 cases, not in 95).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.agents import Interval, interval, streams
from muster_recipes.clstm_ppo.market import Market

#: With fewer symbols than this, stretches of time tell episodes apart as well.
ENOUGH_SYMBOLS = 8
_RESAMPLES = 2_000
#: The 2.5th and the 97.5th percentile.
_TAIL = 0.025


class Clusters(NamedTuple):
    """``of`` int64 [num_episodes]: the cluster of each, from 0 to ``num`` - 1. ``by``: what they
    are, such as ``symbol``.
    """

    of: Tensor
    num: int
    by: str


def clusters_of(market: Market, first: Tensor, episode_bars: int) -> Clusters:
    """Group episodes by the bars ``first`` [num_episodes] at which they begin.

    One per symbol. With fewer than ``ENOUGH_SYMBOLS`` of them, one per symbol and stretch of two
    episodes' length, counted from the symbol's first start; two neighbours then still share some
    bars, but few (their means' correlation is about 0.1 where returns are independent).
    """
    first = first.cpu()
    symbol = market.symbol.cpu()[first]
    symbols, of = torch.unique(symbol, return_inverse=True)
    if len(symbols) >= ENOUGH_SYMBOLS:
        return Clusters(of, len(symbols), "symbol")
    begin = torch.stack([first[of == number].min() for number in range(len(symbols))])
    stretch = (first - begin[of]) // (2 * episode_bars)
    pairs, of = torch.unique(torch.stack([symbol, stretch]), dim=1, return_inverse=True)
    return Clusters(of, pairs.shape[1], "symbol and stretch of time")


def cluster_means(values: Tensor, clusters: Clusters) -> Tensor:
    """[..., num_episodes] -> [..., num clusters], float64."""
    share = torch.nn.functional.one_hot(clusters.of, clusters.num).double()
    return values.double() @ (share / share.sum(0))


def clustered(
    values: Tensor, clusters: Clusters, *, low: float = -math.inf, high: float = math.inf
) -> Interval:
    """The mean of the clusters' means and its 95 % interval, within the bounds that values have by
    their nature; infinite with one cluster.
    """
    return interval(cluster_means(values, clusters), low=low, high=high)


def clustered_median(values: Tensor, clusters: Clusters, seed: int) -> Interval:
    """The median episode and a 95 % percentile interval of 2,000 resamples of whole clusters
    (Efron 1979), drawn by counters from ``seed``; infinite with one cluster.
    """
    ordered, order = values.double().sort()
    of, num = clusters.of[order], clusters.num

    def median(times: Tensor) -> Tensor:
        """The lower median where each cluster is there ``times`` [..., num] times."""
        below = times[..., of].cumsum(-1)
        return ordered[(2 * below < below[..., -1:]).sum(-1)]

    middle = float(median(torch.ones(num)))
    if num < 2:
        return Interval(middle, -math.inf, math.inf, num)
    drawn = streams.uniform(seed, streams.EVALUATION, torch.arange(_RESAMPLES), 0, num)
    times = torch.zeros(_RESAMPLES, num).scatter_add_(
        1, (drawn * num).long(), torch.ones(_RESAMPLES, num)
    )
    medians = median(times)
    low, high = (float(medians.quantile(share)) for share in (_TAIL, 1 - _TAIL))
    return Interval(middle, low, high, num)


def record(found: Interval, num_episodes: int) -> dict[str, Any]:
    """For JSON: ``num`` episodes and ``clusters`` of them; an end that is not known is None."""
    return {**found.record(), "num": num_episodes, "clusters": found.num}
