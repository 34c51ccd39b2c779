"""How many tasks a worker is given ahead, from how long tasks have taken. Pure."""

from __future__ import annotations

import math

#: From this length on a task hides its own commit, and handing out ahead would cost balance.
_LONG_S = 1.0
_WEIGHT = 0.1


class Pace:
    """An exponential mean of task lengths per target, and the lead that follows from it."""

    def __init__(self, lead_s: float, max_lead: int) -> None:
        self._lead_s = lead_s
        self._max_lead = max_lead
        self._mean_s: dict[int, float] = {}

    def learn(self, target_id: int, seconds: float) -> None:
        mean = self._mean_s.get(target_id)
        self._mean_s[target_id] = seconds if mean is None else mean + _WEIGHT * (seconds - mean)

    def lead(self, target_id: int) -> int:
        """Tasks kept in a worker: one when unknown or long, enough to hide a commit when short."""
        mean = self._mean_s.get(target_id)
        if mean is None or mean >= _LONG_S:
            return 1
        return min(self._max_lead, max(2, math.ceil(self._lead_s / max(mean, 1e-6))))

    def longest_lead(self) -> int:
        """The largest lead of any target seen so far."""
        return max((self.lead(target_id) for target_id in self._mean_s), default=1)
