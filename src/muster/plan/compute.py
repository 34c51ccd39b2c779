"""How long one device computes: from what was measured at some batches, or from FLOPs and a peak.

The model of a forward and backward is a line: ``fixed + samples x per_sample``. The fixed part is
what a step costs whatever its batch is (starting kernels, the optimizer, Python); it is why the
same global batch on more devices does not divide the time by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muster.plan.origin import Figure, weakest
from muster.plan.units import Flops, FlopsPerSecond, Seconds


class Timing(NamedTuple):
    """A measured forward and backward with its update: ``samples`` in it, and its time."""

    samples: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """``fixed``: of every forward and backward; ``per_sample``: on top, for each sample."""

    fixed: Figure[Seconds]
    per_sample: Figure[Seconds]

    def of(self, samples: int, micro_batch: int | None = None) -> Figure[Seconds]:
        """One optimizer step of ``samples``, in rounds of at most ``micro_batch``."""
        rounds = 1 if micro_batch is None else max(1, -(-samples // micro_batch))
        seconds = self.fixed.value * rounds + self.per_sample.value * samples
        return Figure(value=seconds, origin=weakest([self.fixed, self.per_sample]))

    def scaled(self, factor: Figure[float]) -> ComputeTime:
        """The same work on a device that takes ``factor`` times as long for every sample.

        The fixed part is the host's and stays as it is.
        """
        seconds = self.per_sample.value * factor.value
        origin = weakest([self.per_sample, factor])
        source = f"{self.per_sample.source} x {factor.value:.3g} ({factor.source})"
        return ComputeTime(
            fixed=self.fixed,
            per_sample=Figure(value=seconds, origin=origin, source=source),
        )


def from_timings(timings: Sequence[Timing], source: str) -> ComputeTime:
    """The line through the smallest and the largest batch; with one batch, one through zero.

    Noise can make either part negative. A negative fixed part is taken as none; where more samples
    took no more time, the larger batch counts alone. ``timings`` must not be empty.
    """
    small, large = min(timings), max(timings)
    per_sample = large.seconds / large.samples
    fixed = Seconds(0.0)
    if large.samples > small.samples:
        slope = (large.seconds - small.seconds) / (large.samples - small.samples)
        rest = small.seconds - slope * small.samples
        if slope > Seconds(0.0) and rest >= Seconds(0.0):
            per_sample, fixed = slope, rest
    return ComputeTime(
        fixed=Figure(value=fixed, origin="measured", source=source),
        per_sample=Figure(value=per_sample, origin="measured", source=source),
    )


def from_flops(
    per_sample: Figure[Flops], peak: Figure[FlopsPerSecond], utilisation: Figure[float]
) -> ComputeTime:
    """FLOPs of forward and backward / (peak x utilisation); nothing is known of a fixed part.

    ``utilisation`` is the MFU of Chowdhery et al. 2022 ("PaLM", appendix B).
    """
    seconds = per_sample.value / (peak.value * utilisation.value)
    source = (
        f"{per_sample.value} / ({peak.value} x {utilisation.value:g} utilisation), {peak.source}"
    )
    return ComputeTime(
        fixed=Figure(value=Seconds(0.0), origin="assumed", source="not known without measuring"),
        per_sample=Figure(
            value=seconds, origin=weakest([per_sample, peak, utilisation]), source=source
        ),
    )
