"""Random numbers that are a function of what they are for, on every device alike.

A counter-based generator: number k of key s is SplitMix64's k-th output from the state s (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators"). So the noise of a run does not
depend on which runs it is trained with, and that of an image not on its batch, rank or device
(the last bits of logarithm and cosine aside); and many runs are drawn by one set of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muster_recipes.ssvae.config import Hyper

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LOW = 2**32 - 1
_UNIT = 2.0**-32


class Noise(NamedTuple):
    """``eps``: standard normal [R, B, S, L]; ``gumbel``: standard Gumbel [R, B, S, C], or None
    where the class is not sampled.

    One ``eps`` serves all ten classes of an image: it costs a tenth, each class still has an
    unbiased bound, and the common numbers cancel in the differences between classes, which are
    what teaches the classifier.
    """

    eps: Tensor
    gumbel: Tensor | None


def step_noise(
    hyper: Hyper, seeds: Sequence[int] | Tensor, step: int, batch: int, device: torch.device | str
) -> Noise:
    """The noise of one optimizer step; run r's is a function of (``seeds[r]``, ``step``) only."""
    return noise_of(hyper, step_keys(seeds, step, batch, device))


def step_keys(
    seeds: Sequence[int] | Tensor, step: int, batch: int, device: torch.device | str
) -> Tensor:
    """int64 [R, B]: a key for every image of a step."""
    states = torch.as_tensor(seeds, dtype=torch.int64, device=device)
    per_run = mixed(mixed(states) + _wrapped((step + 1) * _GAMMA))
    return hashes(per_run, batch)


def noise_of(hyper: Hyper, keys: Tensor) -> Noise:
    """float32 noise of images with ``keys`` int64 [R, B] (or [B]), one stream per key."""
    styles = (hyper.num_samples, hyper.num_style)
    eps = normals(keys, math.prod(styles)).view(*keys.shape, *styles)
    if hyper.unlabelled == "exact":
        return Noise(eps, None)
    shape = (hyper.num_samples, hyper.num_classes)
    # A stream of its own, apart from that of eps.
    uniform = uniforms(mixed(~keys), math.prod(shape)).view(*keys.shape, *shape)
    return Noise(eps, -torch.log(-torch.log(uniform)))


def normals(keys: Tensor, count: int) -> Tensor:
    """``count`` standard normals of each key [...], float32 [..., count], by Box and Muller.

    None is beyond 6.8 in size.
    """
    bits = hashes(keys, (count + 1) // 2)
    radius = _open_unit(bits & _LOW).log_().mul_(-2).sqrt_()
    angle = _open_unit((bits >> 32) & _LOW).mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def uniforms(keys: Tensor, count: int) -> Tensor:
    """``count`` numbers of each key [...] above 0 and below 1, float32 [..., count]."""
    # 23 bits and a half: exact in float32, so that none is rounded to 1.
    return ((hashes(keys, count) >> 41) & (2**23 - 1)).float().add_(0.5).mul_(2.0**-23)


def hashes(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` outputs of SplitMix64 from each state in ``keys``: int64 [..., count]."""
    counter = torch.arange(1, count + 1, device=keys.device)
    return mixed(keys.unsqueeze(-1) + counter * _GAMMA)


def mixed(state: Tensor) -> Tensor:
    """SplitMix64's output function of int64 ``state``, which wraps around as uint64 would."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * multiplier
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros; torch's own repeats the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(number: int) -> int:
    """``number`` modulo 2**64, as int64 writes it."""
    return (number + 2**63) % 2**64 - 2**63


def _open_unit(words: Tensor) -> Tensor:
    """Words of 32 bits to float32 above 0; the largest are rounded to 1."""
    return words.float().add_(0.5).mul_(_UNIT)
