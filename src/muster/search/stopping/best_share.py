"""The best share of a growing set of numbers, kept in O(log n) for each number that is added."""

from __future__ import annotations

import heapq
import math


class BestShare:
    """Numbers with their owners, of which the best ``n // eta`` (and ``at_least`` so many) are
    known at any time. A NaN is the worst; of equals the owner with the lower number is better.
    """

    def __init__(self, eta: int, *, maximize: bool, at_least: int = 0) -> None:
        self._eta, self._at_least = eta, at_least
        self._sign = -1.0 if maximize else 1.0
        self._top: list[tuple[float, int]] = []  # the worst of the best first, costs negated
        self._rest: list[tuple[float, int]] = []  # the best of the others first

    def __len__(self) -> int:
        return len(self._top) + len(self._rest)

    def add(self, value: float, owner: int) -> tuple[int, float] | None:
        """Add a number. Returns the owner that this brings among the best, with its number, or
        None. It is one at most, because the share grows by one at most; it may be the new one.
        """
        cost = math.inf if math.isnan(value) else self._sign * value
        room = max((len(self) + 1) // self._eta, min(self._at_least, len(self) + 1))
        if len(self._top) < room:
            cost, owner = heapq.heappushpop(self._rest, (cost, owner))
            heapq.heappush(self._top, (-cost, -owner))
            return owner, self._sign * cost
        if not room:
            heapq.heappush(self._rest, (cost, owner))
            return None
        worst = heapq.heappushpop(self._top, (-cost, -owner))
        heapq.heappush(self._rest, (-worst[0], -worst[1]))
        return None if -worst[1] == owner else (owner, self._sign * cost)

    def cutoff(self) -> float | None:
        """The worst number among the best, None where there is none."""
        return -self._sign * self._top[0][0] if self._top else None


class RunningMedian:
    """The median of a growing set, from two heaps (the mean of the middle two of an even one)."""

    def __init__(self) -> None:
        self._low: list[float] = []  # negated, the largest first
        self._high: list[float] = []

    def __len__(self) -> int:
        return len(self._low) + len(self._high)

    def add(self, value: float) -> None:
        heapq.heappush(self._high, -heapq.heappushpop(self._low, -value))
        if len(self._high) > len(self._low):
            heapq.heappush(self._low, -heapq.heappop(self._high))

    def median(self) -> float | None:
        if not self._low:
            return None
        if len(self._low) > len(self._high):
            return -self._low[0]
        return (self._high[0] - self._low[0]) / 2
