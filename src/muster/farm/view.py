"""A picture of a running sweep, for a screen or a file. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from muster.farm.estimate import Interval


class WorkerLine(NamedTuple):
    slot: str
    state: str  # "starting" | "running" | "idle" | "ending" | "quarantined"
    task: str
    elapsed_s: float | None
    memory_mib: float | None
    progress: str
    num_ended: int
    pid: int | None = None


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

    @property
    def num_ended(self) -> int:
        return self.num_done + self.num_failed + self.num_cancelled
