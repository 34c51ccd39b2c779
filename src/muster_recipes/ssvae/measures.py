"""The measures of trained runs, for all runs of an ensemble at once.

Images are the same for all runs, [n, D]. A value that is not a finite number is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from muster_recipes.ssvae import probe
from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.disentanglement import (
    beta_vae_score,
    factor_vae_score,
    moved_images,
    mutual_information_gap,
)
from muster_recipes.ssvae.networks import Parameters, class_logits, style
from muster_recipes.ssvae.noise import noise_of, step_keys
from muster_recipes.ssvae.objective import class_log_weights, over_classes
from muster_recipes.ssvae.pool import Pool

Measures = dict[str, float | None]

#: The probe sees at most so many images: more would not change its accuracy by 0.1 %.
MAX_PROBE_IMAGES = 10_000
_BLOCK_BYTES = 64 * 2**20
_NUM_GRIDS = 8


def measure(p: Parameters, test: Pool, probe_pool: Pool, hyper: Hyper) -> list[Measures]:
    """Accuracy, bound, calibration and style leakage of every run, by name.

    ``accuracy`` of argmax q(y|x), ``elbo_nats``: :func:`elbo` on ``test``, ``calibration_error``:
    of q(y|x) in 15 bins, and :func:`style_leakage`, whose probe is fitted on ``probe_pool``.
    """
    logits = classify(p, test.x)
    measured = class_measures(logits, test.labels)
    bounds = _numbers(elbo(p, test.x, hyper))
    leakages = _numbers(style_leakage(p, test, probe_pool, hyper))
    return [
        {**run, "elbo_nats": bound, "style_leakage": leakage}
        for run, bound, leakage in zip(measured, bounds, leakages, strict=True)
    ]


def class_measures(logits: Tensor, labels: Tensor) -> list[Measures]:
    """``accuracy`` and ``calibration_error`` from class ``logits`` [R, n, C] alone."""
    logits = logits.double()
    finite = logits.isfinite().flatten(1).all(dim=1)
    accuracy = (logits.argmax(-1) == labels).double().mean(1)
    errors = calibration_error(logits.softmax(-1), labels)
    names = ("accuracy", "calibration_error")
    values = (_numbers(torch.where(finite, each, torch.nan)) for each in (accuracy, errors))
    return [dict(zip(names, run, strict=True)) for run in zip(*values, strict=True)]


def calibration_error(probabilities: Tensor, labels: Tensor, num_bins: int = 15) -> Tensor:
    """The expected calibration error of every run, float64 [R], between 0 and 1.

    ``probabilities`` [R, n, C], ``labels`` int64 [n]. The n largest probabilities fall into
    ``num_bins`` bins ((m - 1)/M, m/M] of equal width; the error is the mean over images of
    |accuracy - confidence| of the image's bin (Guo et al. 2017, equation 3). A run with a
    probability that is not a number has the error NaN.
    """
    confidence, predicted = probabilities.double().max(dim=-1)
    gap = (predicted == labels).double() - confidence
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=gap.device) / num_bins
    # Of equal values bucketize takes the lower bin: the bins are closed on the right.
    bins = torch.bucketize(confidence, edges)
    # Size of a bin × |accuracy - confidence| in it = |sum of the gaps in it|.
    sums = gap.new_zeros(gap.shape[0], num_bins).scatter_add(1, bins, gap)
    return sums.abs().sum(dim=1) / gap.shape[1]


@torch.no_grad()
def classify(p: Parameters, x: Tensor) -> Tensor:
    """Logits of q(y|x), [R, n, C], of images ``x`` [n, D]."""
    return torch.cat([class_logits(p, part).logits for part, _ in _blocks(p, x, _width(p))], 1)


@torch.no_grad()
def elbo(p: Parameters, x: Tensor, hyper: Hyper, noise_seed: int = 0) -> Tensor:
    """The bound on log p(x) without labels, in nats per image, float64 [R]: the mean over ``x``.

    Summed over the classes exactly, whatever estimator ``hyper`` trains with. The noise of an
    image is a function of (``noise_seed``, its place in ``x``): the same for all runs.
    """
    keys = step_keys([noise_seed], 0, len(x), x.device)
    floats = hyper.num_classes * hyper.num_samples * 2 * (hyper.num_hidden + hyper.num_pixels)
    total = torch.zeros(_num_runs(p), dtype=torch.float64, device=x.device)
    for part, place in _blocks(p, x, floats):
        hidden, logits = class_logits(p, part)
        eps = noise_of(hyper, keys[:, place]).eps
        bounds = class_log_weights(p, part, hidden, eps).mean(-1)
        total += over_classes(bounds, F.log_softmax(logits, -1)).double().sum(1)
    return total / len(x)


@torch.no_grad()
def style_means(p: Parameters, x: Tensor) -> Tensor:
    """The mean of q(z|x,y) given y = argmax q(y|x), [R, n, L]."""
    means = []
    for part, _ in _blocks(p, x, _width(p)):
        hidden, logits = class_logits(p, part)
        y = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        means.append(style(p, hidden, y).mean)
    return torch.cat(means, 1)


def style_leakage(p: Parameters, test: Pool, probe_pool: Pool, hyper: Hyper) -> Tensor:
    """How well the digit can be read linearly from the style, float64 [R]: lower is better.

    The test accuracy of a linear probe on :func:`style_means`, fitted on at most the first
    :data:`MAX_PROBE_IMAGES` images of ``probe_pool``, rescaled so that chance is 0 and certainty
    1: (accuracy - 1/C) / (1 - 1/C). Below chance it is negative. NaN where the styles are not
    finite.
    """
    seen = Pool(probe_pool.x[:MAX_PROBE_IMAGES], probe_pool.labels[:MAX_PROBE_IMAGES])
    fitted_on, tested_on = style_means(p, seen.x), style_means(p, test.x)
    chance = 1 / hyper.num_classes
    # Few runs at a time: the probe's Hessian holds a row per image, class and dimension.
    bytes_per_run = 3 * 8 * len(seen.x) * hyper.num_classes * (hyper.num_style + 1)
    num_together = max(1, 4 * _BLOCK_BYTES // bytes_per_run)
    leakages = []
    for first in range(0, len(fitted_on), num_together):
        runs = slice(first, first + num_together)
        fitted = probe.fit(fitted_on[runs], seen.labels, hyper.num_classes)
        right = (fitted.predict(tested_on[runs]) == test.labels).double().mean(1)
        leakage = (right - chance) / (1 - chance)
        leakages.append(torch.where(fitted.converged, leakage, torch.nan))
    return torch.cat(leakages)


def factor_scores(p: Parameters, images: Tensor, seed: int) -> list[Measures]:
    """Three published scores of disentanglement of every run, on factors with known values.

    ``images`` [n, side, side] are square. Their digits are rotated, scaled and shifted over a full
    grid, eight times with images drawn by ``seed`` (5,000 images; see ``moved_images``), and the
    codes are the :func:`style_means` of the result. Training saw none of these movements.
    """
    stream = torch.Generator().manual_seed(seed)
    moved, known = moved_images(images, _NUM_GRIDS, stream)
    codes = style_means(p, moved.flatten(1))
    scores = {
        "beta_vae_score": beta_vae_score(codes, known.level, seed),
        "factor_vae_score": factor_vae_score(codes, known.level, seed),
        "mutual_information_gap": mutual_information_gap(codes, known.level),
    }
    columns = [_numbers(score) for score in scores.values()]
    return [dict(zip(scores, run, strict=True)) for run in zip(*columns, strict=True)]


def _num_runs(p: Parameters) -> int:
    return len(p["encoder_weight"])


def _width(p: Parameters) -> int:
    """Numbers per image in a pass through the classifier; a style layer after it is narrower."""
    return 2 * p["encoder_bias"].shape[1]


def _blocks(p: Parameters, x: Tensor, floats_per_image: int) -> Iterator[tuple[Tensor, slice]]:
    """``x`` [n, D] in blocks as all runs see them, [R, B, D], and their places.

    ``floats_per_image`` of one run decide how many images make up a block.
    """
    num_runs, dtype = _num_runs(p), p["encoder_weight"].dtype
    size = max(1, _BLOCK_BYTES // (4 * num_runs * floats_per_image))
    for first in range(0, len(x), size):
        place = slice(first, first + size)
        yield x[place].to(dtype).expand(num_runs, -1, -1), place


def _numbers(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
