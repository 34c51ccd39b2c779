"""Calibration, the linear probe, and what is measured on runs whose measures are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.recipes.ssvae_slow_probe import slow_fit

from muster_recipes.ssvae import measures, probe
from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.measures import (
    calibration_error,
    class_measures,
    elbo,
    factor_scores,
    measure,
    style_leakage,
    style_means,
)
from muster_recipes.ssvae.networks import Parameters, init_parameters
from muster_recipes.ssvae.pool import Pool

HYPER = Hyper(num_pixels=16, num_style=3, num_hidden=12, num_samples=4)


def _pool(num: int, seed: int, num_pixels: int = 16) -> Pool:
    stream = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % 10
    return Pool(torch.rand(num, num_pixels, generator=stream), labels)


# Calibration


def _slow_error(probabilities: list[list[float]], labels: list[int], num_bins: int) -> float:
    """Guo et al. (2017), equations 2 and 3, bin by bin."""
    total = 0.0
    for m in range(1, num_bins + 1):
        members = [
            (max(row), row.index(max(row)) == label)
            for row, label in zip(probabilities, labels, strict=True)
            if (m - 1) / num_bins < max(row) <= m / num_bins
        ]
        if members:
            accuracy = sum(right for _, right in members) / len(members)
            confidence = sum(sure for sure, _ in members) / len(members)
            total += len(members) / len(labels) * abs(accuracy - confidence)
    return total


@given(seed=st.integers(0, 2**16), num=st.integers(1, 40), sharp=st.sampled_from([0.1, 1.0, 9.0]))
@examples(40)
def test_calibration_error_is_that_of_a_loop_over_bins(seed: int, num: int, sharp: float) -> None:
    stream = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(2, num, 4, generator=stream, dtype=torch.float64).mul(sharp)
    probabilities = probabilities.softmax(-1)
    labels = torch.randint(4, (num,), generator=stream)
    for num_bins in (1, 10, 15):
        found = calibration_error(probabilities, labels, num_bins)
        slow = [_slow_error(run, labels.tolist(), num_bins) for run in probabilities.tolist()]
        torch.testing.assert_close(found, torch.tensor(slow, dtype=torch.float64))


def test_calibration_error_of_known_cases() -> None:
    labels = torch.tensor([0, 1])
    sure = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # right once, sure twice
    assert calibration_error(sure, labels).item() == 0.5
    honest = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    assert calibration_error(honest, labels).item() == 0.0
    # 0.6 = 9/15 is the upper edge of the ninth bin, and 0.61 is in the tenth.
    edge = torch.tensor([[[0.6, 0.4], [0.61, 0.39]]], dtype=torch.float64)
    assert calibration_error(edge, labels).item() == pytest.approx((0.4 + 0.61) / 2)


# The probe


@given(seed=st.integers(0, 2**16), separable=st.booleans())
@examples(8)
def test_the_probe_is_at_the_optimum_that_another_solver_finds(seed: int, separable: bool) -> None:
    stream = torch.Generator().manual_seed(seed)
    features = torch.randn(2, 60, 3, generator=stream, dtype=torch.float64) * 7 + 2
    labels = features[0].argmax(1) if separable else torch.randint(3, (60,), generator=stream)
    fitted = probe.fit(features, labels, num_classes=4)  # the fourth class has no example
    assert fitted.converged.all()
    for run in range(2):
        slow = slow_fit(features[run], labels, 4)
        torch.testing.assert_close(fitted.weight[run], slow, atol=1e-5, rtol=1e-5)


def test_the_probe_does_not_depend_on_units_and_leaves_out_what_does_not_vary() -> None:
    stream = torch.Generator().manual_seed(1)
    features = torch.randn(1, 80, 3, generator=stream)
    labels = torch.randint(10, (80,), generator=stream)
    constant = 0.3 + 1e-8 * torch.randn(1, 80, 1, generator=stream, dtype=torch.float64)
    other = torch.cat([features * torch.tensor([1e-3, 1.0, 1e4]) + 5, constant], -1)
    fitted, of_other = probe.fit(features, labels), probe.fit(other, labels)
    torch.testing.assert_close(of_other.weight[:, [0, 1, 2, 4]], fitted.weight, atol=1e-2, rtol=0)
    assert bool((of_other.weight[:, 3] == 0).all())
    assert torch.equal(of_other.predict(other), fitted.predict(features))


def test_a_run_that_is_not_finite_is_not_converged_and_harms_no_other() -> None:
    stream = torch.Generator().manual_seed(2)
    features = torch.randn(3, 40, 2, generator=stream)
    labels = torch.randint(10, (40,), generator=stream)
    alone = probe.fit(features[2:], labels)
    features[1, 5, 0] = math.inf
    fitted = probe.fit(features, labels)
    assert fitted.converged.tolist() == [True, False, True]
    torch.testing.assert_close(fitted.weight[2], alone.weight[0])


# Measures of a run


def _silent(hyper: Hyper) -> Parameters:
    """All weights 0: a uniform class, a style equal to the prior, pixels with probability 1/2."""
    return {name: torch.zeros_like(value) for name, value in init_parameters(hyper, [0]).items()}


def _reader(style_reads: bool) -> tuple[Parameters, Hyper]:
    """A model of one-hot images that reads the class from the lit pixel, and maybe into z."""
    hyper = Hyper(num_pixels=10, num_style=10, num_hidden=10, num_samples=2)
    p = _silent(hyper)
    p["encoder_weight"][0] = torch.eye(10)
    p["classifier_weight"][0] = 5 * torch.eye(10)
    if style_reads:
        p["style_weight"][0, 10:, :10] = torch.eye(10)
    return p, hyper


def test_the_bound_of_a_model_whose_bound_is_known() -> None:
    p = _silent(HYPER)
    x = _pool(7, 0).x
    p["classifier_bias"][0] = torch.linspace(-1, 2, 10)
    p["pixels_bias"][0] = torch.linspace(-2, 2, 16)
    q = torch.linspace(-1, 2, 10).double().softmax(0)
    pixel = torch.linspace(-2, 2, 16).double().sigmoid()
    log_p = (x.double() * pixel.log() + (1 - x.double()) * (1 - pixel).log()).sum(1).mean()
    divergence = (q * (q * 10).log()).sum()
    torch.testing.assert_close(elbo(p, x, HYPER)[0], log_p - divergence, atol=1e-5, rtol=0)


def test_the_bound_depends_on_neither_blocks_nor_neighbours_nor_estimator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = init_parameters(HYPER, [1, 2, 3])
    x = _pool(25, 1).x
    together = elbo(p, x, HYPER)
    alone = elbo({name: value[1:2] for name, value in p.items()}, x, HYPER)
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=0)
    torch.testing.assert_close(elbo(p, x, replace(HYPER, unlabelled="sampled")), together)
    monkeypatch.setattr(measures, "_BLOCK_BYTES", 1)  # one image at a time
    torch.testing.assert_close(elbo(p, x, HYPER), together, atol=1e-4, rtol=0)
    assert not torch.equal(elbo(p, x, HYPER, noise_seed=1), together)


def test_styles_are_those_of_the_likeliest_class() -> None:
    p = _silent(HYPER)
    p["encoder_weight"][0, :10, :10] = torch.eye(10)
    p["classifier_weight"][0, :10] = torch.eye(10)
    p["style_weight"][0, :10, 0] = torch.arange(10.0)  # the first mean says which class is given
    x = torch.zeros(10, 16)
    x[:, :10] = torch.eye(10)[torch.arange(9, -1, -1)]
    assert style_means(p, x)[0, :, 0].tolist() == list(range(9, -1, -1))


def test_style_leakage_is_1_when_the_style_repeats_the_digit() -> None:
    p, hyper = _reader(style_reads=True)
    labels = torch.arange(200) % 10
    pool = Pool(torch.eye(10)[labels], labels)
    assert style_leakage(p, pool, pool, hyper).tolist() == [1.0]


def test_style_leakage_without_information_is_chance_and_may_be_below() -> None:
    p, hyper = _reader(style_reads=False)
    labels = torch.arange(200) % 10
    pool = Pool(torch.eye(10)[labels], labels)
    assert style_leakage(p, pool, pool, hyper).item() == pytest.approx(0.0)
    # A blind probe says the most frequent class of its own pool, of which the test has none.
    zeros, ones = torch.zeros(200).long(), torch.ones(50).long()
    found = style_leakage(p, Pool(pool.x[:50], ones), Pool(pool.x, zeros), hyper)
    assert found.item() == pytest.approx(-1 / 9)


def test_the_probe_is_fitted_on_other_images_than_it_is_tested_on() -> None:
    p = init_parameters(HYPER, [0])
    test, other = _pool(40, 3), _pool(400, 4)  # noise: a probe cannot know the test labels
    assert abs(style_leakage(p, test, other, HYPER).item()) < 0.2


def test_measures_of_every_run_by_name() -> None:
    p = init_parameters(HYPER, [1, 2])
    p["pixels_bias"][0, 0] = math.nan
    test, other = _pool(30, 5), _pool(60, 6)
    broken, sound = measure(p, test, other, HYPER)
    names = {"accuracy", "elbo_nats", "calibration_error", "style_leakage"}
    assert set(broken) == set(sound) == names
    assert broken["elbo_nats"] is None  # never 0, never NaN
    (alone,) = measure({name: value[1:] for name, value in p.items()}, test, other, HYPER)
    assert sound == pytest.approx(alone, abs=1e-4)


def test_class_measures_need_logits_alone() -> None:
    logits = torch.tensor([[[9.0, 0.0], [9.0, 0.0]], [[math.nan, 0.0], [0.0, 1.0]]])
    right, broken = class_measures(logits, torch.tensor([0, 1]))
    assert right["accuracy"] == 0.5
    assert right["calibration_error"] == pytest.approx(1 / (1 + math.exp(-9)) - 0.5)
    assert broken == {"accuracy": None, "calibration_error": None}


def test_factor_scores_are_shares_and_repeat() -> None:
    p = init_parameters(HYPER, [1, 2])
    images = _pool(12, 7).x.view(-1, 4, 4)
    first = factor_scores(p, images, seed=3)
    assert first == factor_scores(p, images, seed=3)
    assert [set(run) for run in first] == [
        {"beta_vae_score", "factor_vae_score", "mutual_information_gap"}
    ] * 2
    assert all(value is not None and 0 <= value <= 1 for run in first for value in run.values())
