"""When samples are taken: at start + n × interval, however long each one takes."""

from __future__ import annotations

import math

from muster.base.errors import UsageError

#: Below this the monitor itself would be what is measured.
LEAST_INTERVAL_S = 0.05


class Ticker:
    """Pure: it is told the time. Nothing adds up, because each due time comes from the start.

    A sample that comes late does not shift those after it, and those that were missed (a slow
    disk, a laptop asleep) are skipped rather than made up for.
    """

    def __init__(self, interval_s: float, start_s: float) -> None:
        self._interval_s = interval_s
        self._start_s = start_s
        self._number = 0
        self.missed = 0

    @property
    def due_s(self) -> float:
        """When the next sample is due, on the clock of ``start_s``."""
        return self._start_s + self._number * self._interval_s

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.due_s - now_s)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.due_s

    def taken(self, now_s: float) -> None:
        """The sample that was due has been taken; the next is the first one after ``now_s``."""
        following = math.floor((now_s - self._start_s) / self._interval_s) + 1
        # Rounding may give the number that has just been served, or one whose time has come.
        while self._start_s + following * self._interval_s <= now_s:
            following += 1
        following = max(following, self._number + 1)
        self.missed += following - self._number - 1
        self._number = following


def check_interval(interval_s: float, flag: str, *, may_be_0: bool = False) -> None:
    """UsageError, naming ``flag``, for an interval that is too short; 0 may stand for never."""
    if interval_s >= LEAST_INTERVAL_S or (may_be_0 and interval_s == 0):
        return
    never = ", or 0 to record nothing" if may_be_0 else ""
    raise UsageError(
        f"{flag} {interval_s:g} is too short.", hint=f"write {LEAST_INTERVAL_S} or more{never}."
    )
