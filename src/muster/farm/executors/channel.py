"""The coordinator's end of a stream to a worker: never blocks, whatever the worker does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from muster.farm import wire

_CHUNK = 1 << 18


class Channel:
    """``want_write`` is called with True when bytes wait to be sent, False when all are sent."""

    def __init__(self, connection: socket.socket, want_write: Callable[[bool], None]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._want_write = want_write
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def send(self, data: bytes) -> None:
        if self._outgoing:
            self._outgoing += data
            return
        sent = self._try_send(data)
        if sent < len(data):
            self._outgoing += data[sent:]
            self._want_write(True)

    def flush(self) -> None:
        """Send what waits, now that the socket takes bytes again."""
        sent = self._try_send(bytes(self._outgoing))
        del self._outgoing[:sent]
        if not self._outgoing:
            self._want_write(False)

    def receive(self) -> list[tuple[list[Any], bytes]]:
        """Return every whole frame that has arrived; a closed or broken stream has no more."""
        while True:
            try:
                data = self.socket.recv(_CHUNK)
            except (BlockingIOError, ConnectionError):
                break
            self._incoming += data
            if len(data) < _CHUNK:
                break
        return list(wire.unpack(self._incoming))

    def close(self) -> None:
        self.socket.close()

    def _try_send(self, data: bytes) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the worker is dying; its death is reported elsewhere
