"""Ports for what is told its port before it listens there."""

from __future__ import annotations

import random
import socket

#: Below those that the kernel gives to whoever names none, those that Muster tries for Ray, and
#: those that Ray gives to its workers (10,002 to 19,999), which its head refuses for itself.
_PORTS = range(2_000, 10_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port at which nobody listens. One that the kernel has given, and that was let go of, may be
    given to any other process before it is used; this is not."""
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        with socket.socket() as attempt:
            try:
                attempt.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError(f"there is no free port at {host}")
