"""Where the time goes: acting, stepping, learning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PhaseClock:
    """Seconds per phase since ``take``. On a GPU by events, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def acting(self) -> Any:
        return self._measure("acting")

    def stepping(self) -> Any:
        return self._measure("stepping")

    def learning(self) -> Any:
        return self._measure("learning")

    @contextmanager
    def _measure(self, phase: str) -> Iterator[None]:
        if self._is_cuda:
            make: Any = torch.cuda.Event
            first, last = make(enable_timing=True), make(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((phase, first, last))
            return
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Seconds by phase, and start anew; on a GPU the host waits here."""
        for phase, first, last in self._events:
            last.synchronize()
            spent = first.elapsed_time(last) / 1e3
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds
