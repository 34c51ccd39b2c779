"""Intervals of episodes that overlap: as wide as they must be."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.unit.recipes.options_markets import market
from torch import Tensor

from muster.agents import interval
from muster_recipes.clstm_ppo.clusters import (
    Clusters,
    cluster_means,
    clustered,
    clustered_median,
    clusters_of,
    record,
)
from muster_recipes.clstm_ppo.market import Market

EPISODE = 50


def market_of(num_symbols: int, num_bars: int) -> Market:
    return market(torch.ones(num_symbols, num_bars))


def test_enough_symbols_are_a_cluster_each() -> None:
    of = market_of(8, 400)
    first = torch.arange(16) * 200
    found = clusters_of(of, first, EPISODE)
    assert (found.num, found.by) == (8, "symbol")
    assert torch.equal(found.of, of.symbol[first])


def test_of_few_symbols_stretches_of_two_episodes_are_told_apart() -> None:
    first = torch.tensor([20, 119, 120, 219, 430, 529, 530])
    found = clusters_of(market_of(2, 400), first, EPISODE)
    assert found.of.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert (found.num, found.by) == (4, "symbol and stretch of time")


def test_means_are_of_each_cluster_and_the_interval_is_over_them() -> None:
    clusters = Clusters(torch.tensor([1, 0, 1, 1]), 2, "symbol")
    values = torch.tensor([3.0, 10.0, 5.0, 7.0])
    assert cluster_means(values, clusters).tolist() == [10.0, 5.0]
    assert clustered(values, clusters) == interval([10.0, 5.0])


def test_one_cluster_has_no_interval() -> None:
    one = Clusters(torch.zeros(5, dtype=torch.int64), 1, "symbol")
    values = torch.arange(5.0)
    for found in (clustered(values, one), clustered_median(values, one, 0)):
        assert record(found, 5) == {
            "middle": 2.0, "low": None, "high": None, "num": 5, "clusters": 1,
        }  # fmt: skip


def slow_medians(values: list[float], of: list[int], drawn: list[int]) -> float:
    pooled = sorted(v for c in drawn for v, mine in zip(values, of, strict=True) if mine == c)
    return pooled[(len(pooled) - 1) // 2]


def test_the_median_resamples_whole_clusters() -> None:
    stream = np.random.default_rng(0)
    of = stream.integers(0, 9, 60)
    of[:9] = np.arange(9)
    values = stream.normal(size=60) + of
    clusters = Clusters(torch.from_numpy(of), 9, "symbol")
    found = clustered_median(torch.from_numpy(values), clusters, 4)
    assert found.middle == sorted(values)[29]
    drawn = stream.integers(0, 9, (4000, 9)).tolist()
    slow = [slow_medians(values.tolist(), of.tolist(), row) for row in drawn]
    low, high = np.quantile(slow, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.35) and found.high == pytest.approx(high, abs=0.35)


def returns_of(walks: Tensor, first: Tensor) -> Tensor:
    flat = walks.flatten()
    return flat[first + EPISODE] - flat[first]


@pytest.mark.parametrize(("num_symbols", "num_bars"), [(32, 75), (3, 900), (1, 2400)])
def test_the_interval_holds_the_truth_as_often_as_it_says(num_symbols: int, num_bars: int) -> None:
    """Random walks without drift; taken as independent, the same episodes hold it far less."""
    generator = torch.Generator().manual_seed(0)
    of = market_of(num_symbols, num_bars)
    held = naive = 0
    for _ in range(300):
        walks = torch.randn(num_symbols, num_bars, generator=generator).double().cumsum(1)
        within = torch.randint(num_bars - EPISODE, (128,), generator=generator)
        first = torch.arange(128) % num_symbols * num_bars + within
        returns = returns_of(walks, first)
        found = clustered(returns, clusters_of(of, first, EPISODE))
        held += found.low <= 0.0 <= found.high
        plain = interval(returns)
        naive += plain.low <= 0.0 <= plain.high
    assert 0.90 <= held / 300 <= 0.99
    assert naive / 300 < 0.85


def test_of_one_symbol_and_a_short_split_nothing_is_claimed() -> None:
    first = torch.randint(30, 126, (128,), generator=torch.Generator().manual_seed(0))
    found = clustered(first.double(), clusters_of(market_of(1, 400), first, 252))
    assert math.isinf(found.low) and math.isinf(found.high)


def test_what_the_market_is_called_plays_no_role() -> None:
    of = dataclasses.replace(market_of(2, 400), symbols=("x", "y"))
    first = torch.tensor([1, 401])
    assert clusters_of(of, first, EPISODE).num == 2
