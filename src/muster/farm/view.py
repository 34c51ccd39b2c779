"""A picture of a running sweep, for a screen or a file, and when it will be done; and who keeps it,
and logs its events for ``--log-level debug``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from muster.base.clock import human_duration
from muster.base.journal import EVENTS
from muster.base.shown_text import count
from muster.farm.canonical import task_label
from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions
from muster.farm.events import Event, Progress, WorkerDied, WorkerLeaving, WorkerReady
from muster.farm.roster import Slot, Worker
from muster.farm.task import AttemptRecord, Outcome, TaskState


class Interval(NamedTuple):
    low_s: float
    high_s: float


class Durations:
    """Mean and variance of task lengths, in constant memory (Welford), and the longest."""

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.longest_s = 0.0
        self._m2 = 0.0

    def add(self, lengths: Sequence[float]) -> None:
        """Chan's formula: the mean and the sum of squares of these, joined to those of before."""
        if not lengths:
            return
        num, before = len(lengths), self.count
        mean = sum(lengths) / num
        squares = sum([(seconds - mean) ** 2 for seconds in lengths])
        delta = mean - self.mean_s
        self.count = before + num
        self.mean_s += delta * num / self.count
        self._m2 += squares + delta * delta * before * num / self.count
        self.longest_s = max(self.longest_s, *lengths)

    @property
    def variance(self) -> float:
        return self._m2 / (self.count - 1) if self.count > 1 else self.mean_s**2


class Rate:
    """Tasks per second over the last half minute."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, ended: int) -> None:
        self._points.append((now, ended))
        while len(self._points) > 2 and now - self._points[0][0] > self._window_s:
            self._points.popleft()

    def per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


def remaining(
    durations: Durations, num_waiting: int, elapsed_s: Sequence[float], num_workers: int
) -> Interval | None:
    """Time left for ``num_waiting`` tasks and those running since ``elapsed_s`` seconds.

    List scheduling ends no later than (work left) / workers + the longest task, and no earlier
    than (work left) / workers. The mean's own uncertainty (two standard errors) and the spread
    of the sum widen both. Short tasks are the first to end, so the upper end also counts what
    the running ones have taken so far. ``None`` until a task has ended.
    """
    if durations.count == 0 or num_workers == 0:
        return None
    workers = min(num_workers, max(1, num_waiting + len(elapsed_s)))
    mean, sd = durations.mean_s, math.sqrt(durations.variance)
    running = [max(mean - elapsed, 0.0) for elapsed in elapsed_s]
    overdue = max((elapsed for elapsed in elapsed_s), default=0.0)
    work = num_waiting * mean + sum(running)
    spread = (
        2.0
        * sd
        * (num_waiting / math.sqrt(durations.count) + math.sqrt(num_waiting + len(elapsed_s)))
    )
    low = max(0.0, work - spread, max(running, default=0.0)) / workers
    tail = max(durations.longest_s, overdue) if num_waiting or elapsed_s else 0.0
    long_mean = mean + sum(elapsed_s) / durations.count
    long_work = num_waiting * long_mean + sum(max(long_mean - e, 0.0) for e in elapsed_s)
    high = (long_work + spread) / workers + tail * (1.0 - 1.0 / workers)
    return Interval(low, max(low, high))


class WorkerLine(NamedTuple):
    slot: str
    state: str  # "starting" | "running" | "idle" | "ending" | "quarantined"
    task: str
    elapsed_s: float | None
    memory_mib: float | None
    progress: str
    num_ended: int
    pid: int | None = None
    device_peak_mib: float | None = None  # the most that tasks of this slot had on their device
    num_oom: int = 0  # tasks of this slot that found no memory beside others


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
    num_stopped: int = 0  # ended early on purpose

    @property
    def num_ended(self) -> int:
        return self.num_done + self.num_failed + self.num_cancelled + self.num_stopped


def view_of(picture: Mapping[str, Any]) -> RunView | None:
    """A view from what `status.json` says; None where it says something else."""
    known = {name: value for name, value in picture.items() if name in RunView._fields}
    try:
        workers = tuple(
            WorkerLine(**{k: v for k, v in line.items() if k in WorkerLine._fields})
            for line in known["workers"]
        )
        notes = tuple((str(kind), str(text)) for kind, text in known["notes"])
        eta = known.get("eta")
        if not all(isinstance(known[name], int) for name in ("total", "num_done", "num_running")):
            return None
        return RunView(
            **{**known, "workers": workers, "notes": notes,
               "eta": None if eta is None else Interval(*map(float, eta))}
        )  # fmt: skip
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def rate_text(rate: float | None) -> str:
    """``12.3/s``, or ``4.1/min`` and ``2.0/h`` for slow ones; empty when unknown."""
    if not rate:
        return ""
    for unit, seconds in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if rate * seconds >= 1.0 or unit == "h":
            value = rate * seconds
            return f"{value:,.0f}/{unit}" if value >= 100 else f"{value:.1f}/{unit}"
    return ""


def eta_text(eta: Interval | None) -> str:
    """``left 2.0 s to 3.1 s``: an interval, because a single number would be a guess."""
    if eta is None:
        return ""
    low, high = human_duration(eta.low_s), human_duration(eta.high_s)
    return f"left {low}" if low == high else f"left {low} to {high}"


def left_text(view: RunView) -> str:
    """``left 2.0 h to 3.1 h with 3 of 1,000 workers``: how many it is, where others still wait."""
    states = [line.state for line in view.workers]
    text, num_waiting = eta_text(view.eta), states.count("starting")
    if not text or not num_waiting:
        return text
    num_at_work = states.count("running") + states.count("idle")
    return f"{text} with {num_at_work:,} of {count(num_at_work + num_waiting, 'worker')}"


def counts_text(view: RunView) -> str:
    counts = {
        "failed": view.num_failed,
        "stopped early": view.num_stopped,
        "cancelled": view.num_cancelled,
        "tried again": view.num_retried,
    }
    parts = [f"{number:,} {word}" for word, number in counts.items() if number]
    return ", ".join([f"{view.num_done:,} done", *parts, f"{view.num_running} running"])


def plain_line(view: RunView) -> str:
    share = 100 * view.num_ended / view.total if view.total else 100.0
    parts = [
        f"{view.name}: {view.num_ended:,}/{view.total:,} ({share:.0f} %)",
        counts_text(view),
        rate_text(view.rate),
        left_text(view) if view.num_ended < view.total else "",
        "" if view.phase in ("running", "ending") else view.phase,
    ]
    return ", ".join(part for part in parts if part)


_MAX_NOTES = 100
#: Of a slot whose worker has ended, and whose devices others may have.
GIVEN_BACK = "given back"
#: Of a slot without a worker that gets no tasks: its device is to blame for failures, or stuck.
QUARANTINED = "quarantined"


class Picture:
    def __init__(self, name: str, total: int, now: float) -> None:
        self.notes: list[tuple[str, str]] = []
        self._name = name
        self._planned = total
        self._known = 0
        self._begin_s = now
        self._counts = dict.fromkeys(TaskState, 0)
        self._retried = 0
        self._durations = Durations()
        self._rate = Rate()
        self._progress: dict[int, str] = {}
        self._numbers: dict[int, Mapping[str, float]] = {}
        self._before: dict[int, Mapping[str, float] | None] = {}
        self._memory: dict[int, float | None] = {}
        self._slot_of: dict[int, int] = {}
        self._device_peak: dict[int, float] = {}  # by slot, as the next
        self._num_oom: Counter[int] = Counter()
        self._ended_by_slot: dict[int, int] = {}
        self.pids: dict[int, int] = {}

    def start(self, counts: dict[TaskState, int]) -> None:
        """Begin with the counts that the ledger has before the first turn."""
        self._counts.update(counts)
        self._known = sum(counts.values())
        self._rate.add(self._begin_s, self._ended)

    def adopt(self, worker_ids: Iterable[int]) -> None:
        """Go on with workers of an earlier start. What they tell of first was done in that one."""
        self._before |= dict.fromkeys(worker_ids)

    def added(self, count: int) -> None:
        self._known += count

    @property
    def known(self) -> int:
        """Tasks in the ledger."""
        return self._known

    def cancelled(self, count: int) -> None:
        self._counts[TaskState.CANCELLED] += count

    def note(self, events: Sequence[Event], decisions: Decisions, now: float) -> None:
        tell(events, decisions)
        for event in events:
            if isinstance(event, Progress):
                self._progress[event.worker_id] = event.text
                if event.numbers:
                    # Slots of this very process (their pid is 0) tell the same ones.
                    is_here = self.pids.get(event.worker_id) == 0
                    self._numbers[-1 if is_here else event.worker_id] = event.numbers
                    if self._before.get(event.worker_id, event.numbers) is None:
                        self._before[event.worker_id] = event.numbers
            elif isinstance(event, WorkerReady):
                self.pids[event.worker_id] = event.pid
        self._slot_of.update((worker_id, slot_id) for slot_id, worker_id in decisions.starts)
        ended = [*decisions.stopped, *decisions.cancelled]
        stopped = [record for _, record in ended if record is not None]
        tried = [record for record, _ in decisions.tried]
        known = [*decisions.done, *decisions.failed, *stopped, *tried]
        for record in [record for record in known if record.finished.on_device]:
            self._learn(record)
        for record, again in decisions.tried:
            if record.finished.outcome is Outcome.DEVICE_OOM and again.solo:  # it was not alone
                self._num_oom[self._slot_of.get(record.worker_id, -1)] += 1
        self._durations.add([record.finished.seconds for record in decisions.done])
        self._have_ended([*decisions.done, *decisions.failed, *stopped])
        self._counts[TaskState.STOPPED] += len(decisions.stopped) - len(decisions.promoted)
        self._counts[TaskState.CANCELLED] += len(decisions.cancelled)
        self._counts[TaskState.DONE] += len(decisions.done)
        self._counts[TaskState.FAILED] += len(decisions.failed) - len(decisions.reopened)
        self._retried += len(decisions.tried) + len(decisions.reopened)
        self.notes.extend(decisions.notes)
        del self.notes[:-_MAX_NOTES]
        if decisions.done or decisions.failed or ended:
            self._rate.add(now, self._ended)

    def view(self, scheduler: Scheduler, now: float, phase: str) -> RunView:
        running = [w for w in scheduler.roster.workers.values() if w.in_flight]
        total = max(self._planned, self._known)
        waiting = max(0, total - self._ended - len(running))
        elapsed = [now - worker.head_since for worker in running]
        num_workers = scheduler.roster.num_at_work()
        return RunView(
            name=self._name,
            total=total,
            num_done=self._counts[TaskState.DONE],
            num_failed=self._counts[TaskState.FAILED],
            num_cancelled=self._counts[TaskState.CANCELLED],
            num_stopped=self._counts[TaskState.STOPPED],
            num_running=len(running),
            num_retried=self._retried,
            elapsed_s=now - self._begin_s,
            rate=self._rate.per_second(),
            eta=remaining(self._durations, waiting, elapsed, num_workers),
            phase=phase,
            workers=tuple(self._line(slot, scheduler, now) for slot in scheduler.roster.slots),
            notes=tuple(self.notes[-5:]),
            numbers=self._sums(),
        )

    def _sums(self) -> dict[str, float]:
        """Totals of this start over all workers, also those that are gone: each reports sums since
        it started.
        """
        sums: dict[str, float] = {}
        for worker_id, numbers in self._numbers.items():
            before = self._before.get(worker_id) or {}
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + value - before.get(name, 0.0)
        return sums

    @property
    def _ended(self) -> int:
        return sum(count for state, count in self._counts.items() if state.is_final)

    def _have_ended(self, records: Sequence[AttemptRecord]) -> None:
        for worker_id, num in Counter([record.worker_id for record in records]).items():
            self._ended_by_slot[worker_id] = self._ended_by_slot.get(worker_id, 0) + num
            self._progress.pop(worker_id, None)
        self._memory.update({record.worker_id: record.finished.peak_mib for record in records})

    def _learn(self, record: AttemptRecord) -> None:
        """Note what an attempt says about the memory of its device."""
        slot_id, peak_mib = self._slot_of.get(record.worker_id, -1), record.finished.peak_mib
        if peak_mib is not None:
            self._device_peak[slot_id] = max(self._device_peak.get(slot_id, 0.0), peak_mib)

    def _line(self, slot: Slot, scheduler: Scheduler, now: float) -> WorkerLine:
        slot_id = slot.spec.slot_id
        known = self._device_peak.get(slot_id), self._num_oom[slot_id]
        worker = scheduler.roster.worker_of(slot)
        if worker is None:
            state = QUARANTINED if slot.quarantined else "off"
            state = GIVEN_BACK if slot.is_given_back and not slot.is_stuck else state
            return WorkerLine(slot.spec.label, state, "", None, None, "", 0, None, *known)
        head = next(iter(worker.in_flight.values()), None)
        return WorkerLine(
            slot.spec.label,
            _state_of(worker),
            task_label(head.task_id, head.payload) if head else "",
            now - worker.head_since if head else None,
            self._memory.get(worker.worker_id),
            self._progress.get(worker.worker_id, ""),
            self._ended_by_slot.get(worker.worker_id, 0),
            self.pids.get(worker.worker_id),
            *known,
        )


def _state_of(worker: Worker) -> str:
    if worker.killing is not None or worker.stopping:
        return "ending"
    if not worker.ready:
        return "starting"
    return "running" if worker.in_flight else "idle"


def tell(events: Sequence[Event], decisions: Decisions) -> None:
    """Log events and decisions; costs nothing unless debug messages are wanted."""
    if not EVENTS.isEnabledFor(logging.DEBUG):
        return
    for event in events:
        match event:
            case WorkerReady():
                EVENTS.debug("worker %d is ready, pid %d", event.worker_id, event.pid)
            case WorkerLeaving():
                EVENTS.debug("worker %d is about to lose its place", event.worker_id)
            case WorkerDied():
                EVENTS.debug("worker %d ended: %s", event.worker_id, event.reason)
            case _:
                continue
    ended = [*decisions.stopped, *decisions.cancelled]
    stopped = [record for _, record in ended if record is not None]
    for record in [*decisions.done, *decisions.failed, *stopped]:
        EVENTS.debug(_ended(record))
    for record, _ in decisions.tried:
        EVENTS.debug("%s; it will run again", _ended(record))
    for slot_id, worker_id in decisions.starts:
        EVENTS.debug("worker %d starts in slot %d", worker_id, slot_id)
    for worker_id, tasks, _ in decisions.sends:
        numbers = ", ".join(str(task.task_id) for task in tasks)
        EVENTS.debug("worker %d is sent task %s", worker_id, numbers)
    for worker_id, reason in decisions.kills:
        EVENTS.debug("worker %d is killed: %s", worker_id, reason)


def _ended(record: AttemptRecord) -> str:
    finished = record.finished
    message = f": {finished.message}" if finished.message else ""
    return (
        f"task {record.task_id}, attempt {record.token}, on worker {record.worker_id}: "
        f"{finished.outcome.value} after {finished.seconds:.3g} s{message}"
    )
