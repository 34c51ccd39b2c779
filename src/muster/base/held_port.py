"""A port that stays free for a program which will listen there a little later.

Who looks for a free port and lets go of it may find it taken: by another program that asks for any
port, or whose connection gets one. Here a socket stays bound to it and does not listen. Linux then
gives the port to nobody who has not named it, and lets a socket listen there that sets
SO_REUSEADDR, as the stores of torch do. Elsewhere that is not so, and the port is let go of.

``python -m muster.base.held_port`` prints a port and holds it until its standard input ends.
"""

from __future__ import annotations

import socket
import sys

_HELD: list[int] = []  # descriptors, of sockets that nobody closes


def held_port() -> int:
    """A port that is free on all addresses, held as long as this process lives."""
    is_dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_dual:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    port = int(held.getsockname()[1])
    if sys.platform == "linux":
        _HELD.append(held.detach())
    else:
        held.close()
    return port


if __name__ == "__main__":
    sys.stdout.write(f"{held_port()}\n")
    sys.stdout.flush()
    sys.stdin.read()
