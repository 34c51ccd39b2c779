"""A worker that began after an update of Muster, and its coordinator from before."""

from __future__ import annotations

import socket

from muster.farm import wire
from muster.farm.worker.inbox import Inbox


def test_a_frame_that_is_not_known_ends_the_run_with_a_sentence() -> None:
    """It was left out, and its task waited for ever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)  # the answer is there once it has been heard
        inbox = Inbox(theirs)
        inbox._hear(["task", 1, 1, 0, "ab", 1, 0], b"{}")
        buffer = bytearray(ours.recv(1 << 16))
        [(header, _)] = list(wire.unpack(buffer))
        assert header[0] == wire.BROKEN and "Muster was changed" in header[1]
        assert inbox.take() is None
