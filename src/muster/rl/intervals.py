"""Confidence intervals of a mean or a median of few episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from muster.base.errors import UsageError
from muster.rl import streams

_RESAMPLES = 2000


class Interval(NamedTuple):
    """A middle (mean or median) of ``num`` values and its confidence interval."""

    middle: float
    low: float
    high: float
    num: int

    def record(self) -> dict[str, float | int | None]:
        """As JSON values: an infinite end, which JSON does not know, is None."""
        ends = {
            name: value if math.isfinite(value) else None
            for name, value in (("low", self.low), ("high", self.high))
        }
        return {"middle": self.middle, **ends, "num": self.num}


def interval(
    values: Sequence[float] | torch.Tensor,
    confidence: float = 0.95,
    *,
    low: float = -math.inf,
    high: float = math.inf,
) -> Interval:
    """The mean with Student's t-interval: mean ± t x s / sqrt(n), n - 1 degrees of freedom.

    The interval of one value is infinite, because it tells nothing about its spread. Values that
    always lie between ``low`` and ``high`` get an interval that does: between two bounds Wilson's
    (1927) with the number of yes-or-no trials that would have the variance found (Korn and Graubard
    1998); with one bound the t-interval ends there, which loses no coverage.
    """
    sample = _checked(values, confidence)
    mean, num = float(sample.mean()), len(sample)
    if num == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    error = float(sample.std(correction=1)) / math.sqrt(num)
    quantile = student_quantile(confidence, num - 1)
    if math.isfinite(low) and math.isfinite(high):
        return Interval(mean, *_wilson(mean, error, quantile, num, low, high), num)
    half = quantile * error
    return Interval(mean, max(low, mean - half), min(high, mean + half), num)


def _wilson(
    mean: float, error: float, quantile: float, num: int, low: float, high: float
) -> tuple[float, float]:
    """Both ends of Wilson's interval, on the scale from ``low`` to ``high``."""
    width = high - low
    share, spread = (mean - low) / width, error / width
    trials = share * (1 - share) / spread**2 if spread > 0 else math.inf
    if share in (0.0, 1.0) or not math.isfinite(trials):
        if 0 < share < 1:  # all values are the same one
            return mean, mean
        trials = float(num)
    z2 = quantile**2 / trials
    middle = (share + z2 / 2) / (1 + z2)
    half = quantile / (1 + z2) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    ends = max(0.0, middle - half), min(1.0, middle + half)
    return low + width * min(share, ends[0]), low + width * max(share, ends[1])


def median_interval(
    values: Sequence[float] | torch.Tensor, confidence: float = 0.95, *, seed: int = 0
) -> Interval:
    """The median with a bootstrap percentile interval (Efron 1979) of 2,000 resamples, drawn
    by counters from ``seed``. One value: as in ``interval``.
    """
    sample = _checked(values, confidence)
    median = float(sample.quantile(0.5))
    if len(sample) == 1:
        return Interval(median, -math.inf, math.inf, 1)
    which = torch.arange(_RESAMPLES)
    drawn = streams.uniform(seed, streams.EVALUATION, which, 0, len(sample))
    medians = sample[(drawn * len(sample)).long()].quantile(0.5, dim=1)
    tail = (1 - confidence) / 2
    low, high = (float(medians.quantile(share)) for share in (tail, 1 - tail))
    return Interval(median, low, high, len(sample))


@cache
def student_quantile(confidence: float, degrees: int) -> float:
    """t such that P(\\|T\\| <= t) = ``confidence`` for Student's distribution."""
    low, high = 0.0, 1.0
    while student_within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if student_within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_within(t: float, degrees: int) -> float:
    """P(\\|T\\| <= t) for a whole number of degrees of freedom (Abramowitz and Stegun 1964,
    equations 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, cosine) if is_odd else (1.0, 1.0)
    if degrees == 1:
        total = 0.0
    first = 2 if is_odd else 1
    for factor in range(first, degrees - 2, 2):
        term *= factor / (factor + 1) * cosine * cosine
        total += term
    return (angle + sine * total) * 2 / math.pi if is_odd else sine * total


def _checked(values: Sequence[float] | torch.Tensor, confidence: float) -> torch.Tensor:
    sample = torch.as_tensor(values, dtype=torch.float64).flatten().cpu()
    if not len(sample):
        raise UsageError("There is no episode to take the mean of.")
    if not 0 < confidence < 1:
        raise UsageError(f"A confidence of {confidence} is not between 0 and 1.")
    return sample
