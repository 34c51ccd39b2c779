"""Sockets between the ranks of one host, for the small sums that end every step.

gloo adds a few numbers with a dozen messages through two threads of each rank. Here each rank sends
its numbers to every other and adds up what it gets: a tenth of the processor time.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

#: So many numbers fit into a socket's buffer several times, so that no rank waits while it sends.
MOST_NUMBERS = 512
#: Of more ranks, each would send more messages than gloo does.
_MOST_RANKS = 32
_RANK = struct.Struct("i")
#: In front of the numbers: which sum it is, and how many they are.
_HEAD = struct.Struct("II")
#: Else a program that has set SIGPIPE to its default would be ended by sending to a dead rank.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)


class PeerSockets:
    """A socket to each other rank; sums are made one after the other, in one order on all ranks.

    ``sockets``: in the order of ranks, None at this rank's own place. Raises RuntimeError, as gloo
    does, when another rank has gone, says nothing for too long, or is at another sum.
    """

    def __init__(self, sockets: Sequence[socket.socket | None], timeout_s: float) -> None:
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._own: tuple[float, ...] | None = None  # of the sum that has begun
        self._number = 0

    def begin(self, values: Sequence[float]) -> int:
        """Send this rank's part of a sum; `end` gives it, by the number that this returns."""
        if self._own is not None:  # nobody has asked for it, and its parts come before the next's
            self.end(self._number)
        self._own = tuple(values)
        self._number = (self._number + 1) % 2**32
        data = self._head() + struct.pack(f"{len(values)}d", *values)
        for rank, each in enumerate(self._sockets):
            if each is not None:
                try:
                    each.sendall(data, _NO_SIGNAL)
                except OSError as error:
                    raise _gone(rank, error) from None
        return self._number

    def end(self, number: int) -> list[float]:
        """The sum of all ranks' parts, with the same bits on each: added in the order of ranks."""
        if self._own is None or number != self._number:
            raise RuntimeError(f"sum {number} was not waited for before the next one was begun")
        head, own, self._own = self._head(), self._own, None
        form, until_s = struct.Struct(f"{len(own)}d"), time.monotonic() + self._timeout_s
        parts = [
            own if each is None else form.unpack(_received(rank, each, form.size, head, until_s))
            for rank, each in enumerate(self._sockets)
        ]
        return [sum(column) for column in zip(*parts, strict=True)]

    def _head(self) -> bytes:
        assert self._own is not None
        return _HEAD.pack(self._number, len(self._own))

    def close(self) -> None:
        for each in filter(None, self._sockets):
            each.close()


def _received(
    rank: int, peer: socket.socket, size: int, head: bytes = b"", until_s: float = math.inf
) -> bytes:
    """What comes from a rank behind ``head``."""
    data = b""
    while len(data) < len(head) + size:
        try:
            part = peer.recv(len(head) + size - len(data), _NO_WAIT)
        except BlockingIOError:
            if not _has_news(peer, until_s):
                raise RuntimeError(
                    f"rank {rank}: timed out waiting for its part of an agreement"
                ) from None
            continue
        except OSError as error:
            raise _gone(rank, error) from None
        if not part:
            raise RuntimeError(f"rank {rank}: connection closed by peer")
        data += part
        if not data.startswith(head[: len(data)]):
            raise RuntimeError(f"rank {rank} is at another sum")
    return data[len(head) :]


def _has_news(peer: socket.socket, until_s: float) -> bool:
    """Wait for it until then. The kernel's limit for a call (SO_RCVTIMEO) would begin anew with
    each signal; that of Python's sockets would poll before every call."""
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    left_s = until_s - time.monotonic()
    return bool(poll.poll(None if left_s == math.inf else max(0.0, left_s) * 1000))


def _gone(rank: int, error: OSError) -> RuntimeError:
    return RuntimeError(f"rank {rank}: {error.strerror or error}")


def connect_peers(
    rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], timeout_s: float
) -> PeerSockets | None:
    """Connect all ranks with each other; None, on every rank, where they are not on one host.

    ``gather`` gives every rank's value, in the order of ranks, on every rank.
    """
    if num_ranks > _MOST_RANKS:
        return None
    if rank == 0:
        _remove_left(2 * timeout_s)  # each of the two times that they gather may take so long
    with ExitStack() as stack:
        listening = _listen(stack, num_ranks)
        paths = gather(listening and listening.getsockname())
        lower = [_connect(each, rank) for each in paths[:rank]] if None not in paths else None
        is_met = lower is not None and None not in lower
        # All have connected, or none goes on: nobody waits for a rank that will not come.
        is_met = all(gather(is_met))
        found = dict(enumerate(lower or ()))
        if is_met and listening is not None:
            for _ in range(rank + 1, num_ranks):
                peer = _blocking(listening.accept()[0])
                found[_RANK.unpack(_received(rank, peer, _RANK.size))[0]] = peer
        if listening is not None:
            listening.close()
        if not is_met:
            for each in filter(None, found.values()):
                each.close()
            return None
    return PeerSockets([found.get(each) for each in range(num_ranks)], timeout_s)


def _remove_left(idle_s: float) -> None:
    """What ranks have left here that were killed while they connected."""
    left: list[Path] = []
    with suppress(OSError):  # a dead mount
        left += Path(tempfile.gettempdir()).glob("muster-*/rank")
    for path in left:
        with suppress(OSError):  # another user's, or gone meanwhile
            is_ours = path.parent.lstat().st_uid == os.getuid() and not path.parent.is_symlink()
            if is_ours and path.is_socket() and time.time() - path.stat().st_mtime > idle_s:
                path.unlink()
                path.parent.rmdir()


def _listen(stack: ExitStack, num_ranks: int) -> socket.socket | None:
    """None where that cannot be: no room for a folder, a long path, a system without it."""
    try:
        # Only this user may enter the folder; names in it end with it, connections do not.
        folder = tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True)
        listening = _blocking(socket.socket(socket.AF_UNIX))
        listening.bind(str(Path(stack.enter_context(folder)) / "rank"))
        listening.listen(num_ranks)
    except (OSError, AttributeError):
        return None
    return listening


def _connect(path: str, rank: int) -> socket.socket | None:
    peer = _blocking(socket.socket(socket.AF_UNIX))
    try:
        peer.connect(path)
        peer.sendall(_RANK.pack(rank), _NO_SIGNAL)
    except OSError:  # the path is another host's, or another container's
        peer.close()
        return None
    return peer


def _blocking(new: socket.socket) -> socket.socket:
    """Without the limit that the user's program may have set for all sockets."""
    new.setblocking(True)
    return new
