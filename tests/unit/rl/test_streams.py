"""Random numbers of counters: uniform, independent of their neighbours, the same in any batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster.rl import streams

NUM = 1 << 16
LINE = torch.arange(NUM)


def deviation(counts: np.ndarray) -> float:
    """Chi-squared of equal expectations, in standard deviations (Wilson and Hilferty 1931)."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    share = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - share)) / math.sqrt(share)


def along_index(first: int = 0) -> Tensor:
    return streams.uniform(7, streams.ACTION, LINE + first, 12).squeeze(-1)


def along_counter() -> Tensor:
    return streams.uniform(7, streams.ACTION, torch.full_like(LINE, 3), LINE).squeeze(-1)


def along_place() -> Tensor:
    return streams.uniform(7, streams.ACTION, torch.tensor(3), 12, NUM)


def along_seed() -> Tensor:
    one = torch.tensor(3)
    return torch.cat([streams.uniform(seed, streams.ACTION, one, 12) for seed in range(4096)])


def along_index_and_counter() -> Tensor:
    # Index + counter constant: a careless mixture of the two would show.
    return streams.uniform(7, streams.ACTION, LINE, NUM - LINE).squeeze(-1)


LINES: list[Callable[[], Tensor]] = [
    along_index, lambda: along_index(1 << 40), along_counter, along_place, along_seed,
    along_index_and_counter,
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_uniform_along_every_counter_and_independent_of_neighbours(
    line: Callable[[], Tensor],
) -> None:
    drawn = line().numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(np.unique(drawn)) == len(drawn)
    assert abs(deviation(np.histogram(drawn, 64, (0, 1))[0])) < 4
    cells = np.floor(drawn * 16).astype(int)
    for lag in (1, 2, 8, 64):
        pairs = np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
        assert abs(deviation(pairs)) < 4, lag


def test_every_bit_is_fair_and_changes_with_every_counter() -> None:
    def drawn(
        seed: int = 7, purpose: int = 1, index: int = 0, counter: int = 0, place: int = 0
    ) -> np.ndarray:
        bits = streams.bits(seed, purpose, LINE * 5 + index, counter, 3)[:, place]
        return ((bits.numpy()[:, None] >> np.arange(53)) & 1).astype(np.int64)

    ways: list[dict[str, int]] = [{}, {"seed": 8}, {"purpose": 2}, {"index": 1}, {"counter": 1}]
    ways += [{"place": 1}, {"place": 2}]
    bits = [drawn(**way) for way in ways]
    limit = 5 * math.sqrt(NUM) / 2
    for some in bits:
        assert np.abs(some.sum(0) - NUM / 2).max() < limit
    # Half of all bits differ, each of them half of the time: streams do not follow one another.
    for one, other in itertools.combinations(bits, 2):
        assert np.abs((one ^ other).sum(0) - NUM / 2).max() < limit


@examples(40)
@given(
    seed=st.integers(0, 2**63 - 1),
    first=st.integers(0, 2**40),
    counter=st.integers(0, 2**40),
    size=st.integers(1, 40),
    num=st.integers(1, 9),
    draw=st.sampled_from([streams.uniform, streams.normal, streams.bits]),
)
def test_the_same_numbers_whatever_the_batch(
    seed: int, first: int, counter: int, size: int, num: int, draw: Callable[..., Tensor]
) -> None:
    index = first + torch.arange(size)
    together = draw(seed, streams.EPISODE, index, counter, num)
    assert together.shape == (size, num)
    for row in range(size):
        alone = draw(seed, streams.EPISODE, index[row : row + 1], counter, num)
        assert torch.equal(alone[0], together[row])
    # A counter per row is the same as one for all, and a matrix of rows as a line of them.
    each = torch.full((size,), counter)
    assert torch.equal(draw(seed, streams.EPISODE, index, each, num), together)
    folded = draw(seed, streams.EPISODE, index.view(1, size), counter, num)
    assert torch.equal(folded, together.unsqueeze(0))


def test_more_places_leave_the_first_uniforms_as_they_are() -> None:
    few, many = (streams.uniform(1, 2, LINE[:9], 5, num) for num in (2, 7))
    assert torch.equal(many[:, :2], few)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_normals_have_the_moments_and_the_shape_of_a_normal(num: int) -> None:
    drawn = streams.normal(3, streams.DYNAMICS, LINE, 9, num)
    assert drawn.shape == (NUM, num)
    assert drawn.dtype == torch.float64
    # Standard errors of the first four moments of N(0, 1), five of them.
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = 5 * math.sqrt(spread / NUM)
        assert (drawn.pow(power).mean(0) - moment).abs().max() < error, power
    uniform = 0.5 * (1 + torch.erf(drawn / math.sqrt(2)))
    for place in range(num):
        assert abs(deviation(np.histogram(uniform[:, place].numpy(), 64, (0, 1))[0])) < 4
    correlations = torch.corrcoef(drawn.T).view(num, num) - torch.eye(num)
    assert correlations.abs().max() < 5 / math.sqrt(NUM)


@pytest.mark.parametrize("below", [1, 2, 7, 1000, 3 << 30])
def test_integers_cover_their_range_evenly(below: int) -> None:
    drawn = streams.integers(3, streams.MINIBATCH, LINE, 0, below)
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < below
    if 1 < below <= 1000:
        assert abs(deviation(np.bincount(drawn.numpy(), minlength=below))) < 4
    assert torch.equal(
        drawn, streams.integers(3, streams.MINIBATCH, LINE, 0, torch.full((NUM,), below))
    )


def test_purposes_are_apart() -> None:
    purposes = [streams.ACTION, streams.EPISODE, streams.DYNAMICS, streams.MINIBATCH,
                streams.EVALUATION]  # fmt: skip
    assert len(set(purposes)) == len(purposes)
    drawn = [streams.uniform(0, purpose, LINE[:100], 0).flatten() for purpose in purposes]
    assert len(torch.cat(drawn).unique()) == 500
