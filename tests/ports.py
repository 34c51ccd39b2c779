"""Ports for what is told its port before it listens there."""

from __future__ import annotations

import random
import socket

#: Below those that the kernel gives to whoever names none, those that Muster tries for Ray, and
#: those that Ray gives to its workers (10,002 to 19,999), which its head refuses for itself.
_PORTS = range(2_000, 10_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports at which nobody listens. A port that the kernel has given, and that was let
    go of, may be given to any other process before it is used; these are not."""
    found: list[int] = []
    for port in random.Random().sample(_PORTS, len(_PORTS)):
        with socket.socket() as attempt:
            try:
                attempt.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"there are no {count} free ports at {host}")


def free_port(host: str = "127.0.0.1") -> int:
    """One of these."""
    [port] = free_ports(1, host)
    return port
