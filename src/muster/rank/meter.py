"""Where the time of a step goes: samples/s, waiting for data, waiting for other ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Tally:
    """Sums since ``start``: seconds, samples and steps."""

    seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    data_wait_s: float = 0.0
    communication_s: float = 0.0
    checkpoint_s: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.seconds if self.seconds > 0 else None

    def share(self, seconds: float) -> float | None:
        return seconds / self.seconds if self.seconds > 0 else None


class Meter:
    """Measures whole steps; what is not a step (evaluation, start-up) is not counted.

    ``total`` leaves out the first ``warmup`` steps, which compile, allocate and connect.
    """

    def __init__(self, warmup: int = 3) -> None:
        self.total = Tally()
        self.recent = Tally()
        self.step = Tally()
        self._warmup = warmup
        self._seen = 0
        self._began = 0.0

    def begin_step(self) -> None:
        step = self.step
        step.data_wait_s = step.communication_s = 0.0
        self._began = time.perf_counter()

    def end_step(self, samples: int) -> None:
        step = self.step
        step.seconds = time.perf_counter() - self._began
        step.samples = samples
        self._seen += 1
        if self._seen <= self._warmup:
            return
        for tally in (self.total, self.recent):
            tally.seconds += step.seconds
            tally.samples += samples
            tally.steps += 1
            tally.data_wait_s += step.data_wait_s
            tally.communication_s += step.communication_s

    def add_checkpoint(self, seconds: float) -> None:
        """A save between two steps, as far as training has waited for it."""
        for tally in (self.total, self.recent):
            tally.seconds += seconds
            tally.checkpoint_s += seconds

    def take_recent(self) -> Tally:
        """What has been added since this was last asked."""
        recent, self.recent = self.recent, Tally()
        return recent
