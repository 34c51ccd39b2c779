"""Guess & Check: draw students at random, keep the losses of those that fit.

A student of width d has a_1..a_d i.i.d. N(0, 1/d). Its error on lag m = 1..K is
S_m = sum_j a_j^m - h_m, its training loss L_train = mean_n (w_n . S)^2, its generalisation loss
L_gen = |S|^2 (a sum, not a mean). It is accepted iff L_train < eps, strictly.

Both devices draw students by *pairs* of entries (x, y), as Box and Muller do, but never compute x
and y. With r^2 = x^2 + y^2 exponential and the angle uniform and independent of it,

    p_1 = x + y = sqrt(2) r sin(phi),   phi uniform,       p_2 = x^2 + y^2 = r^2,
    e = x y = (p_1^2 - p_2) / 2,                           p_m = p_1 p_(m-1) - e p_(m-2)

(Newton's identities for two variables) gives every power sum of the pair from one logarithm, one
root and one sine. Half a turn of phi suffices: phi and pi - phi are (x, y) and (y, x), which have
the same powers. An entry without a partner (odd d) is r sin(phi) itself, for which p_2 = p_1^2
and e = 0.

A cell of 1e10 samples is split in blocks that run anywhere and in any order. Each hands back count,
mean and spread of a loss (``Moments``), which merge without loss of accuracy: counts exactly, means
and sums of squared deviations by the formula of Chan, Golub and LeVeque (1979), which does not
cancel as a sum of squares minus a squared sum does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of ``count`` values. ``mean`` and ``m2`` mean nothing while ``count`` is 0.

    ``m2`` is the sum of squared deviations from the mean (not divided by anything). Merging is
    commutative and associative up to float64 rounding, not bit for bit: merge in a fixed order
    where equal bits matter.
    """

    count: int
    mean: float
    m2: float

    @staticmethod
    def none() -> Moments:
        """Moments of no value at all: the neutral element of `merge`."""
        return Moments(count=0, mean=0.0, m2=0.0)

    @staticmethod
    def of(values: Any) -> Moments:
        """Moments of a list or an array [n], in float64 and by two passes."""
        import numpy as np  # on use: the process that plans and summarises does without it

        values = np.asarray(values, dtype=np.float64)
        if not values.size:
            return Moments.none()
        mean = float(values.mean())
        return Moments(int(values.size), mean, float(np.square(values - mean).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of the values of both."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta * delta * (self.count * (other.count / count))
        return Moments(count, mean, m2)

    @property
    def value(self) -> float | None:
        """The mean, or None where there is nothing to average (never 0)."""
        return self.mean if self.count > 0 else None

    @property
    def variance(self) -> float | None:
        """The unbiased sample variance, or None below two values."""
        return self.m2 / (self.count - 1) if self.count >= 2 else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean of independent values, or None below two values."""
        variance = self.variance
        return None if variance is None else math.sqrt(variance / self.count)


@dataclass(frozen=True, kw_only=True)
class Block:
    """``num_samples`` students of width ``dim``, and the data of their losses.

    ``h`` has K entries, the impulse response of the teacher on lags 1..K; ``w`` has N >= 1 rows of
    K entries, the training sequences; ``seed`` is in ``[0, 2**64)`` and names the stream (see
    `muster_recipes.ssm.problem`). ``SsmConfig`` has refused what would mean nothing.
    """

    h: Sequence[float]
    w: Sequence[Sequence[float]]
    dim: int
    num_samples: int
    seed: int
    eps: float


class BlockResult(NamedTuple):
    """Moments of L_gen over the accepted students and over all that were drawn."""

    accepted: Moments
    all: Moments


def sample_blocks(blocks: Sequence[Block], device: str) -> list[BlockResult]:
    """Draw the students of every block and return the moments of their L_gen.

    ``device`` is ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``. A CUDA device gets the work of all
    blocks before the first result is waited for; a block's result does not depend on the others.

    The same block has the same students on every device of one type. The students differ between
    the two types and between values of ``num_samples``; the last bits of a loss may differ between
    processors with other vector instructions.
    """
    # Each device's module is imported on use: numpy serves the one, torch and Triton the other.
    if device == "cpu":
        from muster_recipes.ssm.sampler_cpu import sample_block_cpu

        return [sample_block_cpu(block) for block in blocks]
    from muster_recipes.ssm.sampler_cuda import sample_blocks_cuda

    return sample_blocks_cuda(blocks, device)
