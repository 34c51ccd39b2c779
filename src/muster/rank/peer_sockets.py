"""Sockets between the ranks of one host, for the small sums that end every step.

gloo adds a few numbers with a dozen messages through two threads of each rank. Here each rank sends
its numbers to every other and adds up what it gets: a tenth of the processor time.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

#: So many numbers fit into a socket's buffer several times, so that no rank waits while it sends.
MOST_NUMBERS = 1024
#: Of more ranks, each would send more messages than gloo does.
_MOST_RANKS = 32
_RANK = struct.Struct("i")


class PeerSockets:
    """A socket to each other rank; sums are made one after the other, in one order on all ranks.

    ``sockets``: in the order of ranks, None at this rank's own place. Raises RuntimeError, as gloo
    does, when another rank has gone or says nothing for too long.
    """

    def __init__(self, sockets: Sequence[socket.socket | None], timeout_s: float) -> None:
        self._sockets = sockets
        self._own: tuple[float, ...] | None = None  # of the sum that has begun
        for each in filter(None, sockets):
            # By the kernel: Python's own timeouts would poll before every call.
            limit = struct.pack("ll", int(timeout_s), 0)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def begin(self, values: Sequence[float]) -> None:
        """Send this rank's part of a sum; `end` gives it."""
        if self._own is not None:  # nobody has asked for it, and its parts come before the next's
            self.end()
        self._own = tuple(values)
        data = struct.pack(f"{len(values)}d", *values)
        for rank, each in enumerate(self._sockets):
            if each is not None:
                try:
                    each.sendall(data)
                except OSError as error:
                    raise _gone(rank, error) from None

    def end(self) -> list[float]:
        """The sum of all ranks' parts, with the same bits on each: added in the order of ranks."""
        assert self._own is not None
        own, self._own = self._own, None
        form = struct.Struct(f"{len(own)}d")
        parts = [
            own if each is None else form.unpack(_received(rank, each, form.size))
            for rank, each in enumerate(self._sockets)
        ]
        return [sum(column) for column in zip(*parts, strict=True)]

    def close(self) -> None:
        for each in filter(None, self._sockets):
            each.close()


def _received(rank: int, peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = peer.recv(size - len(data), socket.MSG_WAITALL)
        except OSError as error:
            raise _gone(rank, error) from None
        if not part:
            raise RuntimeError(f"rank {rank}: connection closed by peer")
        data += part
    return data


def _gone(rank: int, error: OSError) -> RuntimeError:
    if isinstance(error, BlockingIOError):
        return RuntimeError(f"rank {rank}: timed out waiting for its part of an agreement")
    return RuntimeError(f"rank {rank}: {error.strerror}")


def connect_peers(
    rank: int, num_ranks: int, gather: Callable[[Any], list[Any]], timeout_s: float
) -> PeerSockets | None:
    """Connect all ranks with each other; None, on every rank, where they are not on one host.

    ``gather`` gives every rank's value, in the order of ranks, on every rank.
    """
    if num_ranks > _MOST_RANKS:
        return None
    with ExitStack() as stack:
        # Only this user may enter the folder; names in it end with it, connections do not.
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-"))) / "rank"
        listening = _listen(path, num_ranks)
        paths = gather(listening and str(path))
        lower = [_connect(each, rank) for each in paths[:rank]] if None not in paths else None
        is_met = lower is not None and None not in lower
        # All have connected, or none goes on: nobody waits for a rank that will not come.
        is_met = all(gather(is_met))
        found = dict(enumerate(lower or ()))
        if is_met and listening is not None:
            for _ in range(rank + 1, num_ranks):
                peer, _ = listening.accept()
                found[_RANK.unpack(_received(rank, peer, _RANK.size))[0]] = peer
        if listening is not None:
            listening.close()
        if not is_met:
            for each in filter(None, found.values()):
                each.close()
            return None
    return PeerSockets([found.get(each) for each in range(num_ranks)], timeout_s)


def _listen(path: Path, num_ranks: int) -> socket.socket | None:
    try:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(num_ranks)
    except (OSError, AttributeError):  # a long path, or a system without such sockets
        return None
    return listening


def _connect(path: str, rank: int) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(path)
        peer.sendall(_RANK.pack(rank))
    except OSError:  # the path is another host's, or another container's
        peer.close()
        return None
    return peer
