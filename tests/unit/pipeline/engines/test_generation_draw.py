"""Tokens are drawn as the slow definition says, from noise that nothing but the seed decides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.pipeline.engines.decoding import draw, uniform

ROW = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


def slow(logits: list[float], temperature: float, top_p: float, noise: float) -> set[int]:
    """The tokens that may be drawn: one, or two where the noise is next to their border."""
    if temperature == 0:
        return {logits.index(max(logits))}
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    shares = [weight / math.fsum(weights) for weight in weights]
    held, least = 0.0, 0.0
    for share in sorted(shares, reverse=True):
        if held >= top_p:
            break
        held, least = held + share, share
    kept = [share if share >= least else 0.0 for share in shares]
    target, cumulated, found = noise * math.fsum(kept), 0.0, set()
    for token, share in enumerate(kept):
        if share and cumulated - 1e-9 <= target < cumulated + share + 1e-9:
            found.add(token)
        cumulated += share
    return found


@given(st.data())
def test_each_row_is_drawn_by_its_own_settings(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 12))
    number = st.integers(-40, 40).map(lambda value: value / 5)
    rows = data.draw(
        st.lists(
            st.tuples(st.lists(number, min_size=width, max_size=width), ROW), min_size=1, max_size=6
        )
    )
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    tokens = draw(logits, *([settings[i] for _, settings in rows] for i in range(3)))
    for token, (values, (temperature, top_p, noise)) in zip(tokens.tolist(), rows, strict=True):
        # A share that equals top_p to the last bit may fall on either side.
        near = {
            one
            for shift in (-1e-12, 0.0, 1e-12)
            for one in slow(values, temperature, top_p + shift, noise)
        }
        assert token in near


def test_the_shares_of_many_draws_are_the_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    count = 20_000
    noise = [uniform(seed, 3) for seed in range(count)]
    tokens = draw(logits.expand(count, -1), [1.0] * count, [1.0] * count, noise)
    shares = torch.bincount(tokens, minlength=4) / count
    assert torch.allclose(shares, logits.softmax(-1), atol=0.012)  # four standard errors


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_leaves_the_fewest_tokens_that_hold_it(top_p: float) -> None:
    shares = torch.tensor([0.45, 0.3, 0.2, 0.05], dtype=torch.float64)
    noise = [n / 1000 for n in range(1000)]
    tokens = draw(shares.log().expand(1000, -1), [1.0] * 1000, [top_p] * 1000, noise)
    assert set(tokens.tolist()) == ({0, 1} if top_p == 0.5 else {0, 1, 2})


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_noise_lies_between_0_and_1(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_noise_is_spread_evenly_over_seeds_and_positions() -> None:
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    tenths = torch.bincount((torch.tensor(values, dtype=torch.float64) * 10).long(), minlength=10)
    assert (tenths - 1000).abs().max() < 130  # of 10,000; a standard error is 30
    assert len(set(values)) == len(values)


def test_noise_is_the_same_in_every_version() -> None:
    """A sample can be made again next year only while these numbers stand."""
    made = [uniform(7, 0), uniform(7, 1), uniform(2**62, 0)]
    assert made == [0.6497043364684557, 0.5493743249193239, 0.6582985552610979]
