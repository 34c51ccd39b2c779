"""The objective against the formulas of the specification, written one number at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Normal
from torch.utils._python_dispatch import TorchDispatchMode

from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.networks import Parameters, class_logits, decode, init_parameters
from muster_recipes.ssvae.noise import Noise, noise_of, normals, step_keys
from muster_recipes.ssvae.objective import (
    Terms,
    class_log_weights,
    log_likelihood,
    objective,
    pixels_log_likelihood,
)

EXACT = Hyper(num_pixels=5, num_style=2, num_hidden=6, num_samples=3)
SAMPLED = dataclasses.replace(EXACT, unlabelled="sampled")
ALPHA = (0.5, 30.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Two runs of five images, some of which have a label, in float64."""

    hyper: Hyper
    p: Parameters
    x: Tensor
    labels: Tensor
    is_labelled: Tensor
    alpha: Tensor
    noise: Noise

    def terms(self, **changes: Any) -> Terms:
        case = dataclasses.replace(self, **changes)
        return objective(
            case.p, case.x, case.labels, case.is_labelled, case.alpha, case.noise, case.hyper
        )


def case_of(hyper: Hyper, seed: int = 0, batch: int = 5) -> Case:
    stream = torch.Generator().manual_seed(seed)
    noise = noise_of(hyper, step_keys([seed, seed + 1], 0, batch, "cpu"))
    gumbel = None if noise.gumbel is None else noise.gumbel.double()
    return Case(
        hyper=hyper,
        # Larger than at the beginning of a training, so that no term is near a constant.
        p={k: 3 * v.double() for k, v in init_parameters(hyper, [seed, seed + 1]).items()},
        x=torch.rand(2, batch, hyper.num_pixels, generator=stream, dtype=torch.float64),
        labels=torch.randint(0, 10, (2, batch), generator=stream),
        is_labelled=torch.rand(2, batch, generator=stream) < 0.5,
        alpha=torch.tensor(ALPHA, dtype=torch.float64),
        noise=Noise(noise.eps.double(), gumbel),
    )


def log_density(of: Distribution, value: Tensor) -> Tensor:
    total: Tensor = of.log_prob(value).sum()
    return total


class Plain:
    """One image of one run: torch.distributions, vectors of one sample, no batch anywhere."""

    def __init__(self, case: Case, run: int, image: int) -> None:
        self.p = {name: value[run] for name, value in case.p.items()}
        self.x = case.x[run, image]
        self.eps = case.noise.eps[run, image]
        self.h = (self.x @ self.p["encoder_weight"] + self.p["encoder_bias"]).clamp(min=0)
        logits = self.h @ self.p["classifier_weight"] + self.p["classifier_bias"]
        self.logits = logits
        self.log_q = logits - logits.exp().sum().log()

    def sample_bound(self, y: Tensor, eps: Tensor) -> Tensor:
        """log p(x|y,z) + log p(z) - log q(z|x,y) of the style that ``eps`` gives."""
        both = torch.cat([y, self.h]) @ self.p["style_weight"] + self.p["style_bias"]
        size = len(both) // 2
        q = Normal(both[:size], both[size:].exp())
        z = q.mean + q.stddev * eps
        inner = torch.cat([y, z]) @ self.p["decoder_weight"] + self.p["decoder_bias"]
        logits = inner.clamp(min=0) @ self.p["pixels_weight"] + self.p["pixels_bias"]
        log_p = log_density(Bernoulli(logits=logits, validate_args=False), self.x)
        prior = Normal(torch.zeros_like(z), torch.ones_like(z))
        return log_p + log_density(prior, z) - log_density(q, z)

    def class_bound(self, label: int) -> Tensor:
        y = torch.eye(10, dtype=torch.float64)[label]
        return torch.stack([self.sample_bound(y, eps) for eps in self.eps]).mean() - math.log(10)

    def sampled(self, gumbel: Tensor, temperature: float) -> Tensor:
        values = []
        for eps, noise in zip(self.eps, gumbel, strict=True):
            y = ((self.logits + noise) / temperature).softmax(0)
            values.append(self.sample_bound(y, eps) - math.log(10) - (y * self.log_q).sum())
        return torch.stack(values).mean()


@examples(5)
@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize("hyper", [EXACT, SAMPLED], ids=lambda hyper: hyper.unlabelled)
def test_every_image_has_the_objective_of_the_specification(hyper: Hyper, seed: int) -> None:
    case = case_of(hyper, seed, batch=3)
    found = case.terms()
    for run in range(2):
        for image in range(3):
            plain = Plain(case, run, image)
            label = int(case.labels[run, image])
            if case.is_labelled[run, image]:
                bound, log_q = plain.class_bound(label), plain.log_q[label]
            elif hyper is EXACT:
                bound, log_q = torch.zeros(()).double(), torch.zeros(()).double()
                for y in range(10):
                    share = plain.log_q[y].exp()
                    bound = bound + share * (plain.class_bound(y) - plain.log_q[y])
            else:
                assert case.noise.gumbel is not None
                bound = plain.sampled(case.noise.gumbel[run, image], hyper.temperature)
                log_q = torch.zeros(()).double()
            torch.testing.assert_close(found.bound[run, image], bound)
            torch.testing.assert_close(found.log_q_label[run, image], log_q)
            torch.testing.assert_close(found.objective[run, image], bound + ALPHA[run] * log_q)
            torch.testing.assert_close(found.log_q[run, image], plain.log_q)


@pytest.mark.parametrize("hyper", [EXACT, SAMPLED], ids=lambda hyper: hyper.unlabelled)
def test_gradients_are_central_differences(hyper: Hyper) -> None:
    case = case_of(hyper, 4)
    weights = torch.rand(2, 5, dtype=torch.float64)  # as a mask of a ragged batch would be

    def total(p: Parameters) -> Tensor:
        return (case.terms(p=p).objective * weights).sum()

    leaves = {name: value.clone().requires_grad_() for name, value in case.p.items()}
    gradients = torch.autograd.grad(total(leaves), list(leaves.values()))
    stream = torch.Generator().manual_seed(1)
    for (name, value), gradient in zip(case.p.items(), gradients, strict=True):
        for _ in range(3):
            direction = torch.randn(value.shape, generator=stream, dtype=torch.float64)
            h = 1e-5
            ahead = total({**case.p, name: value + h * direction})
            behind = total({**case.p, name: value - h * direction})
            slope = (ahead - behind) / (2 * h)
            torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("hyper", [EXACT, SAMPLED], ids=lambda hyper: hyper.unlabelled)
def test_runs_never_mix(hyper: Hyper) -> None:
    case = case_of(hyper, 2)

    def gradients_of_run_0(case: Case) -> list[Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in case.p.items()}
        loss = case.terms(p=leaves).objective.mean(1).sum()
        return [gradient[0] for gradient in torch.autograd.grad(loss, list(leaves.values()))]

    before = gradients_of_run_0(case)
    x, p = case.x.clone(), {name: value.clone() for name, value in case.p.items()}
    x[1] = 1 - x[1]
    for value in p.values():
        value[1] = math.nan
    alpha, labels = case.alpha.clone(), case.labels.clone()
    alpha[1], labels[1] = 1e38, (labels[1] + 1) % 10
    after = gradients_of_run_0(dataclasses.replace(case, x=x, p=p, alpha=alpha, labels=labels))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("hyper", [EXACT, SAMPLED], ids=lambda hyper: hyper.unlabelled)
def test_a_run_alone_is_the_run_among_others(hyper: Hyper) -> None:
    case = case_of(hyper, 3)
    together = case.terms()
    gumbel = case.noise.gumbel
    for run in range(2):
        only = slice(run, run + 1)
        alone = case.terms(
            p={name: value[only] for name, value in case.p.items()},
            x=case.x[only],
            labels=case.labels[only],
            is_labelled=case.is_labelled[only],
            alpha=case.alpha[only],
            noise=Noise(case.noise.eps[only], None if gumbel is None else gumbel[only]),
        )
        for ours, theirs in zip(alone, together, strict=True):
            torch.testing.assert_close(ours[0], theirs[run])


def test_a_label_that_is_not_known_changes_nothing() -> None:
    for hyper in (EXACT, SAMPLED):
        case = case_of(hyper, 5)
        other = case.labels.where(case.is_labelled, -1)
        assert torch.equal(case.terms().objective, case.terms(labels=other).objective)


def test_float32_is_near_float64() -> None:
    case = case_of(Hyper(num_pixels=64), 6)
    p = {name: value.float() for name, value in case.p.items()}
    noise = Noise(case.noise.eps.float(), None)
    single = case.terms(p=p, x=case.x.float(), alpha=case.alpha.float(), noise=noise)
    torch.testing.assert_close(single.objective.double(), case.terms().objective, rtol=1e-5, atol=0)


def test_the_pieces_of_the_cpu_are_the_plain_decoder() -> None:
    case = case_of(EXACT, 7)
    y = torch.eye(10, dtype=torch.float64)[None, None, :, None]
    z = torch.randn(2, 5, 10, 3, 2, dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in case.p.items()}
    results = []
    for log_p in (
        pixels_log_likelihood(leaves, y, z, case.x),
        log_likelihood(decode(leaves, y, z), case.x),
    ):
        names = ["decoder_weight", "decoder_bias", "pixels_weight", "pixels_bias"]
        gradients = torch.autograd.grad(log_p.square().sum(), [leaves[name] for name in names])
        results.append((log_p, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


class Copies(TorchDispatchMode):
    """The shapes of tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_no_hidden_layer_is_copied_on_a_gpu() -> None:
    """Six copies of the largest tensor of a step took half of its time there, by its bytes."""
    case = case_of(EXACT, 7)
    leaves = {name: value.to("meta").requires_grad_() for name, value in case.p.items()}
    z = torch.empty(2, 5, 10, 3, 2, device="meta", dtype=torch.float64, requires_grad=True)
    y = torch.eye(10, dtype=torch.float64, device="meta")[None, None, :, None]
    with Copies() as copies:
        pixels_log_likelihood(leaves, y, z, case.x.to("meta")).sum().backward()  # type: ignore[no-untyped-call]
    rows = z.numel() // z.shape[-1]
    assert [shape for shape in copies.shapes if math.prod(shape) >= rows * EXACT.num_hidden] == []


def quadrature(p: Parameters, x: Tensor) -> Tensor:
    """log p(x) [B] of one run with one style dimension: the sum over a fine grid of z."""
    z = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    log_prior = -0.5 * z.square() - 0.5 * math.log(2 * math.pi) + math.log(18 / 2000)
    parts = []
    for y in torch.eye(10, dtype=torch.float64):
        inputs = torch.cat([y.expand(len(z), 10), z[:, None]], 1)
        inner = (inputs @ p["decoder_weight"][0] + p["decoder_bias"][0]).clamp(min=0)
        white = torch.sigmoid(inner @ p["pixels_weight"][0] + p["pixels_bias"][0])
        log_p = x[0] @ white.log().t() + (1 - x[0]) @ (1 - white).log().t()
        parts.append(log_p + log_prior - math.log(10))
    return torch.cat(parts, 1).logsumexp(1)


def tiny() -> tuple[Hyper, Parameters, Tensor]:
    """One style dimension and two pixels: log p(x) is known by quadrature."""
    hyper = Hyper(num_pixels=2, num_style=1, num_hidden=8, num_samples=2000)
    p = {name: 2.5 * value.double() for name, value in init_parameters(hyper, [11]).items()}
    # A posterior that is too wide: the bound has a gap, and importance weights are bounded.
    p["style_bias"] = p["style_bias"] + torch.tensor([0.3, 0.9], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    return hyper, p, x.unsqueeze(0)


def test_the_true_probabilities_of_all_images_sum_to_one() -> None:
    _, p, x = tiny()
    assert quadrature(p, x).exp().sum().item() == pytest.approx(1, abs=1e-9)


@torch.no_grad()
def log_marginal(
    p: Parameters, x: Tensor, keys: Tensor, hyper: Hyper, *, num_samples: int = 1000
) -> Tensor:
    """An estimate of log p(x), nats [R, B], for pixels ``x`` [R, B, D].

    log (1/K) sum_k sum_y p(y) p(x|y,z_k) p(z_k) / q(z_k|x,y) with K = ``num_samples`` styles from
    q(z|x,y): equation 8 of Burda, Grosse, Salakhutdinov (2016), "Importance weighted
    autoencoders", with the class summed exactly. Its mean is a lower bound on log p(x) that
    tightens as K grows. ``keys`` [R, B]: of the noise, see ``noise``. K x C decodings per image
    are held at once: split x where memory is short.
    """
    eps = normals(keys, num_samples * hyper.num_style).view(*keys.shape, num_samples, -1)
    log_weights = class_log_weights(p, x, class_logits(p, x).hidden, eps)
    return log_weights.flatten(2).logsumexp(-1) - math.log(num_samples)


def test_importance_sampling_converges_to_log_p() -> None:
    hyper, p, x = tiny()
    truth, repeats = quadrature(p, x), 50
    errors = []
    for num_samples in (1, 1000):
        keys = step_keys(torch.arange(repeats), num_samples, 4, "cpu").view(1, -1)
        many = x.repeat(1, repeats, 1)
        found = log_marginal(p, many, keys, hyper, num_samples=num_samples).view(repeats, 4)
        noise = 5 * found.std(0) / repeats**0.5
        assert (found.mean(0) <= truth + noise).all(), "a lower bound on average"
        errors.append((found.mean(0) - truth).abs())
    # The bias of K samples falls as 1/K.
    assert (errors[1] < noise + errors[0] / 100).all()
    assert errors[1].max() < 0.05 < 0.5 < errors[0].max()


def test_the_bound_does_not_exceed_the_likelihood() -> None:
    hyper, p, x = tiny()
    noise = noise_of(hyper, step_keys([5], 0, 4, "cpu"))
    unlabelled = torch.zeros(1, 4, dtype=torch.bool)
    labels, alpha = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    bound = objective(p, x, labels, unlabelled, alpha, noise, hyper).bound
    assert (bound[0] < quadrature(p, x) - 0.1).all(), "a gap beyond the noise of 2,000 samples"
    torch.testing.assert_close(bound[0], bound_by_quadrature(p, x), rtol=0.03, atol=0.03)


def bound_by_quadrature(p: Parameters, x: Tensor) -> Tensor:
    """sum_y q(y|x) E_q(z|x,y)[log p(x, y, z) - log q(y, z|x)], [B], over a grid of z."""
    hidden = (x[0] @ p["encoder_weight"][0] + p["encoder_bias"][0]).clamp(min=0)
    q_y = (hidden @ p["classifier_weight"][0] + p["classifier_bias"][0]).softmax(-1)
    total = torch.zeros(len(q_y), dtype=torch.float64)
    for image, h in enumerate(hidden):
        for label, y in enumerate(torch.eye(10, dtype=torch.float64)):
            both = torch.cat([y, h]) @ p["style_weight"][0] + p["style_bias"][0]
            mean, std = both[0], both[1].exp()
            z = mean + std * torch.linspace(-9, 9, 2001, dtype=torch.float64)
            log_q = -0.5 * ((z - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
            inputs = torch.cat([y.expand(len(z), 10), z[:, None]], 1)
            inner = (inputs @ p["decoder_weight"][0] + p["decoder_bias"][0]).clamp(min=0)
            logits = inner @ p["pixels_weight"][0] + p["pixels_bias"][0]
            log_p = -torch.where(x[0, image] > 0.5, -logits, logits).exp().log1p().sum(1)
            log_prior = -0.5 * z.square() - 0.5 * math.log(2 * math.pi) - math.log(10)
            inside = log_p + log_prior - q_y[image, label].log() - log_q
            total[image] += q_y[image, label] * (log_q.exp() * inside).sum() * 18 * std / 2000
    return total


def test_the_bound_does_not_exceed_importance_sampling_on_larger_models() -> None:
    hyper = Hyper(num_pixels=12, num_style=3, num_hidden=16, num_samples=500)
    p = {name: 2 * value.double() for name, value in init_parameters(hyper, [1, 2]).items()}
    x = torch.rand(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys = step_keys([1, 2], 0, 6, "cpu")
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    terms = objective(p, x, zeros, zeros.bool(), torch.zeros(2), noise_of(hyper, keys), hyper)
    reference = log_marginal(p, x, step_keys([3, 4], 0, 6, "cpu"), hyper, num_samples=500)
    assert (terms.bound < reference + 0.05).all()
