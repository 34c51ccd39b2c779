"""Noise, weights and layers of many semi-supervised VAEs at once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor
from torch.nn import functional as F

from muster_recipes.ssvae import objective
from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.networks import (
    Parameters,
    class_logits,
    decode,
    init_parameters,
    layer_sizes,
    style,
)
from muster_recipes.ssvae.noise import hashes, mixed, noise_of, normals, step_noise, uniforms
from muster_recipes.ssvae.objective import decoder_log_likelihood, log_likelihood

HYPER = Hyper(num_pixels=6, num_classes=4, num_style=2, num_hidden=5, num_samples=3)
SAMPLED = Hyper(num_pixels=6, num_style=2, num_samples=3, unlabelled="sampled")
SEEDS = st.integers(min_value=0, max_value=2**62)


def parameters_of(hyper: Hyper = HYPER, num_runs: int = 2) -> Parameters:
    made = init_parameters(hyper, range(num_runs))
    return {name: 2 * value.double() for name, value in made.items()}


def as_unsigned(words: Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]


def test_the_generator_is_splitmix64() -> None:
    # Published at rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64, state 1234567.
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
        4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert as_unsigned(hashes(torch.tensor(1234567), 5)) == published


@given(state=st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_mixing_is_the_arithmetic_of_unsigned_words(state: int) -> None:
    word = state % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    assert as_unsigned(mixed(torch.tensor([state]))) == [word ^ (word >> 31)]


def test_normals_are_standard_and_independent() -> None:
    drawn = normals(torch.arange(2000), 101)
    assert drawn.shape == (2000, 101) and drawn.isfinite().all()
    values = drawn.double()
    count = values.numel()
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / count) ** 0.5
    # Kolmogorov and Smirnov's distance, whose 1e-6 quantile is 2.7 / sqrt(n).
    quantile = torch.special.ndtr(values.flatten().sort().values)
    steps = torch.arange(count, dtype=torch.float64) / count
    assert (quantile - steps).abs().max() < 2.7 / count**0.5
    # Numbers of one key, of neighbouring keys, and the two halves that Box and Muller pair.
    pairs = [
        (values[:, :-1], values[:, 1:]),
        (values[:-1], values[1:]),
        (values[:, :50], values[:, 51:]),
        (values[:, :50], values[:, 50:100]),
    ]
    for first, second in pairs:
        assert abs((first * second).mean()) < 5 / first.numel() ** 0.5


def test_uniforms_are_inside_the_open_unit_interval() -> None:
    drawn = uniforms(torch.arange(1000), 1000)
    assert 0 < drawn.min() < 1e-5 and 1 - 1e-5 < drawn.max() < 1
    assert abs(drawn.double().mean() - 0.5) < 5 * (1 / 12e6) ** 0.5


def test_gumbel_noise_has_the_mean_and_variance_of_gumbel() -> None:
    gumbel = noise_of(SAMPLED, torch.arange(20_000)).gumbel
    assert gumbel is not None and gumbel.shape == (20_000, 3, 10)
    values, count = gumbel.double(), gumbel.numel()
    assert abs(values.mean() - 0.57721566) < 5 * (math.pi**2 / 6 / count) ** 0.5
    assert abs(values.var() - math.pi**2 / 6) < 0.02
    assert values.isfinite().all()


@examples(20)
@given(seeds=st.lists(SEEDS, min_size=1, max_size=4), step=st.integers(0, 2**40))
def test_noise_of_a_run_is_a_function_of_its_seed_and_the_step(seeds: list[int], step: int) -> None:
    together = step_noise(SAMPLED, seeds, step, 4, "cpu")
    assert together.gumbel is not None
    for run, seed in enumerate(seeds):
        alone = step_noise(SAMPLED, [seed], step, 4, "cpu")
        assert alone.gumbel is not None
        assert torch.equal(together.eps[run], alone.eps[0])
        assert torch.equal(together.gumbel[run], alone.gumbel[0])
    assert not torch.equal(step_noise(SAMPLED, seeds, step + 1, 4, "cpu").eps, together.eps)


def test_seeds_steps_and_images_that_follow_each_other_share_no_noise() -> None:
    drawn = torch.stack([step_noise(HYPER, range(5), step, 7, "cpu").eps for step in range(6)])
    assert drawn.shape == (6, 5, 7, 3, 2)
    assert len(set(drawn.flatten().tolist())) == drawn.numel()


def test_the_styles_are_the_same_for_both_estimators() -> None:
    keys = torch.arange(3)
    exact = Hyper(num_pixels=6, num_style=2, num_samples=3)
    assert torch.equal(noise_of(exact, keys).eps, noise_of(SAMPLED, keys).eps)
    assert noise_of(exact, keys).gumbel is None


def test_initial_weights_of_a_run_are_a_function_of_its_seed() -> None:
    three, one = init_parameters(HYPER, [7, 8, 9]), init_parameters(HYPER, [8])
    for name, values in three.items():
        assert torch.equal(values[1], one[name][0])
        assert not torch.equal(values[0], values[1])


@pytest.mark.parametrize("layer", ["encoder", "classifier", "style", "decoder", "pixels"])
def test_initial_weights_are_distributed_as_those_of_a_linear_layer(layer: str) -> None:
    hyper = Hyper(num_pixels=64)
    p = init_parameters(hyper, range(20))
    inputs, outputs = layer_sizes(hyper)[layer]
    reference = torch.nn.Linear(inputs, outputs)
    bound = 1 / inputs**0.5
    for name, like in (("weight", reference.weight.t()), ("bias", reference.bias)):
        values = p[f"{layer}_{name}"]
        assert values.shape[1:] == like.shape and values.abs().max() <= bound
        assert like.abs().max() <= bound  # what the published default is, as of this torch
        spread = float(values.double().var()) / (bound**2 / 3)
        assert abs(spread - 1) < 5 / values.numel() ** 0.5


def test_the_layers_are_those_of_the_specification() -> None:
    p = parameters_of()
    x = torch.rand(2, 3, 6, dtype=torch.float64)
    y = torch.rand(2, 3, 2, 4, dtype=torch.float64).softmax(-1)
    z = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    hidden, logits = class_logits(p, x)
    given_y = style(p, hidden, y)
    pixels = decode(p, y, z)

    def linear(run: int, layer: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, p[f"{layer}_weight"][run].t(), p[f"{layer}_bias"][run])

    for run, image in itertools.product(range(2), range(3)):
        h = linear(run, "encoder", x[run, image]).relu()
        torch.testing.assert_close(hidden[run, image], h)
        torch.testing.assert_close(logits[run, image], linear(run, "classifier", h))
        for s in range(2):
            both = linear(run, "style", torch.cat([y[run, image, s], h]))
            torch.testing.assert_close(given_y.mean[run, image, s], both[:2])
            torch.testing.assert_close(given_y.log_std[run, image, s], both[2:])
            inner = linear(run, "decoder", torch.cat([y[run, image, s], z[run, image, s]])).relu()
            torch.testing.assert_close(pixels[run, image, s], linear(run, "pixels", inner))


def test_all_classes_at_once_are_each_class_alone() -> None:
    p = parameters_of()
    hidden, _ = class_logits(p, torch.rand(2, 3, 6, dtype=torch.float64))
    identity = torch.eye(4, dtype=torch.float64)
    together = style(p, hidden, identity[None, None])
    for label in range(4):
        alone = style(p, hidden, identity[label].expand(2, 3, 4))
        torch.testing.assert_close(together.mean[:, :, label], alone.mean)
        torch.testing.assert_close(together.log_std[:, :, label], alone.log_std)


def decoder_inputs() -> tuple[Tensor, ...]:
    stream = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=stream, dtype=torch.float64)
        return made.requires_grad_()

    x = torch.rand(2, 3, 6, generator=stream, dtype=torch.float64)
    return drawn(2, 3, 4, 5), drawn(2, 5, 7), drawn(2, 7, 6), drawn(2, 6), x


def plain_decoder(inputs: Tensor, first: Tensor, second: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    hidden = torch.einsum("rbki,rih->rbkh", inputs, first).relu()
    logits = torch.einsum("rbkh,rhd->rbkd", hidden, second) + bias[:, None, None]
    pixels = x.unsqueeze(2).expand_as(logits)
    return -F.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(-1)


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_the_decoder_in_pieces_is_the_decoder(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "_PIECE_BYTES", piece_bytes)
    given_ = decoder_inputs()
    found, expected = decoder_log_likelihood(*given_), plain_decoder(*given_)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=torch.float64)
    ours = torch.autograd.grad((found * weights).sum(), given_[:4])
    theirs = torch.autograd.grad((expected * weights).sum(), given_[:4])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_of_the_decoder_are_finite_differences() -> None:
    assert torch.autograd.gradcheck(decoder_log_likelihood, decoder_inputs())


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([1.0, 0.0, 0.5]).view(1, 1, 3)
    inputs = torch.ones(1, 1, 1, 1)
    second = torch.tensor([[2e4, -2e4, 2e4]]).view(1, 1, 3)
    log_p = decoder_log_likelihood(inputs, torch.ones(1, 1, 1), second, torch.zeros(1, 3), x)
    # Both sure and right: 0; sure that a grey pixel is white: -0.5 * 20,000.
    assert log_p.item() == pytest.approx(-1e4)
    plain = log_likelihood(second.view(1, 1, 1, 3), x)
    assert plain.item() == pytest.approx(-1e4)
