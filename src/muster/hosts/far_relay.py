"""Ports of a host that lead to other hosts, held for as long as anything of the start lives there.

ssh would listen on them only while its connection lives: whoever took one after that would be sent
Ray's token by the Ray that looks for the lost host. So this process listens, from before Ray starts
until it has ended, and leads on to unix sockets that ssh makes, as long as these are this user's.
It is imported by the far end (``use``).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from muster.base.errors import SetupError
from muster.base.processes import allow_files
from muster.base.shown_text import count

#: Where the sockets are; their names are short, and in a sticky folder nobody replaces another's.
HOME, NAME = Path("/tmp"), "muster-port-"
_BLOCK = 1 << 18
#: Only for what hangs: a machine may be busy, and a link slow.
_LIMIT_S = 60.0
_WORD, _HEARD = b"muster", b"!"
#: For one of those who connect, where another may be kept waiting by it.
_ONE_LIMIT_S = 5.0
_PAUSE_S = 0.05
#: A socket that is younger may be one that an ssh has made and does not listen at yet: it is looked
#: at once more, so much later.
_MADE_S, _LISTENS_S = 60.0, 1.0
#: Files beside the ports that are held: what they lead on, and the interpreter's own.
_FILES_BESIDE = 64


def calls(folder: list[str]) -> dict[str, Callable[..., Any]]:
    """The far end's further calls. ``folder``: what it removes at its end, after all that runs."""
    relay = _Relay(folder)
    return {"are_free": are_free, "lead": relay.lead, "answer": answer, "hear": hear}


def are_free(address: str, first: int, num: int, is_for_ray: bool = False) -> bool:
    """Whether nobody listens on any of so many ports in a row. For Ray a port is taken as well that
    somebody has at another address, or whose connections have ended within the last minute.
    """
    for port in range(first, first + num):
        if is_for_ray and not _can_be_bound(port):
            return False
        found = _listener(address, port)
        if found is None:
            return False
        found.close()
    return True


def _can_be_bound(port: int) -> bool:
    """At every address and without SO_REUSEADDR, as Ray asks."""
    with socket.socket() as attempt:
        try:
            attempt.bind(("", port))
        except OSError:
            return False
    return True


def _listener(address: str, port: int) -> socket.socket | None:
    """None where somebody listens there already. Raises SetupError where this process cannot."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise SetupError(f"Port {port} of {address} cannot be held: {error.strerror}.") from None


def answer(address: str, port: int) -> None:
    """Let who connects to the port ``hear`` that it leads here. Others may connect before, who do
    not say that they have heard it. Until then it waits as long as this process lives: other hosts
    may be heard before this one, for as long as each of them takes.
    """
    server = socket.create_server((address, port))

    def take() -> None:
        was_heard = False
        with server:
            while not was_heard:
                try:
                    line, _ = server.accept()
                    with line:
                        line.settimeout(_ONE_LIMIT_S)
                        line.sendall(_WORD)
                        was_heard = line.recv(1) == _HEARD
                        if was_heard:
                            line.settimeout(_LIMIT_S)
                            line.sendall(_HEARD)
                            line.recv(1)  # the other end closes first: Ray needs the port next
                except OSError:
                    time.sleep(_PAUSE_S)

    threading.Thread(target=take, daemon=True).start()


def hear(address: str, port: int) -> bool:
    """Whether the port leads to where somebody answers. Where that one did not wait until it was
    told that this was heard, it is asked again: it would keep the port."""
    due_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < due_s:
        is_there = False
        with suppress(OSError), socket.create_connection((address, port), timeout=_LIMIT_S) as line:
            is_there = line.recv(len(_WORD)) == _WORD
            line.sendall(_HEARD)
            if is_there and line.recv(1) == _HEARD:
                return True
        if not is_there:
            break
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
        one that is only held so far. Returns the ports that somebody else listens on. Raises
        SetupError where this process may not hold so many."""
        num_ports = len({*self._places, *map(int, places)})
        most = allow_files(num_ports + _FILES_BESIDE)
        if most < num_ports + _FILES_BESIDE:
            raise SetupError(
                f"{count(num_ports, 'port')} of other hosts are to be held here, and a process may "
                f"have {most:,} files open (ulimit -Hn).",
                hint="allow more (nofile in /etc/security/limits.conf, LimitNOFILE of a service), "
                "or use fewer hosts or workers.",
            )
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        taken = []
        for text, place in places.items():
            port = int(text)
            if port not in self._places:
                listener = _listener(address, port)
                if listener is None:
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
    """Sockets of starts that were killed: nobody listens at them any more. Those at which somebody
    does here are not connected to, which another start would take for its own question; of another
    network namespace that has this folder too, they are not seen here.
    """
    live = b""
    with suppress(OSError):
        live = Path("/proc/net/unix").read_bytes()
    dead = [path for path in HOME.glob(f"{NAME}*") if os.fsencode(path) not in live]
    dead = [path for path in dead if _is_dead(path)]
    if any(time.time() - _made_s(path) < _MADE_S for path in dead):
        time.sleep(_LISTENS_S)
        dead = [path for path in dead if _is_dead(path)]
    for path in dead:
        path.unlink(missing_ok=True)


def _made_s(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _is_dead(path: Path) -> bool:
    """Whether it is a socket of this user's at which nobody listens."""
    with suppress(OSError):
        about = path.lstat()
        if stat.S_ISSOCK(about.st_mode) and about.st_uid == os.getuid():
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(1.0)
                try:
                    line.connect(str(path))
                except ConnectionRefusedError:
                    return True
    return False
