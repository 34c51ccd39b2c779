"""A picture of a running sweep, for a screen or a file, and when it will be done. Values only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class Interval(NamedTuple):
    low_s: float
    high_s: float


class Durations:
    """Mean and variance of task lengths, in constant memory (Welford), and the longest."""

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.longest_s = 0.0
        self._m2 = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        delta = seconds - self.mean_s
        self.mean_s += delta / self.count
        self._m2 += delta * (seconds - self.mean_s)
        self.longest_s = max(self.longest_s, seconds)

    @property
    def variance(self) -> float:
        return self._m2 / (self.count - 1) if self.count > 1 else self.mean_s**2


class Rate:
    """Tasks per second over the last half minute."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, ended: int) -> None:
        self._points.append((now, ended))
        while len(self._points) > 2 and now - self._points[0][0] > self._window_s:
            self._points.popleft()

    def per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def remaining(
    durations: Durations, num_waiting: int, elapsed_s: Sequence[float], num_workers: int
) -> Interval | None:
    """Time left for ``num_waiting`` tasks and those running since ``elapsed_s`` seconds.

    List scheduling ends no later than (work left) / workers + the longest task, and no earlier
    than (work left) / workers. The mean's own uncertainty (two standard errors) and the spread
    of the sum widen both. Short tasks are the first to end, so the upper end also counts what
    the running ones have taken so far. ``None`` until a task has ended.
    """
    if durations.count == 0 or num_workers == 0:
        return None
    workers = min(num_workers, max(1, num_waiting + len(elapsed_s)))
    mean, sd = durations.mean_s, math.sqrt(durations.variance)
    running = [max(mean - elapsed, 0.0) for elapsed in elapsed_s]
    overdue = max((elapsed for elapsed in elapsed_s), default=0.0)
    work = num_waiting * mean + sum(running)
    spread = (
        2.0
        * sd
        * (num_waiting / math.sqrt(durations.count) + math.sqrt(num_waiting + len(elapsed_s)))
    )
    low = max(0.0, work - spread, max(running, default=0.0)) / workers
    tail = max(durations.longest_s, overdue) if num_waiting or elapsed_s else 0.0
    long_mean = mean + sum(elapsed_s) / durations.count
    long_work = num_waiting * long_mean + sum(max(long_mean - e, 0.0) for e in elapsed_s)
    high = (long_work + spread) / workers + tail * (1.0 - 1.0 / workers)
    return Interval(low, max(low, high))


class WorkerLine(NamedTuple):
    slot: str
    state: str  # "starting" | "running" | "idle" | "ending" | "quarantined"
    task: str
    elapsed_s: float | None
    memory_mib: float | None
    progress: str
    num_ended: int
    pid: int | None = None
    device_peak_mib: float | None = None  # the most that tasks of this slot had on their device
    num_oom: int = 0  # tasks of this slot that found no memory beside others


class RunView(NamedTuple):
    """``total``: tasks in the plan; the counts add up to it once everything is enqueued."""

    name: str
    total: int
    num_done: int
    num_failed: int
    num_cancelled: int
    num_running: int
    num_retried: int
    elapsed_s: float
    rate: float | None
    eta: Interval | None
    phase: str  # "running" | "draining" | "paused" | "ending"
    workers: tuple[WorkerLine, ...]
    notes: tuple[tuple[str, str], ...]
    numbers: Mapping[str, float] = MappingProxyType({})
    num_stopped: int = 0  # ended early on purpose

    @property
    def num_ended(self) -> int:
        return self.num_done + self.num_failed + self.num_cancelled + self.num_stopped
