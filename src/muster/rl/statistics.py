"""Running mean and variance of observations and returns, merged over ranks by adding sums; and
confidence intervals of a mean or a median of few episodes.

The protocol of ``Normaliser`` and ``ReturnScale``: every rank computes ``deltas`` of what it has
seen since the last update, the vectors are added over all ranks (one all-reduce), and every rank
``absorb``s the same total. Sums are taken about the running mean, which all ranks share, so that a
large mean does not eat the digits of a small variance (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from muster.base.errors import UsageError
from muster.rl import streams

#: A standard deviation up to this share of the mean, or this small, is rounding and counts as 0.
_RELATIVE_FLOOR, _ABSOLUTE_FLOOR = 1e-12, 1e-10


class Moments(nn.Module):
    """Count, mean and sum of squared deviations of rows of one shape, in float64.

    ``mean`` while ``count`` is 0 is the point about which the first sums are taken.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))

    @property
    def num_deltas(self) -> int:
        return 1 + 2 * self.mean.numel()

    def deltas(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Count, sum and sum of squares of (row - mean) over valid rows, in one float64 vector."""
        if rows.shape[1:] != self.shape or rows.shape[:1] != valid.shape:
            raise ValueError(
                f"rows {list(rows.shape)} with valid {list(valid.shape)} do not fit entries of "
                f"shape {list(self.shape)}: expected [rows, *shape] and [rows]."
            )
        chosen = valid.view(-1, *[1] * len(self.shape))
        apart = torch.where(chosen, rows.detach().to(torch.float64) - self.mean, 0.0)
        count = valid.sum(dtype=torch.float64).view(1)
        return torch.cat([count, apart.sum(0).view(-1), apart.square().sum(0).view(-1)])

    def centre(self, total: Tensor) -> None:
        """Only move the point about which the first sums are taken to the mean of ``total``."""
        count, sums, _ = self._parts(total)
        self.mean.add_(torch.where(self.count == 0, sums / count.clamp(min=1), 0.0))

    def absorb(self, total: Tensor) -> None:
        """Merge sums about the running mean into it (in place: a CUDA graph sees it)."""
        count, sums, squares = self._parts(total)
        self.count.add_(count)
        shift = sums / self.count.clamp(min=1)
        self.mean.add_(shift)
        self.squares.add_(squares - sums * shift).clamp_(min=0)

    def std(self) -> Tensor:
        """Standard deviation over all rows; 1 where they have not differed."""
        std = (self.squares / self.count.clamp(min=1)).sqrt()
        is_constant = std <= _RELATIVE_FLOOR * self.mean.abs() + _ABSOLUTE_FLOOR
        return torch.where(is_constant, 1.0, std)

    def _parts(self, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums, squares = total[1:].view(2, *self.shape)
        return total[0], sums, squares


class _Entry(Moments):
    """Moments of one entry, and what normalising takes of them: computed when they change and not
    at every step.
    """

    shift: Tensor
    factor: Tensor
    limit: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        starts = {"shift": (0.0, shape), "factor": (1.0, shape), "limit": (math.inf, ())}
        for name, (start, size) in starts.items():
            values = torch.full(size, start, dtype=torch.float64)
            self.register_buffer(name, values, persistent=False)

    def renew(self, clip: float) -> None:
        """Follow the moments (in place: a CUDA graph sees it)."""
        is_known = self.count > 0
        self.shift.copy_(torch.where(is_known, self.mean, 0.0))
        self.factor.copy_(torch.where(is_known, 1 / self.std(), 1.0))
        self.limit.copy_(torch.where(is_known, clip, torch.inf))

    def forward(self, values: Tensor) -> Tensor:
        # At least float32, but not float64 for float32: this runs at every step.
        dtype = torch.promote_types(values.dtype, torch.float32)
        limit = self.limit.to(dtype)
        scaled = (values.to(dtype) - self.shift.to(dtype)) * self.factor.to(dtype)
        return scaled.clamp(-limit, limit).to(values.dtype)


class Normaliser(nn.Module):
    """(x - mean) / standard deviation of every entry of an observation, clipped.

    It is the identity, without clipping, until something was absorbed or when not ``enabled``. It
    changes only in ``absorb``, which all ranks call with the same total. An element that has never
    differed is only centred.

    A value that is NaN or infinite (in a valid row) makes the deltas non-finite, on all ranks once
    they are added: check ``torch.isfinite(total).all()`` before ``absorb``, which would spoil the
    statistics for good. Called with such a value, the result is NaN or the clip.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], clip: float = 10.0, enabled: bool = True
    ) -> None:
        super().__init__()
        self.clip = clip
        self.enabled = enabled
        self._places = {name: place for place, name in enumerate(shapes)}
        self.moments = nn.ModuleList(_Entry(tuple(shape)) for shape in shapes.values())
        # Untyped in torch.
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def forward(self, name: str, values: Tensor) -> Tensor:
        """``values`` ``[..., *shape]`` normalised, in their dtype."""
        if not self.enabled:
            return values
        normalised: Tensor = self.moments[self._places[name]](values)
        return normalised

    def deltas(self, values: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """Sums of one rank, float64 [.].

        ``values`` are ``[rows, *shape]`` by name, ``valid`` is bool [rows]. Names that were not
        announced are left out; one that is missing is a KeyError.
        """
        entries = zip(self.names, self._entries, strict=True)
        return torch.cat([entry.deltas(values[name], valid) for name, entry in entries])

    def centre(self, total: Tensor) -> None:
        """Take the following sums about the mean of ``total``; call it before the first ``absorb``.

        Nothing is counted. Where a mean is more than about 10,000 standard deviations from 0, the
        variance of the first rows has few correct digits without it.
        """
        for entry, part in zip(self._entries, self._split(total), strict=True):
            entry.centre(part)

    def absorb(self, total: Tensor) -> None:
        """Merge the deltas of all ranks, added."""
        for entry, part in zip(self._entries, self._split(total), strict=True):
            entry.absorb(part)
        self.renew()

    def renew(self) -> None:
        """Use the statistics that have been read into the buffers from a checkpoint."""
        for entry in self._entries:
            entry.renew(self.clip)

    def _split(self, total: Tensor) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(total, [entry.num_deltas for entry in self._entries])

    @property
    def _entries(self) -> list[_Entry]:
        return cast(list[_Entry], list(self.moments))


class ReturnScale(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return.

    As in Engstrom et al. 2020 (arXiv 2005.12729): rewards are not centred, which would change what
    is best. Identity until returns that differ were absorbed. ``deltas`` takes what
    ``losses.discounted_running`` gives.
    """

    def __init__(self, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.moments = Moments(())

    def forward(self, rewards: Tensor) -> Tensor:
        """Scaled and clipped, in their dtype."""
        limit = torch.where(self.moments.count > 0, self.clip, torch.inf)
        scaled = rewards.to(torch.float64) / self.moments.std()
        return scaled.clamp(-limit, limit).to(rewards.dtype)

    def deltas(self, discounted: Tensor, valid: Tensor) -> Tensor:
        """Sums of one rank, float64 [3]; both arguments of any one shape."""
        return self.moments.deltas(discounted.reshape(-1), valid.reshape(-1))

    def absorb(self, total: Tensor) -> None:
        """Merge the deltas of all ranks, added."""
        self.moments.absorb(total)


def _after_loading(module: nn.Module, _: object) -> None:
    assert isinstance(module, Normaliser)
    module.renew()


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
