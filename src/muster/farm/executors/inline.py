"""Runs tasks here and now, in this process: for developing a target with a debugger.

What a process boundary gives is not there: a crash ends the run, ``--timeout`` cannot interrupt,
and what tasks print goes to the screen.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from muster.base.device_faults import hidden_fault, is_in_use, why_unfit
from muster.base.errors import MusterError
from muster.base.settings import kept_environment
from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import Assignment
from muster.farm.task import Finished, Order, SlotSpec, Task
from muster.farm.worker.perform import Performer, describe


class InlineExecutor:
    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._performers: dict[int, Performer] = {}
        self._lines: dict[int, _InlineLine] = {}
        self._environment = ExitStack()
        self._calls: deque[tuple[int, list[Task]]] = deque()
        self._events: list[Event] = []
        self._ending: set[int] = set()

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        device = _device_of(slot)
        if device == "cpu" and not is_in_use():  # CUDA reads the variable once
            self._environment.enter_context(kept_environment({"CUDA_VISIBLE_DEVICES": ""}))
        line = self._lines[worker_id] = _InlineLine(worker_id, self._events)
        try:
            self._performers[worker_id] = Performer(
                self._assignment.targets,
                self._assignment.folder,
                device,
                log=None,
                line=line,
            )
        except MusterError as error:
            self._events.append(TargetBroken(worker_id, str(error), ""))
            return ""
        except Exception as error:  # the user's module may raise anything at import
            message = f"Loading the target failed: {describe(error)}"
            self._events.append(TargetBroken(worker_id, message, traceback.format_exc()))
            return ""
        if device != "cpu" and (unfit := why_unfit()):
            del self._performers[worker_id]
            self._events.append(WorkerDied(worker_id, None, None, unfit))
            return ""
        self._events.append(WorkerReady(worker_id, 0))
        return ""

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        if worker_id not in self._performers:
            return
        if together:
            self._calls.append((worker_id, list(tasks)))
        else:
            self._calls.extend((worker_id, [task]) for task in tasks)

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        """Do nothing: there is one worker, and no task runs while this is called."""

    def revoke(self, worker_id: int) -> None:
        if worker_id not in self._performers:
            return
        mine = [tasks for owner, tasks in self._calls if owner == worker_id]
        self._calls = deque(call for call in self._calls if call[0] != worker_id)
        self._events.append(Returned(worker_id, [t.task_id for tasks in mine for t in tasks]))

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        """Do nothing: no task runs while this is called."""

    def confirm(self, worker_id: int, serial: int) -> None:
        if worker_id in self._lines:
            line = self._lines[worker_id]
            line.num_confirmed = max(line.num_confirmed, serial)

    def end(self, worker_id: int, *, kill: bool) -> None:
        if worker_id not in self._performers:
            return
        if kill:
            self._calls = deque(call for call in self._calls if call[0] != worker_id)
        self._ending.add(worker_id)

    def poll(self, timeout_s: float) -> list[Event]:
        if self._calls and not self._events:
            worker_id, tasks = self._calls.popleft()
            performer = self._performers[worker_id]
            if fault := _why_not_chosen(performer.device):
                self._calls.appendleft((worker_id, tasks))
            else:
                finished = _perform(performer, tasks)
                self._events.append(Results(worker_id, finished))
                if performer.device != "cpu" and any(each.poisoned for each in finished):
                    fault = hidden_fault()
            if fault:
                self._lose_device(worker_id, fault)
        busy = {owner for owner, _ in self._calls}
        for worker_id in sorted(self._ending - busy):
            self._ending.remove(worker_id)
            del self._performers[worker_id]
            self._events.append(WorkerDied(worker_id, 0, None, "ended"))
        if not self._events:
            time.sleep(timeout_s)  # nothing happens here but what the caller asks for
        events = list(self._events)
        self._events.clear()
        return events

    def _lose_device(self, worker_id: int, fault: str) -> None:
        """Nothing runs there in this process any more, and it is the only one: what waits is given
        back for the next start of the run.
        """
        self.revoke(worker_id)
        del self._performers[worker_id]
        self._ending.discard(worker_id)
        why = f"nothing runs on it in this process any more: {fault}"
        self._events.append(WorkerDied(worker_id, None, None, why, stuck=why))

    def close(self) -> None:
        self._calls.clear()
        self._environment.close()


def _device_of(slot: SlotSpec) -> str:
    """The slot's device by its number in this process, which sees all devices."""
    return slot.label.partition("/")[0].partition("+")[0] if slot.kind == "cuda" else "cpu"


def _why_not_chosen(device: str) -> str:
    """Why ``device`` cannot become what "cuda" means without a number; "" where it has."""
    torch = sys.modules.get("torch")
    if device != "cpu" and torch is not None and torch.cuda.is_available():
        try:
            torch.cuda.set_device(device)
        except Exception as error:  # a context that a task has broken, a card that is gone
            return describe(error).split("\n", 1)[0]
    return ""


def _perform(performer: Performer, tasks: list[Task]) -> list[Finished]:
    orders = [order_of(task) for task in tasks]
    if performer.is_batched(tasks[0].target_id):
        return performer.run_together(orders)
    return [performer.run(order) for order in orders]


class _InlineLine:
    confirms_meanwhile = False  # the coordinator is this very thread

    def __init__(self, worker_id: int, events: list[Event]) -> None:
        self._worker_id = worker_id
        self._events = events
        self._num_logged = 0
        self.num_confirmed = 0

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None:
        self._events.append(Progress(self._worker_id, task_id, text, numbers))

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        if serial is None:
            self._num_logged += 1
            serial = self._num_logged
        self._events.append(Logged(self._worker_id, task_id, token, serial, body))
        return serial

    def confirmed(self) -> int:
        return self.num_confirmed

    def wanted(self, task_id: int) -> int:
        return 0

    def should_stop(self) -> bool:
        return False

    def halted(self, task_id: int) -> None:
        return None

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None:
        return

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        self._events.append(Divided(self._worker_id, task_id, token, kept, given))


def order_of(task: Task) -> Order:
    key, token = task.key.hex(), task.token
    return Order(task.task_id, token, task.target_id, key, token, task.payload, task.tries)
