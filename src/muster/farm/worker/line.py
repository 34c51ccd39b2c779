"""What a running task says to the coordinator, and hears from it, while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from muster.farm import codec, wire
from muster.farm.worker.inbox import Inbox

_MAX_TEXT = 500


class Line(Protocol):
    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None: ...

    def wanted(self, task_id: int) -> int:
        """How many other workers wait for a part of this task."""

    def should_stop(self) -> bool:
        """Whether this worker's place will soon be taken from it."""

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        """The task does only ``kept`` from now on; ``given`` are the parameters of new tasks."""


class InboxLine:
    """Over the worker's connection; frames arrive in the order in which they are sent."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None:
        shown = wire.clean(text)[:_MAX_TEXT]
        self._inbox.send(wire.pack([wire.PROGRESS, task_id, shown, dict(numbers)]))

    def wanted(self, task_id: int) -> int:
        return self._inbox.wanted(task_id)

    def should_stop(self) -> bool:
        return self._inbox.is_warned

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        self._inbox.answered()
        body = codec.encode([dict(kept), [dict(params) for params in given]])
        self._inbox.send(wire.pack([wire.DIVIDED, task_id, token], body))
