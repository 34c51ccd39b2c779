"""Ports of a host that lead to other hosts, held for as long as anything of the start lives there.

ssh would listen on them only while its connection lives: whoever took one after that would be sent
Ray's token by the Ray that looks for the lost host. So this process listens, from before Ray starts
until it has ended, and leads on to unix sockets that ssh makes, as long as these are this user's.
It is imported by the far end (``use``).
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

#: Where the sockets are; their names are short, and in a sticky folder nobody replaces another's.
HOME, NAME = Path("/tmp"), "muster-port-"
_BLOCK = 1 << 18
_LIMIT_S = 30.0
_WORD = b"muster"


def calls(folder: list[str]) -> dict[str, Callable[..., Any]]:
    """The far end's further calls. ``folder``: what it removes at its end, after all that runs."""
    relay = _Relay(folder)
    return {"are_free": are_free, "lead": relay.lead, "answer": answer, "hear": hear}


def are_free(address: str, first: int, count: int) -> bool:
    """Whether nobody listens on any of so many ports in a row."""
    for port in range(first, first + count):
        try:
            socket.create_server((address, port)).close()
        except OSError:
            return False
    return True


def answer(address: str, port: int) -> None:
    """Let the next who connects to the port ``hear`` that it leads here."""
    server = socket.create_server((address, port))

    def take() -> None:
        with server, suppress(OSError):
            server.settimeout(_LIMIT_S)
            line, _ = server.accept()
            with line:
                line.settimeout(_LIMIT_S)
                line.sendall(_WORD)
                line.recv(1)  # who listens is not to close first: Ray needs the port next

    threading.Thread(target=take, daemon=True).start()


def hear(address: str, port: int) -> bool:
    """Whether the port leads to where somebody answers."""
    try:
        with socket.create_connection((address, port), timeout=_LIMIT_S) as line:
            return line.recv(len(_WORD)) == _WORD
    except OSError:
        return False


class _Relay:
    """Its thread starts with the first port."""

    def __init__(self, left: list[str]) -> None:
        self._left = left
        self._places: dict[int, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        _remove_dead()

    def lead(self, address: str, places: Mapping[str, str]) -> list[int]:
        """Listen on each port, and lead who connects there to this socket from now on; "" is for
        one that is only held so far. Returns the ports that somebody else listens on."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        taken = []
        for text, place in places.items():
            port = int(text)
            if port not in self._places:
                try:
                    listener = socket.create_server((address, port))
                except OSError:
                    taken.append(port)
                    continue
                serving = asyncio.start_server(
                    partial(self._carry, port), sock=listener, limit=_BLOCK
                )
                asyncio.run_coroutine_threadsafe(serving, self._loop).result()
            self._places[port] = place
            if place:
                self._left.append(place)
        return taken

    async def _carry(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            there, back = await asyncio.open_unix_connection(self._places[port], limit=_BLOCK)
        except OSError:  # the connection to that host is lost
            writer.close()
            return
        if _is_ours(back.get_extra_info("socket")):
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        for each in (writer, back):
            each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_BLOCK):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _is_ours(line: socket.socket) -> bool:
    """Whether who listens at the other end is this user, or root, whom ssh's server may be."""
    if sys.platform != "linux":  # nobody says so there, and nothing is handed over
        return False
    about = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", about)[1] in (0, os.getuid())


def _remove_dead() -> None:
    """Sockets of starts that were killed: nobody listens at them any more."""
    for path in HOME.glob(f"{NAME}*"):
        with suppress(OSError):
            about = path.lstat()
            if stat.S_ISSOCK(about.st_mode) and about.st_uid == os.getuid():
                with socket.socket(socket.AF_UNIX) as line, suppress(TimeoutError):
                    line.settimeout(1.0)
                    try:
                        line.connect(str(path))
                    except ConnectionRefusedError:
                        path.unlink()
