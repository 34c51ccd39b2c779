"""Counters of this worker process, such as tokens: stages and engines add, the worker reports."""

from __future__ import annotations

import threading
from collections import defaultdict


class Meter:
    """Sums by name since the worker started. Threads may add at the same time."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float) -> None:
        """``name`` in the plural: ``"tokens"``, ``"prompt_tokens"``, ``"requests"``."""
        with self._lock:
            self._sums[name] += amount

    def read(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)


METER = Meter()
