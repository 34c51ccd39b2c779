"""When a checkpoint is due."""

from __future__ import annotations

import math
import time


class Interval:
    """When a checkpoint is due: every so many seconds (as rank 0 counts) or steps."""

    def __init__(self, *, seconds: float | None, steps: int | None, is_first: bool) -> None:
        self._seconds = seconds if is_first else None
        self._steps = steps
        self._due_s = math.inf if self._seconds is None else time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """By the clock; only ever true on rank 0, whose clock counts for all."""
        return time.monotonic() >= self._due_s

    def is_due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def done(self) -> None:
        if self._seconds is not None:
            self._due_s = time.monotonic() + self._seconds
