"""Running statistics: any split over ranks, in any order, is numpy's mean and variance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster.rl.statistics import Moments, Normaliser, ReturnScale

SHAPES: dict[str, tuple[int, ...]] = {"flat": (3,), "number": (), "image.x": (2, 2)}
Rows = dict[str, Tensor]


def rows(generator: torch.Generator, size: int, offset: float, scale: float) -> tuple[Rows, Tensor]:
    valid = torch.rand(size, generator=generator) < 0.8
    drawn = {
        name: torch.randn(size, *shape, generator=generator, dtype=torch.float64) * scale + offset
        for name, shape in SHAPES.items()
    }
    for values in drawn.values():
        values[~valid] = torch.nan  # not to be looked at
    return drawn, valid


def known(batches: list[list[tuple[Rows, Tensor]]], name: str) -> np.ndarray:
    return np.concatenate([drawn[name][ok].numpy() for ranks in batches for drawn, ok in ranks])


def moments_of(normaliser: Normaliser, name: str) -> Moments:
    moments = normaliser.moments[normaliser.names.index(name)]
    assert isinstance(moments, Moments)
    return moments


@st.composite
def splits(draw: st.DrawFn) -> list[list[tuple[Rows, Tensor]]]:
    """Batches, each of them a list of what every rank has seen."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    offset = draw(st.sampled_from([0.0, -3.0, 1e3]))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e3]))
    sizes = draw(
        st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    return [[rows(generator, size, offset, scale) for size in ranks] for ranks in sizes]


@examples(60)
@given(batches=splits(), order=st.randoms(use_true_random=False), centred=st.booleans())
def test_any_split_and_any_order_is_numpys(
    batches: list[list[tuple[Rows, Tensor]]], order: object, centred: bool
) -> None:
    shuffled = list(batches)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    normaliser = Normaliser(SHAPES)
    for ranks in shuffled:
        if centred:
            normaliser.centre(torch.stack([normaliser.deltas(*rank) for rank in ranks]).sum(0))
        normaliser.absorb(torch.stack([normaliser.deltas(*rank) for rank in ranks]).sum(0))
    for name in SHAPES:
        moments, values = moments_of(normaliser, name), known(batches, name)
        assert float(moments.count) == len(values)
        if not len(values):
            continue
        variance = (moments.squares / moments.count).numpy()
        np.testing.assert_allclose(moments.mean.numpy(), values.mean(0), rtol=1e-9, atol=1e-9)
        expected = values.var(0)
        # Without the centre the first sums are about 0, and digits go where the mean is large.
        lost = 0.0 if centred else 1e-14 * float(np.square(values).max())
        np.testing.assert_allclose(variance, expected, rtol=1e-9, atol=lost + 1e-25)
        if centred and len(values) > 1:
            # What a call gives: (x - mean) / std, clipped at 10.
            std = np.sqrt(expected)
            probe = (
                values
                + np.linspace(-15, 15, len(values)).reshape(-1, *[1] * (values.ndim - 1)) * std
            )
            got = normaliser(name, torch.from_numpy(probe)).numpy()
            wanted = ((probe - values.mean(0)) / std).clip(-10, 10)
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_small_spread_about_a_huge_mean_stays_accurate(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(900, 3, generator=generator, dtype=torch.float64) * 1e-2 + 1e8
    valid = torch.ones(300 // num_ranks, dtype=torch.bool)
    normaliser = Normaliser({"x": (3,)})
    for number, batch in enumerate(values.chunk(3)):

        def total(batch: Tensor = batch) -> Tensor:
            ranks = [normaliser.deltas({"x": part}, valid) for part in batch.chunk(num_ranks)]
            return torch.stack(ranks).sum(0)

        if number == 0:
            normaliser.centre(total())
        normaliser.absorb(total())
    moments = moments_of(normaliser, "x")
    exact = values - 1e8  # exact: both are of one binade
    assert float(moments.count) == 900
    torch.testing.assert_close(moments.mean - 1e8, exact.mean(0), atol=3e-8, rtol=0)
    variance = exact.var(0, correction=0)
    torch.testing.assert_close(moments.squares / 900, variance, rtol=1e-6, atol=0)
    normalised = normaliser("x", values)
    torch.testing.assert_close(
        normalised.std(0, correction=0), torch.ones(3).double(), rtol=1e-5, atol=0
    )


def test_centring_counts_nothing_and_only_matters_before_the_first_rows() -> None:
    normaliser = Normaliser({"x": ()})
    ones = torch.ones(4, dtype=torch.bool)
    values = {"x": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    normaliser.centre(normaliser.deltas(values, ones))
    assert torch.equal(normaliser("x", values["x"]), values["x"])
    normaliser.absorb(normaliser.deltas(values, ones))
    before = {name: tensor.clone() for name, tensor in normaliser.state_dict().items()}
    normaliser.centre(normaliser.deltas({"x": values["x"] + 50}, ones))
    assert all(torch.equal(before[name], now) for name, now in normaliser.state_dict().items())


def test_identity_until_something_is_known_and_when_switched_off() -> None:
    values = torch.tensor([[1e6, -3.0, 0.5]])
    some = {"x": torch.randn(10, 3)}
    for normaliser in (Normaliser({"x": (3,)}), Normaliser({"x": (3,)}, enabled=False)):
        assert torch.equal(normaliser("x", values), values)
        nobody = torch.zeros(10, dtype=torch.bool)
        normaliser.absorb(normaliser.deltas(some, nobody))
        assert torch.equal(normaliser("x", values), values)
    switched_off = Normaliser({"x": (3,)}, enabled=False)
    switched_off.absorb(switched_off.deltas(some, torch.ones(10, dtype=torch.bool)))
    assert torch.equal(switched_off("x", values), values)


def test_clip_dtype_and_leading_shapes() -> None:
    normaliser = Normaliser({"x": (2,)}, clip=5.0)
    values = torch.tensor([[0.0, 10.0], [2.0, 10.0]])
    normaliser.absorb(normaliser.deltas({"x": values}, torch.ones(2, dtype=torch.bool)))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        probe = torch.tensor([[[100.0, 10.0]], [[-100.0, 11.0]]], dtype=dtype)
        got = normaliser("x", probe)
        # The second element has never differed: it is centred, not divided by nothing.
        assert got.tolist() == [[[5.0, 0.0]], [[-5.0, 1.0]]]
        assert got.dtype == dtype


def test_a_restored_normaliser_goes_on_exactly() -> None:
    torch.manual_seed(0)
    one, other = Normaliser(SHAPES), Normaliser(SHAPES)
    generator = torch.Generator().manual_seed(3)
    one.absorb(one.deltas(*rows(generator, 20, 5.0, 2.0)))
    other.load_state_dict(one.state_dict())
    probe = {name: torch.randn(4, *shape) * 9 for name, shape in SHAPES.items()}
    more = rows(generator, 30, 4.0, 1.0)
    for _ in range(2):
        for name, values in probe.items():
            assert torch.equal(one(name, values), other(name, values))
        for normaliser in (one, other):
            normaliser.absorb(normaliser.deltas(*more))
    assert all(tensor.dtype == torch.float64 for tensor in one.state_dict().values())


def test_inside_another_module_it_is_restored_too() -> None:
    outer = torch.nn.ModuleDict({"n": Normaliser({"x": ()})})
    inner = outer["n"]
    assert isinstance(inner, Normaliser)
    inner.absorb(inner.deltas({"x": torch.tensor([1.0, 5.0])}, torch.ones(2, dtype=torch.bool)))
    copy = torch.nn.ModuleDict({"n": Normaliser({"x": ()})})
    copy.load_state_dict(outer.state_dict())
    assert float(copy["n"]("x", torch.tensor(5.0))) == 1.0


def test_a_value_that_is_not_finite_shows_in_the_deltas() -> None:
    normaliser = Normaliser({"x": (2,), "y": ()})
    values = {"x": torch.tensor([[1.0, torch.inf], [2.0, 3.0]]), "y": torch.tensor([1.0, 2.0])}
    assert not normaliser.deltas(values, torch.tensor([True, True])).isfinite().all()
    assert normaliser.deltas(values, torch.tensor([False, True])).isfinite().all()


def test_rows_of_another_shape_are_refused() -> None:
    normaliser = Normaliser({"x": (2,)})
    with pytest.raises(ValueError, match=r"rows \[4, 3\].*shape \[2\]"):
        normaliser.deltas({"x": torch.zeros(4, 3)}, torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"valid \[3\]"):
        normaliser.deltas({"x": torch.zeros(4, 2)}, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rewards_are_divided_by_the_spread_of_returns(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(40, 5, generator=generator) * scale + 3 * scale
    valid = torch.rand(40, 5, generator=generator) < 0.7
    scaler = ReturnScale()
    rewards = torch.tensor([0.5, -0.25, 1e9]) * scale
    assert torch.equal(scaler(rewards), rewards)
    ranks = [scaler.deltas(r, ok) for r, ok in zip(returns.chunk(2), valid.chunk(2), strict=True)]
    scaler.absorb(ranks[0] + ranks[1])
    std = returns[valid].double().std(correction=0)
    expected = torch.tensor([0.5 * scale / float(std), -0.25 * scale / float(std), 10.0])
    torch.testing.assert_close(scaler(rewards), expected)
    again = ReturnScale()
    again.load_state_dict(scaler.state_dict())
    assert torch.equal(again(rewards), scaler(rewards))
