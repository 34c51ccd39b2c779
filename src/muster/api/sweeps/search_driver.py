"""Joins a search to a farm: proposals become tasks, and decisions become what the scheduler does.

All that a search hears and answers goes into the ledger in this order, and the search is rebuilt
from there: it has no other state.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import orjson

from muster.api.sweeps.search_state import SEARCH, from_row, numbers_of, to_row
from muster.base.clock import Clock
from muster.base.errors import MusterError, UsageError
from muster.base.metric_log import PROCESS
from muster.farm import canonical
from muster.farm.events import Event, Logged, Reopen, StopTask
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.store import Ledger
from muster.farm.metrics import POINT
from muster.farm.results import hand_on, whole_value
from muster.farm.steering import Proposed
from muster.farm.task import NewTask, TaskState
from muster.run.folder import RunFolder
from muster.search.records import Decision, Ended, Ending, EndState, Heard, Point, Proposal, Spent
from muster.search.search import Search
from muster.search.spec import SearchSpec
from muster.search.stopping.pbt import num_heirs
from muster.search.trials import Trial

#: From the parameters of a proposal to what is stored of them.
Stored = Callable[[Mapping[str, Any]], dict[str, Any]]
#: From what is stored of a task's parameters to those of a proposal; None where they are no setting
#: of the space.
Setting = Callable[[Mapping[str, Any]], dict[str, Any] | None]

_STATES: dict[TaskState, EndState] = {
    TaskState.DONE: "done", TaskState.FAILED: "failed", TaskState.CANCELLED: "cancelled",
    TaskState.STOPPED: "stopped",
}  # fmt: skip
#: Of a search that only time ends, as many as may be worth a worker.
_MANY = 1 << 20


@dataclass
class _SearchTask:
    """What is known of a task of the search."""

    proposal: Proposal
    told: str = ""  # stop or pause: it is to end, or has ended so
    is_over: bool = False
    has_failed: bool = False
    seconds: float = 0.0  # of its attempts, where they count against a budget
    last: dict[str, float] = field(default_factory=dict)  # the last number under each name
    heard: dict[str, float] = field(default_factory=dict)  # the last steps, of what is watched
    rung: float = 0.0  # the step at which it was told
    told_in: int = 0  # the token of the last attempt that was told
    came_to: float = -math.inf  # the step of the goal that was in the last report


class SearchDriver:
    """See `muster.farm.steering.Driver`."""

    def __init__(
        self,
        spec: SearchSpec,
        target_id: int,
        target: str,
        folder: RunFolder,
        clock: Clock,
        *,
        stored: Stored,
        setting: Setting,
        gpus_per_worker: float,
    ) -> None:
        self._spec = spec
        self._target_id = target_id
        self._make = canonical.payload_and_key(target)
        self._folder = folder
        self._clock = clock
        self._stored = stored
        self._setting = setting
        self._gpus_per_worker = gpus_per_worker
        self._search = Search(spec)
        self._began_s = clock.monotonic_s()
        self._rows: list[SearchRow] = []
        self._tasks: dict[int, _SearchTask] = {}
        self._task_of: dict[tuple[int, int | None], int] = {}
        self._growing: set[int] = set()  # tasks whose seconds may have changed since
        self._seconds_spent = 0.0
        self._names = {o.name for o in spec.objectives} | {c.name for c in spec.constraints}
        self._saves = spec.stopping.rule == "pbt"  # others go on from where a trial rests
        self._unseen = set(self._names)
        self._problem: UsageError | None = None
        self._lacking: UsageError | None = None  # a checkpoint that others were to begin with

    @property
    def num_expected(self) -> int:
        return self.num_at_once + num_heirs(self._spec.stopping, self.num_at_once)

    @property
    def num_at_once(self) -> int:
        size, trials = self._spec.space.size, self._spec.budget.trials
        known = [number for number in (size, trials) if number is not None]
        return min(known, default=_MANY) * len(self._spec.seeds or (None,))

    @property
    def problem(self) -> MusterError | None:
        return self._lacking or (self._problem if self._unseen else None)

    # ------------------------------------------------------------------ beginning

    def begin(self, ledger: Ledger) -> list[Event]:
        self._ledger = ledger
        ledger.set_meta(SEARCH, orjson.dumps(self._spec.to_json()).decode())
        rows = ledger.search_rows()
        records = []
        for row in rows:
            record = from_row(row)
            records.append(record)
            match record:
                case Proposal():
                    assert row.task_id is not None
                    self._name(record, row.task_id)
                    self._note_time(row)
                case Heard(trial, seed, points):
                    self._note_points(self._tasks[self._task_of[trial, seed]], points)
                case Ended(trial, seed, ending):
                    self._note_end(self._task_of[trial, seed], ending.state)
                    self._unseen -= ending.values.keys()
                    self._note_time(row)
                case Decision():
                    self._orders(record)
        self._search = Search.replay(self._spec, records)
        self._look_for_checkpoints()
        orders: list[Event] = [
            self._stop(task_id)
            for task_id, own in self._tasks.items()
            if own.told and not own.is_over
        ]
        given = self._given(ledger)
        for proposal, task_id in given:
            self._search.recall(proposal)
            self.added(proposal, task_id)
        for _, task_id in given:  # their results count, and not what they had logged
            orders += self._ended_meanwhile(ledger, task_id, TaskState.DONE)
        return orders + self._catch_up(ledger)

    def _given(self, ledger: Ledger) -> list[tuple[Proposal, int]]:
        """Tasks that are there without the search, as those of a grid. One that has a setting of
        the search is a seed of that trial; others are trials of their own."""
        trials = {
            canonical.encode_canonical(trial.params): trial.number
            for trial in reversed(self._search.trials)
            if trial.parent is None
        }
        count = len(self._search.trials)
        found = []
        for task_id, _, payload, state, _ in ledger.tasks_of(self._target_id):
            if task_id in self._tasks or state not in (TaskState.READY, TaskState.DONE):
                continue
            params = dict(canonical.decode(payload))
            seed = params.pop("seed", None) if self._spec.seeds is not None else None
            setting = self._setting(params)
            if setting is None or (self._spec.seeds is not None and seed not in self._spec.seeds):
                continue
            number = trials.setdefault(canonical.encode_canonical(setting), count)
            count += number == count
            found.append((Proposal(number, seed, setting, "given"), task_id))
        return sorted(found, key=lambda one: one[0].trial)

    def _catch_up(self, ledger: Ledger) -> list[Event]:
        """Hear what a pilot or a grid has brought in while there was no search, and what was logged
        last; open again what was promoted in the last turn of one that died."""
        orders: list[Event] = []
        for task_id, own in list(self._tasks.items()):
            if own.is_over and not (own.told or own.has_failed):
                continue
            state = ledger.state_of(task_id)[1]
            # One that has failed may have been retried; one that was told to end may be cancelled,
            # or a grid may have finished it.
            is_news = state is TaskState.DONE or (own.told and state is TaskState.CANCELLED)
            if own.is_over and not is_news:
                continue
            for token, body in ledger.metrics_of(task_id):
                orders += self.heard(Logged(0, task_id, token, 0, body))
            if state is TaskState.STOPPED and not own.told:
                orders.append(Reopen(task_id))
            elif state.is_final:
                orders += self._ended_meanwhile(ledger, task_id, state)
        return orders

    def _ended_meanwhile(self, ledger: Ledger, task_id: int, how: TaskState) -> list[Event]:
        """Hear that a task has ended so; nothing where it has not."""
        key, state, value = ledger.state_of(task_id)
        if state is not how:
            return []
        return self.ended(task_id, state, whole_value(self._folder, key.hex(), state, value))

    def _note_end(self, task_id: int, how: EndState) -> None:
        own = self._tasks[task_id]
        own.is_over, own.has_failed = True, how in ("failed", "cancelled")
        if how not in ("paused", "stopped"):
            own.told = ""  # it ended by itself, so a promotion opens nothing

    def _note_time(self, row: SearchRow) -> None:
        spent_s = canonical.decode(row.body).get("spent_s", 0.0)
        self._began_s = min(self._began_s, self._clock.monotonic_s() - spent_s)

    def _name(self, proposal: Proposal, task_id: int) -> None:
        self._tasks[task_id] = _SearchTask(proposal)
        if proposal.by != "given":  # those count against no budget
            self._growing.add(task_id)
        self._task_of[proposal.trial, proposal.seed] = task_id

    # ------------------------------------------------------------------ asking

    def ask(self, count: int) -> list[Proposed]:
        return [
            Proposed(self._task(one), one, self._search.is_wanted(one.trial))
            for one in self._search.ask(count, self._spent())
        ]

    def _task(self, proposal: Proposal) -> NewTask:
        """The task of a proposal. One that begins with another's checkpoint is not the task of its
        parameters alone, which a grid may name: its key says where it comes from."""
        params = self._stored(proposal.params)
        if proposal.seed is not None:
            params["seed"] = proposal.seed
        payload, key = self._make(params)
        if proposal.parent is not None:
            origin = self._ledger.key_of(self._task_of[proposal.parent, proposal.seed])
            key = blake2b(key + origin + b"%d" % proposal.trial, digest_size=len(key)).digest()
        return NewTask(key, self._target_id, payload)

    def added(self, what: Any, task_id: int) -> None:
        self._name(what, task_id)
        self._rows.append(to_row(what, task_id, spent_s=self._seconds()))

    def is_over(self) -> bool:
        return self._search.is_exhausted(self._spent()) and not self._search.may_promote()

    def _seconds(self) -> float:
        return self._clock.monotonic_s() - self._began_s

    def _spent(self) -> Spent:
        hours, budget = 0.0, self._spec.budget
        if budget.gpu_hours is not None or budget.cost is not None:
            hours = self._seconds_of_own() * self._gpus_per_worker / 3600
        cost = hours * (budget.price_per_gpu_hour or 0.0)
        return Spent(seconds=self._seconds(), gpu_hours=hours, cost=cost)

    def _seconds_of_own(self) -> float:
        growing, self._growing = self._growing, set()
        for task_id in growing:
            own = self._tasks[task_id]
            before, own.seconds = own.seconds, self._ledger.seconds_of_attempts([task_id])
            self._seconds_spent += own.seconds - before
            if not own.is_over:
                self._growing.add(task_id)
        return self._seconds_spent

    # ------------------------------------------------------------------ being told

    def heard(self, logged: Logged) -> list[Event]:
        own = self._tasks.get(logged.task_id)
        if own is None:
            return []
        points, orders, was_told = self._new_points(own, logged.body), list[Event](), own.told
        if points:
            trial, seed = own.proposal.trial, own.proposal.seed
            self._rows.append(to_row(Heard(trial, seed, points), logged.task_id))
            orders += self._decided(self._search.heard(trial, seed, points))
        is_to_rest = own.told == "pause" and not own.is_over and own.came_to >= own.rung
        if is_to_rest and logged.token > own.told_in:
            own.told_in = logged.token
            # An attempt before was told so, and was lost before it had saved.
            orders += [self._stop(logged.task_id)] if was_told and self._saves else []
        return orders

    def _new_points(self, own: _SearchTask, body: bytes) -> tuple[Point, ...]:
        """Those that the search looks at, without steps that it has heard: a later attempt may log
        them again."""
        names, packed = split(body)
        new, goal = [], self._spec.objectives[0].name
        own.came_to = -math.inf
        for which, step, _, value in POINT.iter_unpack(packed):
            name = names[which]
            if name == PROCESS:  # no metric: the program was started again
                continue
            own.last[name] = value
            if name == goal:
                own.came_to = step
            if name in self._names and step > own.heard.get(name, float("-inf")):
                new.append(Point(name, step, value))
                own.heard[name] = step
        self._unseen -= own.last.keys()
        return tuple(new)

    def _note_points(self, own: _SearchTask, points: Sequence[Point]) -> None:
        for point in points:
            own.last[point.name] = point.value
            own.heard[point.name] = point.step
            self._unseen.discard(point.name)

    def ended(self, task_id: int, state: TaskState, value: bytes) -> list[Event]:
        own = self._tasks.get(task_id)
        if own is None:
            return []
        proposal, word = own.proposal, _STATES[state]
        if word == "stopped" and own.told == "pause":
            word = "paused"
        self._note_end(task_id, word)
        ending = Ending(word, numbers_of(value) if word == "done" else {})
        record = Ended(proposal.trial, proposal.seed, ending)
        self._rows.append(to_row(record, task_id, spent_s=self._seconds()))
        if word == "done":
            shown = own.last.keys() | ending.values.keys()
            self._unseen -= shown
            if self._unseen and proposal.by != "given":
                self._problem = _not_shown(min(self._unseen), shown)
        return self._decided(self._search.ended(proposal.trial, proposal.seed, ending))

    def last_of(self, task_id: int) -> bytes:
        own = self._tasks.get(task_id)
        return b"{}" if own is None else canonical.encode(own.last)

    def take_records(self) -> Sequence[SearchRow]:
        rows, self._rows = self._rows, []
        return rows

    # ------------------------------------------------------------------ what it decides

    def _decided(self, decisions: Sequence[Decision]) -> list[Event]:
        orders: list[Event] = []
        for decision in decisions:
            if decision.kind == "replace":
                self._hand_on(decision)
            self._rows.append(to_row(decision, None, time_s=self._clock.wall_s()))
            orders += self._orders(decision)
        return orders

    def _hand_on(self, decision: Decision) -> None:
        """Give a trial the checkpoint that it begins with, before its parent is let go on."""
        assert decision.heir is not None and decision.parent is not None
        source = self._ledger.key_of(self._task_of[decision.parent, None])
        heir = self._search.trials[decision.heir]
        if not hand_on(self._folder, source.hex(), self._key_of_heir(heir)):
            self._lacking = _no_checkpoint(decision.parent, decision.rung)

    def _look_for_checkpoints(self) -> None:
        """A trial that was to begin with a checkpoint which was not there does so never: without
        this, the same command would begin it at step 0."""
        for trial in self._search.trials:
            if trial.parent is not None and (trial.number, None) not in self._task_of:
                key = self._key_of_heir(trial)
                if not (self._folder.checkpoint(key).exists() or self._folder.saved(key).exists()):
                    self._lacking = _no_checkpoint(trial.parent, trial.start)

    def _key_of_heir(self, heir: Trial) -> str:
        proposal = Proposal(heir.number, None, heir.params, heir.by, None, heir.parent)
        return self._task(proposal).key.hex()

    def _orders(self, decision: Decision) -> list[Event]:
        """What a decision means for the tasks of its trial that there are."""
        seeds = self._spec.seeds or (None,) if decision.seed is None else (decision.seed,)
        orders: list[Event] = []
        for seed in seeds:
            task_id = self._task_of.get((decision.trial, seed))
            if task_id is None:
                continue
            own = self._tasks[task_id]
            if decision.kind == "promote":
                if own.told == "pause":
                    own.told, own.is_over = "", False
                    if own.proposal.by != "given":
                        self._growing.add(task_id)
                    orders.append(Reopen(task_id))
            elif not own.is_over:
                how = "pause" if decision.kind == "pause" else "stop"
                if own.told not in (how, "stop"):
                    own.told, own.rung = how, decision.rung or 0.0
                    orders.append(self._stop(task_id))
        return orders

    def _stop(self, task_id: int) -> StopTask:
        pauses = self._tasks[task_id].told == "pause"
        return StopTask(task_id, pauses, saves=pauses and self._saves)


def _not_shown(name: str, shown: Collection[str]) -> UsageError:
    """No trial has a value of a goal, and one has finished: it is not logged under this name."""
    seen = f"logged or returned {', '.join(sorted(shown))}" if shown else "showed no number at all"
    near = difflib.get_close_matches(name, shown, n=1)
    return UsageError(
        f"The search asks for {name}, but no trial has shown it so far, and the one that has "
        f"finished now {seen}.",
        hint=(f"did you mean {near[0]!r}? " if near else "")
        + "Begin anew with --restart, and with the right name. If a later trial will have it, the "
        "same command goes on.",
    )


def _no_checkpoint(trial: int, step: float | None) -> UsageError:
    return UsageError(
        f"Trial {trial} has left no checkpoint in the run folder when it rested at step {step:g}, "
        "and --stop pbt begins other trials with it.",
        hint="a function calls ctx.checkpoint after ctx.log; a program saves in "
        "$MUSTER_CHECKPOINT_DIR before SIGTERM ends it, in a run folder that its host shares. "
        "Then begin anew with --restart.",
    )


def split(body: bytes) -> tuple[list[str], memoryview]:
    """The names of a frame of points, and its packed points; a torn end is left out."""
    start = body.index(b"\n") + 1
    whole = (len(body) - start) // POINT.size * POINT.size
    return orjson.loads(body[:start]), memoryview(body)[start : start + whole]
