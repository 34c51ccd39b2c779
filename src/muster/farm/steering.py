"""Who chooses tasks while a run goes on, such as a search, and how it is joined to the run.

What a driver says is recorded, and becomes events for the scheduler. All of it happens inside the
coordinator's turns and their transactions. An order that was recorded and not obeyed, because the
coordinator died, is given again by the driver when it begins anew. The user steers too: tasks that
are cancelled one by one are told, and they and further tasks are recorded, and then answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from muster.base.errors import MusterError
from muster.base.shown_text import count
from muster.farm.canonical import decode, payload_and_key
from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions, Stopped
from muster.farm.events import Event, Fetched, Logged, Reopen, StopTask
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.store import CANCELLING, Ledger
from muster.farm.results import whole_value
from muster.farm.task import NewTask, Task, TaskState
from muster.farm.view import Picture
from muster.run.folder import RunFolder
from muster.run.requests import Ask

if TYPE_CHECKING:
    from muster.farm.plan import Plan

_ENDS = "it is about to end, and begins nothing more"


class Proposed(NamedTuple):
    """A task to be run; ``what`` is the driver's own name for it.

    ``is_wanted``: False for one that was decided to end before it began.
    """

    task: NewTask
    what: Any
    is_wanted: bool = True


class Driver(Protocol):
    """What it is asked, and what it is told.

    It reads no clock that matters to its choices, and writes nothing: what it says is recorded by
    the coordinator, in the transaction of what it was told, before any of it is done.
    """

    @property
    def num_expected(self) -> int:
        """How many tasks there will be in the end, as far as is known."""

    @property
    def num_at_once(self) -> int:
        """How many of them wait for no others to have ended: more workers would be idle."""

    @property
    def problem(self) -> MusterError | None:
        """Why going on would be in vain, None while it would not. What runs may still change it."""

    def begin(self, ledger: Ledger) -> list[Event]:
        """Rebuild what was known from the ledger, inside a transaction; what is still to be done
        is returned."""

    def ask(self, count: int) -> list[Proposed]:
        """Up to ``count`` tasks to run next, each of which is answered with ``added``."""

    def added(self, what: Any, task_id: int) -> None:
        """The ledger has this task under this number."""

    def heard(self, logged: Logged) -> list[Event]:
        """A task has logged numbers; what is to be done is returned."""

    def ended(self, task_id: int, state: TaskState, value: bytes) -> list[Event]:
        """A task has ended; ``value``: its encoded result."""

    def last_of(self, task_id: int) -> bytes:
        """The last that a task has logged under each name, encoded like a result."""

    def take_records(self) -> Sequence[SearchRow]:
        """What is to be recorded since the last call."""

    def is_over(self) -> bool:
        """Whether it would propose nothing any more, unless something that runs changes that."""


class Steering:
    def __init__(self, driver: Driver, ledger: Ledger, folder: RunFolder) -> None:
        self._driver = driver
        self._ledger = ledger
        self._folder = folder
        self._orders: list[Event] = []  # of this turn, for the next

    @property
    def num_expected(self) -> int:
        return self._driver.num_expected

    @property
    def num_at_once(self) -> int:
        return self._driver.num_at_once

    @property
    def problem(self) -> MusterError | None:
        return self._driver.problem

    @property
    def is_over(self) -> bool:
        """Whether the driver wants nothing any more: no further task, and nothing done."""
        return self._driver.is_over() and not self._orders

    def begin(self) -> None:
        """Rebuild the driver from the ledger, in a transaction of its own."""
        ledger = self._ledger
        ledger.begin()
        self._orders += self._driver.begin(ledger)
        self.record()  # what a task was proposed as comes home before its end
        self.stop_waiting(list(self._orders))
        self.record()
        ledger.drop_meta("enqueued")
        ledger.commit()

    def take_orders(self) -> list[Event]:
        orders, self._orders = self._orders, []
        return orders

    def record(self) -> None:
        if rows := self._driver.take_records():
            self._ledger.record_search(rows)

    def last_of(self, task_id: int) -> bytes:
        return self._driver.last_of(task_id)

    def tell(
        self, events: list[Event], decisions: Decisions, scheduler: Scheduler, now: float
    ) -> list[Event]:
        """Tell the driver what has happened in this turn, and decide what it wants done, in the
        turn too; returns that.

        It hears points before the endings that they came with, in the order of their arrival.
        """
        driver = self._driver
        all_orders: list[Event] = []
        orders: list[Event] = []
        for event in events:
            if isinstance(event, Logged):
                orders += driver.heard(event)
        news = decisions
        while True:
            for record in news.done:
                orders += driver.ended(record.task_id, TaskState.DONE, record.finished.value)
            for record in news.failed:
                orders += driver.ended(record.task_id, TaskState.FAILED, b"{}")
            for task, _ in news.cancelled:
                orders += driver.ended(task.task_id, TaskState.CANCELLED, b"{}")
            for task, _ in news.stopped:
                value = driver.last_of(task.task_id)
                orders += driver.ended(task.task_id, TaskState.STOPPED, value)
            if not orders:
                return all_orders
            news = scheduler.step(orders, now)
            all_orders += orders
            orders = []
            decisions.add(news)

    def stop_waiting(self, orders: Iterable[Event]) -> list[Stopped]:
        """End tasks that wait in the ledger and are to end; the scheduler tells all others.

        The last order of a turn counts: a task that is promoted may be told at once to pause
        again, and one that was told to pause may be promoted.
        """
        stopped: list[Stopped] = []
        last = {o.task_id: o for o in orders if isinstance(o, StopTask | Reopen)}
        for task_id, order in last.items():
            if not isinstance(order, StopTask) or order.saves:
                continue
            value = self._driver.last_of(task_id)
            task = self._ledger.stop_ready(task_id, value, self._has_files)
            if task is not None:
                stopped.append(Stopped(task, None))
                self._orders += self._driver.ended(task_id, TaskState.STOPPED, value)
        return stopped

    def cancelled(self, task_ids: Iterable[int]) -> None:
        """The user has cancelled tasks that waited in the ledger."""
        for task_id in task_ids:
            self._orders += self._driver.ended(task_id, TaskState.CANCELLED, b"{}")

    def choose(self, scheduler: Scheduler, picture: Picture) -> Fetched:
        """Claim what waits in the ledger, and let the driver choose what is missing to a full hand.

        A task that it chooses may have ended already, in a grid in this folder: it is told so.
        """
        ledger, driver, count = self._ledger, self._driver, scheduler.backlog.num_wanted()
        tasks = ledger.claim(count)
        while len(tasks) < count and (proposals := driver.ask(count - len(tasks))):
            for proposal in proposals:
                key = proposal.task.key
                picture.added(ledger.add_tasks([proposal.task]))
                task_id, state, value = ledger.standing(key)
                driver.added(proposal.what, task_id)
                self.record()  # it brings the task home, ahead of all that is said of it
                if not (proposal.is_wanted or state.is_final):
                    ledger.stop_ready(task_id, b"{}", self._has_files)
                    state = TaskState.STOPPED
                if state.is_final:
                    value = whole_value(self._folder, key.hex(), state, value)
                    self._orders += driver.ended(task_id, state, value)
            tasks += ledger.claim(count - len(tasks))
        self.record()
        is_at_work = any(worker.in_flight for worker in scheduler.roster.workers.values())
        is_over = not tasks and not self._orders and (driver.is_over() or not is_at_work)
        return Fetched(tasks, exhausted=is_over)

    def _has_files(self, task: Task) -> bool:
        folder, key = self._folder, task.key.hex()
        return folder.attempt(key, task.token).exists() or folder.artifact(key).exists()


_Answer = Callable[[Mapping[str, Any]], None]


def _nobody(what: Mapping[str, Any]) -> None:
    return


def cancel_in(ledger: Ledger, task_id: int, *, nobody_works: bool = False) -> str:
    """Cancel a task that no worker has; "cancelled", or how it had ended: "was done"."""
    is_open = (TaskState.READY, TaskState.CLAIMED) if nobody_works else (TaskState.READY,)
    state = ledger.cancel_one(task_id, is_open)
    return "cancelled" if state is None else f"was {state.name.lower()}"


def add_in(ledger: Ledger, tasks: Iterable[NewTask], said: Sequence[str], listed: str = "") -> int:
    """Add tasks to those of the plan, inside a transaction; how many of them are new.

    ``said``: the words that they were asked for with; ``listed``: the hash of their list.
    """
    before = ledger.last_task()
    num_new = ledger.add_tasks(tasks)
    if num_new:
        ledger.note_added(before + 1, said, listed)
    return num_new


class Asked:
    """What others ask of a run at work: tasks to be cancelled, and further ones.

    ``hear`` gives the scheduler's events, ``record`` is part of the turn's transaction, and
    ``answer`` follows its commit. What was told to end and has not is in the ledger, so a request
    that was answered outlives its coordinator.
    """

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self._ledger = ledger
        self._plan = plan
        left: list[int] = json.loads(ledger.meta(CANCELLING) or "[]")
        self._noted = left
        self._left = left  # by a coordinator that has died
        self._pending: list[tuple[list[int], _Answer]] = []
        self._to_add: list[Ask] = []
        self._answers: list[tuple[_Answer, dict[str, Any]]] = []

    def hear(self, asks: Iterable[Ask]) -> list[Event]:
        if self._left:
            self._pending.append((self._left, _nobody))
            self._left = []
        last = self._ledger.last_task()
        for ask in asks:
            if "add" in ask.what:
                self._to_add.append(ask)
                continue
            named = ask.what.get("cancel")
            ids = named if isinstance(named, list) else []
            ids = [one for one in ids if isinstance(one, int) and 1 <= one <= last]
            self._pending.append((ids, ask.answer))
        ids = [task_id for ids, _ in self._pending for task_id in ids]
        return [StopTask(task_id, cancels=True) for task_id in ids]

    @property
    def has_news(self) -> bool:
        return bool(self._pending or self._to_add)

    def record(self, scheduler: Scheduler, decisions: Decisions, picture: Picture) -> Sequence[int]:
        """Record what is added and what is cancelled; returns the tasks among the latter that
        waited in the ledger.
        """
        for ask in self._to_add:
            is_ending = scheduler.draining or scheduler.paused
            answer: dict[str, Any] = {"refused": _ENDS} if is_ending else self._add(ask.what["add"])
            self._answers.append((ask.answer, answer))
            if num_new := answer.get("added"):
                picture.added(num_new)
                scheduler.backlog.exhausted = False
                least = min((task.priority for task in scheduler.backlog.queue), default=math.inf)
                if any(priority > least for *_, priority in ask.what["add"]["tasks"]):
                    # What was claimed ahead is claimed again, behind what is more urgent.
                    self._ledger.release(scheduler.backlog.take_untried())
                decisions.notes.append(("added", f"{count(num_new, 'task')} added"))
        self._to_add = []
        self._ledger.record_cancelled(decisions.cancelled)
        ended = {task.task_id for task, _ in decisions.cancelled}
        told = scheduler.halts.cancelling
        waited: list[int] = []
        for ids, reply in self._pending:
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
            self._answers.append((reply, {"tasks": words}))
        self._pending = []
        if told != self._noted:
            self._noted = told
            self._ledger.set_meta(CANCELLING, json.dumps(told))
        picture.cancelled(len(waited))
        return waited

    def answer(self) -> None:
        if any("added" in what for _, what in self._answers):
            self._ledger.snapshot()  # of a ledger elsewhere: what is answered is in the run folder
        for reply, what in self._answers:
            reply(what)
        self._answers = []

    def _add(self, what: object) -> dict[str, Any]:
        """Add the tasks of a note that another process has written, and perhaps another muster."""
        if self._plan.driver is not None:
            return {"refused": "it is a search, which chooses its tasks itself"}
        numbers = {spec.name: number for number, spec in self._plan.targets.items()}
        try:
            if not isinstance(what, dict) or what["plan"] != self._plan.plan_id:
                return {"refused": "it has begun with another plan meanwhile"}
            tasks = [_task_of(numbers, *line) for line in what["tasks"]]
            said = [str(word) for word in what["said"]]
            listed = str(what.get("list", ""))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MusterError):
            return {"refused": "it is of another version and does not understand the request"}
        return {"added": add_in(self._ledger, tasks, said, listed)}


def _task_of(
    numbers: Mapping[str, int], target: str, payload: str, group: int, priority: int
) -> NewTask:
    """Its key is made here, so that equal tasks have equal ones whoever asks."""
    text, key = payload_and_key(target)(dict(decode(payload.encode())))
    if not all(type(one) is int and abs(one) < 1 << 63 for one in (group, priority)):
        raise ValueError
    return NewTask(key, numbers[target], text, group, priority)
