"""What devices do to each other: they wait for the slowest, and they share what one has alone.

Synchronous reinforcement learning waits for the longest episode, and a gang for its slowest rank.
Times are taken as independent and normal around their mean, with a relative spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.plan.origin import Figure

_LIMIT = 9.0
_POINTS = 1801


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """Devices that slow each other by sharing something, as cores share memory and caches.

    ``factor``: how much longer each takes when ``num_devices`` of them are at work, measured
    without communication. In between it is taken to grow evenly.
    """

    factor: Figure[float]
    num_devices: int

    def at(self, num_devices: int) -> float:
        """The factor of ``num_devices``; 1 for one."""
        return 1.0 + (self.factor.value - 1.0) * (num_devices - 1) / (self.num_devices - 1)


def expected_largest(count: int) -> float:
    """The expected largest of ``count`` standard normal values, in standard deviations.

    The integral of x n φ(x) Φ(x)^(n-1) by Simpson's rule; 1/√π for two. David & Nagaraja 2003,
    "Order Statistics", table of expected values.

    >>> round(expected_largest(1), 6) + 0.0, round(expected_largest(2), 4)
    (0.0, 0.5642)
    """
    step = 2 * _LIMIT / (_POINTS - 1)
    total = 0.0
    for index in range(_POINTS):
        x = -_LIMIT + index * step
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        below = 0.5 * math.erfc(-x / math.sqrt(2))
        weight = 1 if index in (0, _POINTS - 1) else 4 if index % 2 else 2
        total += weight * x * count * density * below ** (count - 1)
    return max(0.0, total * step / 3)


def straggler_factor(count: int, spread: float) -> float:
    """How much longer the slowest of ``count`` takes than the mean, as a factor of at least 1.

    ``spread``: standard deviation over mean of one device's time.
    """
    return 1.0 + spread * expected_largest(count)
