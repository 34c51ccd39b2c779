"""Tasks that a user cancels one by one while their run goes on: told, recorded, then answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions
from muster.farm.events import Event, StopTask
from muster.farm.ledger.store import CANCELLING, Ledger
from muster.farm.task import TaskState
from muster.run.requests import Ask

_Answer = Callable[[Mapping[str, Any]], None]


def _nobody(what: Mapping[str, Any]) -> None:
    return


def cancel_in(ledger: Ledger, task_id: int, *, nobody_works: bool = False) -> str:
    """Cancel a task that no worker has; "cancelled", or how it had ended: "was done"."""
    is_open = (TaskState.READY, TaskState.CLAIMED) if nobody_works else (TaskState.READY,)
    state = ledger.cancel_one(task_id, is_open)
    return "cancelled" if state is None else f"was {state.name.lower()}"


class Cancelling:
    """``hear`` gives the scheduler's events, ``record`` is part of the turn's transaction, and
    ``answer`` follows its commit. What was told to end and has not is in the ledger, so a request
    that was answered outlives its coordinator.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        left: list[int] = json.loads(ledger.meta(CANCELLING) or "[]")
        self._noted = left
        self._left = left  # by a coordinator that has died
        self._pending: list[tuple[list[int], _Answer]] = []
        self._answers: list[tuple[_Answer, dict[str, Any]]] = []

    def hear(self, asks: Iterable[Ask]) -> list[Event]:
        if self._left:
            self._pending.append((self._left, _nobody))
            self._left = []
        last = self._ledger.last_task()
        for ask in asks:
            named = ask.what.get("cancel")
            ids = named if isinstance(named, list) else []
            ids = [one for one in ids if isinstance(one, int) and 1 <= one <= last]
            self._pending.append((ids, ask.answer))
        ids = [task_id for ids, _ in self._pending for task_id in ids]
        return [StopTask(task_id, cancels=True) for task_id in ids]

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    def record(self, scheduler: Scheduler, decisions: Decisions) -> Sequence[int]:
        """Record what is cancelled; returns the tasks among them that waited in the ledger."""
        self._ledger.record_cancelled(decisions.cancelled)
        ended = {task.task_id for task, _ in decisions.cancelled}
        told = scheduler.halts.cancelling
        waited: list[int] = []
        for ids, answer in self._pending:
            words: dict[str, str] = {}
            for task_id in ids:
                if task_id in ended:
                    words[str(task_id)] = "cancelled"
                elif task_id in told:
                    words[str(task_id)] = "told"
                elif scheduler.roster.has(task_id):
                    words[str(task_id)] = "together"  # in one call with others
                else:
                    words[str(task_id)] = word = cancel_in(self._ledger, task_id)
                    waited += [task_id] * (word == "cancelled")
            self._answers.append((answer, words))
        self._pending = []
        if told != self._noted:
            self._noted = told
            self._ledger.set_meta(CANCELLING, json.dumps(told))
        return waited

    def answer(self) -> None:
        for answer, words in self._answers:
            answer({"tasks": words})
        self._answers = []
