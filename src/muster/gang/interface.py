"""By which network interface this node reaches the others.

gloo takes the address that the host's own name resolves to, which on many machines is a loopback
address (Debian writes 127.0.1.1 into /etc/hosts): two nodes then never connect.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def interface_towards(host: str, port: int) -> str | None:
    """The interface with the address that packets to ``host`` leave from; None if unknown.

    Sends nothing. On the host itself it is the interface that has the address. Linux and IPv4
    only: elsewhere the user names it with GLOO_SOCKET_IFNAME.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))
        ours = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _address(probe, name) == ours), None)
    return None


def _address(probe: socket.socket, name: str) -> str | None:
    import fcntl

    request = struct.pack("256s", name.encode()[:15])
    with suppress(OSError):  # it has none
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
