"""A coordinator that nobody watches and of which nobody asks anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from muster.base.clock import Clock, SystemClock
from muster.farm.events import Event
from muster.farm.plan import Request
from muster.farm.view import RunView
from muster.run.requests import Ask


class Alone(nullcontext[object]):
    """``requests``: what is asked all the same."""

    def __init__(self, requests: Callable[[], list[Request]] = list) -> None:
        super().__init__()
        self.clock: Clock = SystemClock()
        self._requests = requests

    def show(self, view: RunView) -> None:
        return

    def requests(self) -> list[Request]:
        return self._requests()

    def asked(self) -> list[Ask]:
        return []

    def do(self, view: RunView) -> tuple[list[Event], list[Request]]:
        return [], []
