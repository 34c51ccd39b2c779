"""What a worker hears and says while a task runs.

Orders are received in a thread, so that a busy worker still answers a revoke and sees an end; a
running task speaks to the coordinator through its line.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from muster.base.held_memory import tree
from muster.farm import canonical, wire

_CHUNK = 1 << 18

Message = tuple[list[Any], bytes]
#: How a task is told to end early: at once, or at its next checkpoint.
Halt = Literal["stop", "pause"]


class Inbox:
    """The orders of a worker, first come, first served; it is also the worker's only sender."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._orders: deque[list[Message]] = deque()
        self._call: list[Message] = []
        self._arrived = threading.Condition()
        self._sending = threading.Lock()
        self._wish = (0, 0)
        self.num_sent = 0  # frames of metrics
        self.confirmed = 0  # the last of them that the coordinator has recorded
        self.is_warned = False  # the place of this worker will soon be taken from it
        self._halted: dict[int, bool] = {}  # tasks told to end early; whether they pause
        self._program: tuple[int, int, bool] | None = None  # the task's; see ``runs``
        self._halting = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._receive, name="muster-inbox", daemon=True).start()

    def take(self) -> list[Message]:
        """One message, or for a joint call its head and all of its tasks."""
        with self._arrived:
            while not self._orders:
                self._arrived.wait()
            return self._orders.popleft()

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
            try:
                self._connection.sendall(frame)
            except OSError:
                end_with_coordinator()

    def _receive(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._connection.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                end_with_coordinator()
            buffer += data
            for message in list(wire.unpack(buffer)):
                if message[0][0] == wire.REVOKE:
                    self._revoke()
                elif message[0][0] == wire.WARN:
                    self.is_warned = True
                elif message[0][0] == wire.CONFIRMED:
                    self.confirmed = max(self.confirmed, message[0][1])
                elif message[0][0] == wire.STOP_TASK:
                    self._halt(*message[0][1:])
                elif message[0][0] == wire.SHARE:
                    _, task_id, others = message[0]
                    self._wish = (task_id, others)
                else:
                    self._add(message)

    def _add(self, message: Message) -> None:
        if message[0][0] == wire.TASK:
            self._halted.pop(message[0][1], None)  # of an earlier attempt
        if self._call or message[0][0] == wire.TOGETHER:
            self._call.append(message)
            num_tasks = self._call[0][0][1]
            if len(self._call) <= num_tasks:
                return
            order, self._call = self._call, []
        else:
            order = [message]
        with self._arrived:
            self._orders.append(order)
            self._arrived.notify()

    def _revoke(self) -> None:
        """Hand back the tasks that have not begun; they leave the queue, so they cannot begin."""
        returned: list[int] = []
        with self._arrived:
            for _ in range(len(self._orders)):
                order = self._orders.popleft()
                if order[0][0][0] in (wire.TASK, wire.TOGETHER):
                    returned += [header[1] for header, _ in order if header[0] == wire.TASK]
                else:
                    self._orders.append(order)
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
