"""Random numbers as functions of counters, on any device, without a generator to keep.

A number depends on (seed, purpose, index, counter, place) and on nothing else: not on how many
environments share a call, nor on the device. So two ranks with n environments each draw what one
rank with 2n draws, and a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muster.rank.seeding import mix

#: Purposes, so that two users of one seed never share a stream.
ACTION, EPISODE, DYNAMICS, MINIBATCH, EVALUATION = 1, 2, 3, 4, 5

_M1, _M2 = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)


def bits(seed: int, purpose: int, index: Tensor, counter: Tensor | int, num: int) -> Tensor:
    """53 random bits as int64 [*index.shape, num], by splitmix64 (Steele et al. 2014).

    ``index`` int64: which environment; ``counter`` (a number, or like ``index``): which draw.
    """
    base = mix(seed, purpose)
    state = _mixed(index + (base - (1 << 62)))
    state = _mixed(state + counter)
    places = torch.arange(num, device=index.device, dtype=torch.int64) * _GAMMA
    return _shifted(_mixed(state.unsqueeze(-1) + places), 11)


def uniform(seed: int, purpose: int, index: Tensor, counter: Tensor | int, num: int = 1) -> Tensor:
    """Float64 in [0, 1), [*index.shape, num]."""
    return bits(seed, purpose, index, counter, num).to(torch.float64) * 2.0**-53


def normal(seed: int, purpose: int, index: Tensor, counter: Tensor | int, num: int = 1) -> Tensor:
    """Standard normal float64, [*index.shape, num] (Box and Muller 1958)."""
    half = (num + 1) // 2
    u = uniform(seed, purpose, index, counter, 2 * half)
    radius = torch.sqrt(-2.0 * torch.log1p(-u[..., :half]))
    angle = 2.0 * math.pi * u[..., half:]
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return both[..., :num]


def integers(
    seed: int, purpose: int, index: Tensor, counter: Tensor | int, below: Tensor | int
) -> Tensor:
    """Int64 in [0, below), like ``index``; ``below`` far under 2^53."""
    drawn = uniform(seed, purpose, index, counter).squeeze(-1)
    return (drawn * below).to(torch.int64)


def _mixed(state: Tensor) -> Tensor:
    state = state + _GAMMA
    state = (state ^ _shifted(state, 30)) * _M1
    state = (state ^ _shifted(state, 27)) * _M2
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (state >> by) & ((1 << (64 - by)) - 1)
