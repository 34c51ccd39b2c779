"""Receives orders in a thread, so that a busy worker still answers a revoke and sees an end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import Any

from muster.farm import wire

_CHUNK = 1 << 18

Message = tuple[list[Any], bytes]


class Inbox:
    """Orders in the order they came; ``take`` blocks. Also the worker's only sender."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages: deque[Message] = deque()
        self._arrived = threading.Condition()
        self._sending = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._receive, name="muster-inbox", daemon=True).start()

    def take(self) -> Message:
        with self._arrived:
            while not self._messages:
                self._arrived.wait()
            return self._messages.popleft()

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
            messages = list(wire.unpack(buffer))
            if any(header[0] == wire.REVOKE for header, _ in messages):
                self._revoke(messages)
                continue
            with self._arrived:
                self._messages.extend(messages)
                self._arrived.notify()

    def _revoke(self, messages: list[Message]) -> None:
        """Hand back what has not begun: it is still in the queue, so it cannot begin any more."""
        with self._arrived:
            self._messages.extend(m for m in messages if m[0][0] != wire.REVOKE)
            returned = [header[1] for header, _ in self._messages if header[0] == wire.TASK]
            kept = [m for m in self._messages if m[0][0] != wire.TASK]
            self._messages.clear()
            self._messages.extend(kept)
            self._arrived.notify()
        self.send(wire.pack([wire.RETURNED], ",".join(map(str, returned)).encode()))


def end_with_coordinator() -> None:
    """Nobody listens any more: end this worker and everything in its process group, now."""
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)
