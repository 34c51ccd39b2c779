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


def by_sorting_everything(
    logits: torch.Tensor, temperatures: list[float], top_ps: list[float], noise: list[float]
) -> list[int]:
    """The definition, with all probabilities of a row sorted in float64."""
    tokens = []
    for row, temperature, top_p, number in zip(logits, temperatures, top_ps, noise, strict=True):
        if temperature == 0:
            tokens.append(int(row.argmax()))
            continue
        shares = (row.double() / temperature).softmax(-1)
        falling = shares.sort(descending=True).values
        before = falling.cumsum(-1) - falling
        least = falling[int((before < top_p).sum()) - 1] if top_p < 1 else 0.0
        kept = shares.where(shares >= least, 0.0).cumsum(-1)
        tokens.append(int((kept <= number * kept[-1]).sum()))
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_a_wide_vocabulary_is_drawn_from_as_if_all_of_it_were_sorted(
    dtype: torch.dtype, spread: float
) -> None:
    """With the small spread a nucleus holds more than a thousand tokens, with the large one few."""
    stream = torch.Generator().manual_seed(5)
    logits = (spread * torch.randn(24, 6_000, generator=stream)).to(dtype)
    temperatures = [0.0, 0.6, 1.0, 1.7] * 6
    top_ps = [0.95, 0.3, 1.0, 0.999, 0.95, 0.05] * 4
    noise = [uniform(seed, 0) for seed in range(24)]
    tokens = draw(logits, temperatures, top_ps, noise).tolist()
    assert tokens == by_sorting_everything(logits, temperatures, top_ps, noise)


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
