"""Count, mean and spread of a loss, in a form that merges without loss of accuracy.

A cell of 1e10 samples is split in blocks that run anywhere and in any order; each hands back one of
these. Counts merge exactly. Means and sums of squared deviations merge by the formula of Chan,
Golub and LeVeque (1979), which does not cancel as a sum of squares minus a squared sum does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(
                f"Moments of {self.count} values: a count is never negative. "
                "Hint: Moments.none() is the start of a merge."
            )

    @staticmethod
    def none() -> Moments:
        """Moments of no value at all: the neutral element of `merge`."""
        return Moments(count=0, mean=0.0, m2=0.0)

    @staticmethod
    def of(values: Sequence[float]) -> Moments:
        """Moments of ``values`` by two passes with exactly rounded sums."""
        count = len(values)
        if count == 0:
            return Moments.none()
        mean = math.fsum(values) / count
        return Moments(count, mean, math.fsum((value - mean) ** 2 for value in values))

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
