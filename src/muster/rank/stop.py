"""When a rank is asked to stop, by a signal, and to save, by the clock or the step.

Both only set a flag here. The ranks agree on the step at which they stop or save together; a second
signal ends a rank at once. USR1 only warns: it is neither the first of two nor the second.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Self

from muster.base.signals import ENDING, WARNING, handled

#: A batch system signals all processes, and the launcher passes the same signal on.
_ECHO_S = 3.0


class StopFlag:
    """A context: inside it SIGTERM, SIGUSR1, SIGINT and SIGHUP ask for a stop at the next step.

    So does ``is_cancelled``, which is asked at every step.
    """

    def __init__(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self.name = ""
        self._is_set = False
        self._is_cancelled = is_cancelled
        self._ending_since_s: float | None = None
        self._context = ExitStack()

    def __enter__(self) -> Self:
        # TERM and USR1 come from our launcher, whatever its own caller has ignored.
        taken = handled(ENDING, self._on_signal, always=("SIGTERM", WARNING))
        self._context.enter_context(taken)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    @property
    def is_set(self) -> bool:
        if not self._is_set and self._is_cancelled():
            self._is_set, self.name, self._ending_since_s = True, "muster cancel", 0.0
        return self._is_set

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != getattr(signal, WARNING, None):
            now_s = time.monotonic()
            if self._ending_since_s is None:
                self._ending_since_s = now_s
            elif now_s - self._ending_since_s > _ECHO_S:
                os._exit(128 + number)
        if not self._is_set:
            self._is_set, self.name = True, signal.Signals(number).name


class Interval:
    """When a checkpoint is due: every so many seconds (as rank 0 counts) or steps."""

    def __init__(self, *, seconds: float | None, steps: int | None, is_first: bool) -> None:
        self._seconds = seconds if is_first else None
        self._steps = steps
        self._due_s = math.inf if self._seconds is None else time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """Whether the time has come; it is only ever true on rank 0, whose clock counts for all."""
        return time.monotonic() >= self._due_s

    def is_due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def done(self) -> None:
        if self._seconds is not None:
            self._due_s = time.monotonic() + self._seconds
