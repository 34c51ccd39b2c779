"""Tells a hung engine from a slow one: while it owes answers it has to show some progress."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from muster.pipeline.engines.model import EngineError

T = TypeVar("T")


class Watchdog:
    """``timeout_s``: so long without a token or an answer, with requests in flight, is a hang."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = time.monotonic()
        self._num_waiting = 0

    def progress(self) -> None:
        """A token or an answer has come. Any thread may say so."""
        self._last_s = time.monotonic()

    async def wait(self, answer: asyncio.Future[T]) -> T:
        """The result of ``answer``; EngineError (and ``answer`` cancelled) after a hang."""
        if self._num_waiting == 0:
            self.progress()
        self._num_waiting += 1
        try:
            while not answer.done():
                left_s = self._last_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise EngineError(
                        f"The engine hangs: no token and no answer for {self._timeout_s:g} s with "
                        f"{self._num_waiting} requests in flight."
                    )
                await asyncio.wait({answer}, timeout=left_s)
            return answer.result()
        finally:
            self._num_waiting -= 1
            answer.cancel()
