"""The two clocks, for durations and for dates, and how often to look for something new."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds that only grow; durations and deadlines are differences of this."""

    def wall_s(self) -> float:
        """Seconds since the epoch; for people and records, never for durations."""


@dataclass(frozen=True)
class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class Rhythm:
    """When to look again: often while things happen, less often the longer nothing does.

    The wait is at most ``share`` of the silence so far: a twentieth delays what takes long by
    5 %.
    """

    def __init__(
        self, now: float, *, least_s: float = 0.004, most_s: float = 1.0, share: float = 0.05
    ) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._share = share
        self._since = now
        self.due_s = now

    def happened(self, now: float) -> None:
        self._since = now
        self.due_s = min(self.due_s, now + self._least_s)

    def looked(self, now: float) -> None:
        silence_s = now - self._since
        self.due_s = now + min(self._most_s, max(self._least_s, silence_s * self._share))


def iso_utc(wall_s: float) -> str:
    """``2026-01-31T09:05:00+00:00`` for a time in seconds since the epoch."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds")


def human_duration(seconds: float) -> str:
    """``12.3 s``, ``4 min 05 s``, ``3 h 07 min``, ``2 d 04 h``: two units at most."""
    if seconds < 0:
        seconds = 0.0
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = round(seconds)
    minutes, second = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {second:02d} s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minute:02d} min"
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02d} h"
