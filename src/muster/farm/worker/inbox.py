"""What a worker hears and says while a task runs.

Orders are received in a thread, so that a busy worker still answers a revoke and sees an end; a
running task speaks to the coordinator through its line.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from muster.base.host_memory import tree
from muster.farm import canonical, wire
from muster.farm.held_results import Held
from muster.farm.task import Order

_CHUNK = 1 << 18
#: How long results wait for those that follow, and how often it is looked for some that wait longer
#: because the task behind them is a long one.
_HOLD_S, _LOOK_S = 0.001, 0.02

_OTHER_MUSTER = (
    "Muster was changed while this run goes on: a worker that has begun since does not understand "
    "its coordinator. Start the run again; everything finished is saved."
)
#: A task, the tasks of one call, or None: the worker is to end.
Entry = Order | list[Order] | None
#: How a task is told to end early: at once, or at its next checkpoint.
Halt = Literal["stop", "pause"]


class Inbox:
    """The orders of a worker, first come, first served; it is also the worker's only sender."""

    def __init__(self, connection: socket.socket, held: Held | None = None) -> None:
        """``held``: where results may wait; None: each is sent at once."""
        self._connection = connection
        self._held = held
        self._sent_s = 0.0
        self._setup: SimpleQueue[bytes] = SimpleQueue()
        self._entries: SimpleQueue[Entry] = SimpleQueue()
        self._sending = threading.Lock()
        self._wish = (0, 0)
        self.num_sent = 0  # frames of metrics
        self.confirmed = 0  # the last of them that the coordinator has recorded
        self.is_warned = False  # the place of this worker will soon be taken from it
        self._halted: dict[int, bool] = {}  # tasks told to end early; whether they pause
        self._program: tuple[int, int, bool] | None = None  # the task's; see ``runs``
        self._halting = threading.Lock()

    def start(self) -> None:
        if self._held is not None:
            os.register_at_fork(after_in_child=self._hold_nothing)
        threading.Thread(target=self._receive, name="muster-inbox", daemon=True).start()

    def take_setup(self) -> bytes:
        """What the worker is told first: what it will run, and where."""
        return self._setup.get()

    def take(self) -> Entry:
        """What is to be done next; it waits for that."""
        return self._entries.get()

    def wanted(self, task_id: int) -> int:
        """How many other workers wait for a part of this task."""
        asked_for, others = self._wish
        return others if asked_for == task_id else 0

    def halted(self, task_id: int) -> Halt | None:
        """Whether this task was told to end early, and how."""
        pauses = self._halted.get(task_id)
        return None if pauses is None else "pause" if pauses else "stop"

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None:
        """Note the program that does a task: it gets SIGTERM when the task is told to end, and so
        do all processes below it, unless it ``passes_on`` what it is told.
        """
        with self._halting:
            self._program = None if pid is None else (task_id, pid, passes_on)
            self._end_program(task_id)

    def _halt(self, task_id: int, pauses: bool) -> None:
        with self._halting:
            self._halted[task_id] = pauses
            self._end_program(task_id)

    def _end_program(self, task_id: int) -> None:
        if self._program is not None and self._program[0] == task_id and task_id in self._halted:
            _, program, passes_on = self._program
            # A loader that a rank of ours lost to a signal would be a crash, where it is to save.
            for pid in [program] if passes_on else tree(program):
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)

    def answered(self) -> None:
        self._wish = (0, 0)

    def send(self, frame: bytes) -> None:
        with self._sending:
            self._send_held()
            self._send(frame)

    def send_result(self, frame: bytes) -> None:
        """Send it, or have it wait for results that follow within a millisecond."""
        held = self._held
        if held is None:
            self.send(frame)
            return
        with self._sending:
            if not held.add(frame):
                self._send_held()
                self._send(frame)
            elif self._entries.empty() or time.monotonic() - self._sent_s > _HOLD_S:
                self._send_held()

    def flush(self) -> None:
        """Send what waits."""
        with self._sending:
            self._send_held()

    def _send_held(self) -> None:
        if self._held:
            with self._held.frames() as frames:
                self._send(frames)
            self._held.clear()
            self._sent_s = time.monotonic()

    def _send(self, frame: bytes | memoryview) -> None:
        try:
            self._connection.sendall(frame)
        except OSError:
            end_with_coordinator()

    def _hold_nothing(self) -> None:
        """In a child of a task: what waits, waits in memory that it shares with us."""
        self._held = None

    def _wait(self) -> None:
        """Wait for orders, and meanwhile send results that wait behind a long task."""
        if self._held is None:
            return
        poll = select.poll()  # `select` knows no descriptor above 1,023
        poll.register(self._connection, select.POLLIN)
        while True:
            # The queue first: what was taken out of it found the result before it held.
            may_wait = not self._entries.empty() or bool(self._held)
            if poll.poll(1000 * _LOOK_S if may_wait else None):
                return
            self.flush()

    def _receive(self) -> None:
        buffer = bytearray()
        while True:
            try:
                self._wait()
                data = self._connection.recv(_CHUNK)
            except (OSError, ValueError):  # a task may have closed the connection
                data = b""
            if not data:
                end_with_coordinator()
            buffer += data
            for header, body in wire.unpack(buffer):
                self._hear(header, body)

    def _hear(self, header: list[Any], body: bytes) -> None:
        match header[0]:
            case wire.TASKS:
                self._add(*wire.read_tasks(header, body))
            case wire.REVOKE:
                self._revoke()
            case wire.WARN:
                self.is_warned = True
            case wire.CONFIRMED:
                self.confirmed = max(self.confirmed, header[1])
            case wire.STOP_TASK:
                self._halt(*header[1:])
            case wire.SHARE:
                self._wish = (header[1], header[2])
            case wire.SETUP:
                self._setup.put(body)
            case wire.STOP:
                self._entries.put(None)
            case _:  # of a coordinator that has run since before an update: it would wait for ever
                self.send(wire.pack([wire.BROKEN, _OTHER_MUSTER]))
                self._entries.put(None)

    def _add(self, orders: list[Order], together: bool) -> None:
        if self._halted:  # of an earlier attempt
            for order in orders:
                self._halted.pop(order.task_id, None)
        for entry in [orders] if together else orders:
            self._entries.put(entry)

    def _revoke(self) -> None:
        """Hand back the tasks that have not begun; they leave the queue, so they cannot begin."""
        returned: list[int] = []
        is_to_end = False
        with suppress(Empty):
            while True:
                entry = self._entries.get_nowait()
                if entry is None:
                    is_to_end = True
                else:
                    orders = [entry] if isinstance(entry, Order) else entry
                    returned += [order.task_id for order in orders]
        if is_to_end:
            self._entries.put(None)
        self.send(wire.pack([wire.RETURNED], ",".join(map(str, returned)).encode()))


def end_with_coordinator() -> None:
    """End this worker and everything in its process group, now that its coordinator is gone."""
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)


_MAX_TEXT = 500


class Line(Protocol):
    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None: ...

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        """Send points; returns the serial number that ``confirmed`` reaches once they are safe.

        ``serial``: a negative number of the caller's own, which is never confirmed.
        """

    #: Whether points are confirmed while their task runs.
    confirms_meanwhile: bool

    def confirmed(self) -> int:
        """The serial number up to which all points have been recorded."""

    def wanted(self, task_id: int) -> int:
        """How many other workers wait for a part of this task."""

    def should_stop(self) -> bool:
        """Whether this worker's place will soon be taken from it."""

    def halted(self, task_id: int) -> Halt | None:
        """Whether this task was told to end early: at once, or at its next checkpoint."""

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None:
        """Note the process that does a task, so that it can be told to end; None: it has ended.

        ``passes_on``: it tells the processes below it by itself.
        """

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

    confirms_meanwhile = True

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None:
        shown = wire.clean(text)[:_MAX_TEXT]
        self._inbox.send(wire.pack([wire.PROGRESS, task_id, shown, dict(numbers)]))

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        if serial is None:
            # One thread at a time logs for the one task at work, so the numbers are in order.
            self._inbox.num_sent += 1
            serial = self._inbox.num_sent
        self._inbox.send(wire.pack([wire.METRICS, task_id, token, serial], body))
        return serial

    def confirmed(self) -> int:
        return self._inbox.confirmed

    def wanted(self, task_id: int) -> int:
        return self._inbox.wanted(task_id)

    def should_stop(self) -> bool:
        return self._inbox.is_warned

    def halted(self, task_id: int) -> Halt | None:
        return self._inbox.halted(task_id)

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None:
        self._inbox.runs(task_id, pid, passes_on=passes_on)

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        self._inbox.answered()
        body = canonical.encode([dict(kept), [dict(params) for params in given]])
        self._inbox.send(wire.pack([wire.DIVIDED, task_id, token], body))
