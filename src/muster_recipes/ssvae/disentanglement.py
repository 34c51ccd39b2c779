"""Scores of disentanglement as published, on codes whose factors are known.

``codes`` [R, n, L] are posterior means of R runs for n images, ``factors`` int64 [n, K] say which
value each factor had: a full grid or draws that are independent of each other. A score is float64
[R]; a run whose codes are not finite has NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.ssvae import probe

#: The columns of every table of factors, in this order.
NAMES = ("rotation", "scale", "shift_right", "shift_down")
_NUM_VALUES = 5
_NUM_BINS = 20
_MAX_ROTATION_RAD = math.radians(25)
_MAX_SHIFT = 0.2  # in half widths of the frame
_LEAST_SCALE = 0.75  # of the largest scale
_INK = 0.05  # a pixel above this belongs to the digit


class Factors(NamedTuple):
    """``level`` int64 [n, 4]: which of the values each image has; ``value`` float32 [n, 4]: the
    rotation in radians (clockwise), the scale, and the shifts in half widths of the frame."""

    level: Tensor
    value: Tensor


def full_grid(images: Tensor) -> Factors:
    """All 5⁴ = 625 combinations once, in ranges in which every one of ``images`` stays inside.

    ``images`` [n, side, side]. Rotations lie in ±25°, shifts in ±0.2 half widths. The scale goes
    from 0.75 of the largest to the largest at which the ink still is inside the frame after any
    rotation and shift: about 0.6 for digits that fill the frame (8x8), 0.8 for those of MNIST.
    """
    largest = _largest_scale(images)
    values = torch.stack(
        [
            torch.linspace(-_MAX_ROTATION_RAD, _MAX_ROTATION_RAD, _NUM_VALUES),
            torch.linspace(_LEAST_SCALE * largest, largest, _NUM_VALUES),
            torch.linspace(-_MAX_SHIFT, _MAX_SHIFT, _NUM_VALUES),
            torch.linspace(-_MAX_SHIFT, _MAX_SHIFT, _NUM_VALUES),
        ]
    )
    level = torch.cartesian_prod(*[torch.arange(_NUM_VALUES)] * len(NAMES))
    return Factors(level, torch.stack([values[k][level[:, k]] for k in range(len(NAMES))], 1))


def transformed(images: Tensor, value: Tensor) -> Tensor:
    """``images`` [n, side, side] scaled about their middle, then rotated, then shifted.

    ``value`` [n, 4] as in :class:`Factors`. Bilinear; outside the frame is 0.
    """
    angle, scale, right, down = value.to(images).unbind(1)
    cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
    # grid_sample asks where a pixel comes from: the inverse of the movement.
    inverse = torch.stack(
        [
            torch.stack([cos, sin, -cos * right - sin * down], 1),
            torch.stack([-sin, cos, sin * right - cos * down], 1),
        ],
        1,
    )
    shape = [len(images), 1, *images.shape[1:]]
    grid = torch.nn.functional.affine_grid(inverse, shape, align_corners=False)
    moved = torch.nn.functional.grid_sample(images[:, None], grid, align_corners=False)
    return moved[:, 0]


def moved_images(
    images: Tensor, num_repeats: int, stream: torch.Generator
) -> tuple[Tensor, Factors]:
    """The full grid ``num_repeats`` times, each combination with an image drawn at random.

    ``images`` [n, side, side] -> [625 · num_repeats, side, side]. The image is independent of the
    factors, and the factors of each other.
    """
    grid = full_grid(images)
    factors = Factors(grid.level.repeat(num_repeats, 1), grid.value.repeat(num_repeats, 1))
    chosen = torch.randint(len(images), (len(factors.level),), generator=stream)
    return transformed(images[chosen.to(images.device)], factors.value), factors


def _largest_scale(images: Tensor) -> float:
    """The largest scale, at most 1, with scale · (|x| cos + |y| sin) + shift within the frame."""
    side = images.shape[-1]
    inked = (images > _INK).any(0).nonzero().double()
    if not len(inked):
        return 1.0
    # Outer edge of the outermost pixel with ink, in half widths from the middle.
    extent = float(((inked - (side - 1) / 2).abs() + 0.5).max()) / (side / 2)
    reach = extent * (math.cos(_MAX_ROTATION_RAD) + math.sin(_MAX_ROTATION_RAD))
    return min(1.0, (1 - _MAX_SHIFT) / reach)


#: A dimension whose standard deviation is below this has collapsed to the prior. The value of
#: Locatello et al. (2019); it supposes the prior N(0, 1).
DEAD_STD = 0.05


def beta_vae_score(
    codes: Tensor,
    factors: Tensor,
    seed: int,
    *,
    num_train: int = 1000,
    num_test: int = 500,
    num_pairs: int = 64,
) -> Tensor:
    """The score of Higgins et al. (2017), section 3; chance is 1 / K.

    A vote fixes one factor in ``num_pairs`` pairs of images, of which all else is independent. A
    linear classifier guesses this factor from the mean of |code - code'| over the pairs; the score
    is its accuracy on votes that it was not fitted on.
    """
    stream = torch.Generator().manual_seed(seed)
    kind = torch.randint(factors.shape[1], (num_train + num_test,), generator=stream)
    first, second = _pairs(factors.cpu(), kind, num_pairs, stream)
    safe, finite = _finite(codes)
    first, second, kind = (index.to(codes.device) for index in (first, second, kind))
    # Run by run: the codes of all votes of all runs would take gigabytes.
    distance = torch.stack([(run[first] - run[second]).abs().mean(1) for run in safe])
    fitted = probe.fit(distance[:, :num_train], kind[:num_train], factors.shape[1])
    right = fitted.predict(distance[:, num_train:]) == kind[num_train:]
    return torch.where(finite & fitted.converged, right.double().mean(1), torch.nan)


def factor_vae_score(
    codes: Tensor,
    factors: Tensor,
    seed: int,
    *,
    num_train: int = 2000,
    num_test: int = 1000,
    num_images: int = 64,
) -> Tensor:
    """The score of Kim and Mnih (2018), section 4; a code without information is near 1 / K.

    A vote fixes one factor in ``num_images`` images and names the dimension whose variance,
    divided by that over all images, is least. The score is the accuracy of the majority vote,
    from dimension to factor, on votes that it was not counted on. Dead dimensions do not vote
    (:data:`DEAD_STD`); a run in which all are dead has 0.
    """
    stream = torch.Generator().manual_seed(seed)
    kind = torch.randint(factors.shape[1], (num_train + num_test,), generator=stream)
    anchor = torch.randint(len(factors), kind.shape, generator=stream)
    index = _alike(factors.cpu(), kind, anchor, num_images, stream).to(codes.device)
    safe, finite = _finite(codes)
    total = safe.double().var(1)
    dead = total.sqrt() < DEAD_STD
    num_dims, num_factors = codes.shape[2], factors.shape[1]
    scores = []
    for run, variance, is_dead in zip(safe, total, dead, strict=True):
        ratio = run[index].double().var(1) / variance.clamp_min(1e-300)
        dim = torch.where(is_dead, torch.inf, ratio).argmin(1).cpu()
        counts = torch.zeros(num_dims, num_factors, dtype=torch.int64)
        counts.index_put_((dim[:num_train], kind[:num_train]), torch.tensor(1), accumulate=True)
        scores.append((counts.argmax(1)[dim[num_train:]] == kind[num_train:]).double().mean())
    score = torch.stack(scores).to(codes.device)
    return torch.where(finite, torch.where(dead.all(1), 0.0, score), torch.nan)


def mutual_information_gap(codes: Tensor, factors: Tensor) -> Tensor:
    """MIG of Chen et al. (2018), equation 6, on codes in 20 bins of equal width.

    The mean over factors of the difference between the two dimensions that tell most about it,
    divided by the entropy of the factor. One dimension has the gap to 0. ValueError for a factor
    with one value only, whose entropy is 0.
    """
    safe, finite = _finite(codes)
    bins = _binned(safe)
    gaps = []
    for values in factors.to(codes.device).unbind(1):
        information, entropy = _mutual_information(bins, values)
        if entropy <= 0:
            raise ValueError("a factor has one value only: its entropy is 0")
        best = torch.cat([information, torch.zeros_like(information[:, :1])], 1).topk(2, dim=1)
        gaps.append((best.values[:, 0] - best.values[:, 1]) / entropy)
    return torch.where(finite, torch.stack(gaps).mean(0), torch.nan)


def _finite(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes with 0 for a run that is not finite, and which are, bool [R]."""
    finite = codes.isfinite().flatten(1).all(dim=1)
    return torch.where(finite[:, None, None], codes, 0.0), finite


def _pairs(
    factors: Tensor, kind: Tensor, num_pairs: int, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images [votes, num_pairs] and their partners, which share factor ``kind`` [votes]."""
    first = torch.randint(len(factors), (len(kind), num_pairs), generator=stream)
    kinds = kind.repeat_interleave(num_pairs)
    second = _alike(factors, kinds, first.flatten(), 1, stream)
    return first, second.view_as(first)


def _alike(
    factors: Tensor, kind: Tensor, anchor: Tensor, num_images: int, stream: torch.Generator
) -> Tensor:
    """Images [N, num_images] that have the same value of factor ``kind`` [N] as ``anchor`` [N].

    Drawn with replacement among all that have it.
    """
    order = factors.argsort(dim=0, stable=True)
    ordered = factors.gather(0, order).T.contiguous()
    value = factors[anchor, kind]
    begin, end = torch.empty_like(value), torch.empty_like(value)
    for factor in range(factors.shape[1]):
        mine = kind == factor
        begin[mine] = torch.searchsorted(ordered[factor], value[mine])
        end[mine] = torch.searchsorted(ordered[factor], value[mine], right=True)
    share = torch.rand(len(kind), num_images, generator=stream, dtype=torch.float64)
    place = begin[:, None] + (share * (end - begin)[:, None]).long()
    return order[place, kind[:, None]]


def _binned(codes: Tensor) -> Tensor:
    """The bin of every code between the least and the largest of its dimension, int64."""
    low, high = codes.amin(1, keepdim=True).double(), codes.amax(1, keepdim=True).double()
    width = (high - low).clamp_min(1e-300) / _NUM_BINS
    return ((codes.double() - low) / width).long().clamp(0, _NUM_BINS - 1)


def _mutual_information(bins: Tensor, values: Tensor) -> tuple[Tensor, float]:
    """I(bin of the dimension; value of the factor) in nats, [R, L], and the factor's entropy."""
    num_runs, count, num_dims = bins.shape
    num_values = int(values.max()) + 1
    cell = (bins * num_values + values[None, :, None]).mT
    joint = torch.zeros(
        num_runs, num_dims, _NUM_BINS * num_values, dtype=torch.float64, device=bins.device
    )
    joint = joint.scatter_add(2, cell, torch.ones_like(cell, dtype=torch.float64)) / count
    joint = joint.view(num_runs, num_dims, _NUM_BINS, num_values)
    of_bin, of_value = joint.sum(3, keepdim=True), joint.sum(2, keepdim=True)
    information = torch.xlogy(joint, joint / (of_bin * of_value).clamp_min(1e-300)).sum((2, 3))
    return information, float(-torch.xlogy(of_value, of_value)[0, 0].sum())
