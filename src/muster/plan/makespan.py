"""How long a sweep or a map takes on m workers, from the times of its tasks.

Workers take the next task whenever they are free, which is list scheduling: at most 2 - 1/m times
the best schedule (Graham 1966). Longest first is at most 4/3 - 1/(3m) times it (Graham 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from muster.plan.units import Seconds


@dataclass(frozen=True, kw_only=True)
class Makespan:
    """``in_order``: as muster hands tasks out; ``longest_first``: with the times known before;
    ``least``: no schedule can be shorter. ``efficiency``: share of the workers' time in tasks.
    """

    num_workers: int
    in_order: Seconds
    longest_first: Seconds
    least: Seconds
    speed_up: float
    efficiency: float


def makespans(times: Sequence[Seconds], worker_counts: Sequence[int]) -> tuple[Makespan, ...]:
    """One makespan for each number of workers; ``times`` in the order of the plan."""
    total = sum(times, Seconds(0.0))
    found = []
    for count in worker_counts:
        taken = list_schedule(times, count)
        speed_up = total / taken if taken > Seconds(0.0) else 1.0
        found.append(
            Makespan(
                num_workers=count,
                in_order=taken,
                longest_first=list_schedule(sorted(times, reverse=True), count),
                least=least_makespan(times, count),
                speed_up=speed_up,
                efficiency=speed_up / count,
            )
        )
    return tuple(found)


def list_schedule(times: Sequence[Seconds], num_workers: int) -> Seconds:
    """When the last task ends, if each goes to the worker that is free first; O(n log m)."""
    free = [0.0] * min(num_workers, max(1, len(times)))
    for time in times:
        heapq.heapreplace(free, free[0] + time.value)
    return Seconds(max(free))


def least_makespan(times: Sequence[Seconds], num_workers: int) -> Seconds:
    """The work shared perfectly, or the longest task, whichever is more."""
    total = sum(times, Seconds(0.0))
    return max(total / num_workers, max(times, default=Seconds(0.0)))
