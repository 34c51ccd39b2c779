"""For an executor that runs elsewhere: commands travel to it as frames, events come back as frames.

Whatever carries the frames (files on a shared folder, a Ray actor), both ends use this module. A
pilot at the other end holds a real executor, so that starting and ending workers exist once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from muster.farm import canonical, wire
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
from muster.farm.executors.base import TakesCommands
from muster.farm.task import Outcome, SlotSpec, Task

Frame = tuple[list[Any], bytes]

START, SEND, END, CLOSE = "start", "send", "end", "close"
RESULTS, DIED = "results", "died"


# ---------------------------------------------------------------- commands, to a pilot


def start_command(worker_id: int, slot: SlotSpec) -> bytes:
    return wire.pack([START, worker_id], orjson.dumps(dataclasses.asdict(slot)))


def send_command(worker_id: int, tasks: Sequence[Task], *, together: bool) -> bytes:
    """One frame that announces how many tasks follow, and a frame for each."""
    head = wire.pack([SEND, worker_id, together, len(tasks)])
    return head + b"".join(
        wire.pack([wire.TASK, t.task_id, t.key.hex(), t.target_id, t.group, t.token, t.tries,
                   t.batch_limit], t.payload)
        for t in tasks
    )  # fmt: skip


def share_command(worker_id: int, task_id: int, others: int) -> bytes:
    return wire.pack([wire.SHARE, worker_id, task_id, others])


def stop_task_command(worker_id: int, task_id: int, *, pauses: bool) -> bytes:
    return wire.pack([wire.STOP_TASK, worker_id, task_id, pauses])


def revoke_command(worker_id: int) -> bytes:
    return wire.pack([wire.REVOKE, worker_id])


def confirm_command(worker_id: int, serial: int) -> bytes:
    return wire.pack([wire.CONFIRMED, worker_id, serial])


def end_command(worker_id: int, *, kill: bool) -> bytes:
    return wire.pack([END, worker_id, kill])


def close_command() -> bytes:
    return wire.pack([CLOSE])


class CommandReader:
    """Applies frames to an executor; a SEND and its tasks may arrive in pieces."""

    def __init__(self, executor: TakesCommands) -> None:
        self._executor = executor
        self._head: list[Any] | None = None
        self._tasks: list[Task] = []
        self.is_closed = False

    def apply(self, frames: Iterable[Frame]) -> None:
        for header, body in frames:
            self._apply(header, body)

    def _apply(self, header: list[Any], body: bytes) -> None:
        match header[0]:
            case "start":
                record = orjson.loads(body)
                slot = SlotSpec(**{**record, "devices": tuple(record["devices"])})
                self._executor.start(header[1], slot)
            case "send":
                self._head, self._tasks = header, []
            case "task":
                self._take(header, body)
            case "share":
                self._executor.share(*header[1:])
            case "stop_task":
                self._executor.stop_task(header[1], header[2], pauses=header[3])
            case "revoke":
                self._executor.revoke(header[1])
            case wire.CONFIRMED:
                self._executor.confirm(header[1], header[2])
            case "end":
                self._executor.end(header[1], kill=header[2])
            case "close":
                self.is_closed = True

    def _take(self, header: list[Any], body: bytes) -> None:
        _, task_id, key, target_id, group, token, tries, batch_limit = header
        self._tasks.append(
            Task(task_id, bytes.fromhex(key), target_id, body, group, token, tries,
                 batch_limit=batch_limit)
        )  # fmt: skip
        assert self._head is not None
        _, worker_id, together, count = self._head
        if len(self._tasks) == count:
            self._executor.send(worker_id, self._tasks, together=together)
            self._head, self._tasks = None, []


# ---------------------------------------------------------------- events, from a pilot


def pack_event(event: Event) -> bytes:
    """The frames of an event that an executor reports."""
    match event:
        case WorkerReady(worker_id, pid):
            return wire.pack([wire.READY, worker_id, pid])
        case TargetBroken(worker_id, message, trace):
            body = orjson.dumps([wire.clean(message), wire.clean(trace)])
            return wire.pack([wire.BROKEN, worker_id], body)
        case Results(worker_id, finished):
            head = wire.pack([RESULTS, worker_id, len(finished)])
            return head + b"".join(map(wire.pack_finished, finished))
        case Returned(worker_id, task_ids):
            return wire.pack([wire.RETURNED, worker_id], orjson.dumps(list(task_ids)))
        case Progress(worker_id, task_id, text, numbers):
            return wire.pack([wire.PROGRESS, worker_id, task_id, wire.clean(text), dict(numbers)])
        case Logged(worker_id, task_id, token, serial, points):
            return wire.pack([wire.METRICS, worker_id, task_id, token, serial], points)
        case Divided(worker_id, task_id, token, kept, given):
            body = canonical.encode([dict(kept), [dict(params) for params in given]])
            return wire.pack([wire.DIVIDED, worker_id, task_id, token], body)
        case WorkerDied():
            texts = {"reason", "trace", "stuck"}
            record = {k: wire.clean(v) if k in texts else v for k, v in event._asdict().items()}
            return wire.pack([DIED], orjson.dumps(record))
    raise TypeError(f"an executor does not report {type(event).__name__}")


class EventReader:
    """Frames back into events; Results and what belongs to them may arrive in pieces."""

    def __init__(self) -> None:
        self._worker_id = 0
        self._missing = 0
        self._finished: list[Any] = []

    def read(self, frames: Iterable[Frame]) -> Iterator[Event]:
        for header, body in frames:
            event = self._event(header, body)
            if event is not None:
                yield event

    def _event(self, header: list[Any], body: bytes) -> Event | None:
        match header[0]:
            case wire.READY:
                return WorkerReady(header[1], header[2])
            case wire.BROKEN:
                message, trace = orjson.loads(body)
                return TargetBroken(header[1], message, trace)
            case "results":
                _, self._worker_id, self._missing = header
                self._finished = []
                return None if self._missing else Results(self._worker_id, [])
            case wire.RESULT:
                self._finished.append(wire.read_finished(header, body))
                whole = len(self._finished) == self._missing
                return Results(self._worker_id, self._finished) if whole else None
            case wire.RETURNED:
                return Returned(header[1], orjson.loads(body))
            case wire.PROGRESS:
                return Progress(*header[1:])
            case wire.METRICS:
                _, worker_id, task_id, token, serial = header
                return Logged(worker_id, task_id, token, serial, body)
            case wire.DIVIDED:
                kept, given = canonical.decode(body)
                return Divided(header[1], header[2], header[3], kept, given)
            case "died":
                record = orjson.loads(body)
                if record["outcome"] is not None:
                    record["outcome"] = Outcome(record["outcome"])
                return WorkerDied(**record)
        raise ValueError(f"an event called {header[0]!r} is not known")
