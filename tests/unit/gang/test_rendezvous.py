"""Where the store of a gang listens."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from muster.supervisor.rendezvous import GangRendezvous

LOOPBACK = "0100007F"


def addresses(port: int) -> set[str]:
    """The local addresses, as the kernel writes them, at which somebody listens on ``port``."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, _, hex_port = line.split()[1].partition(":")
            if line.split()[3] == "0A" and int(hex_port, 16) == port:
                found.add(address)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_store_of_one_node_is_not_for_other_hosts() -> None:
    rendezvous = GangRendezvous("run", 0, 1, "127.0.0.1", 0, 10.0)
    try:
        ports = set()
        for _ in range(2):  # each round has a store of its own
            info = rendezvous.next_rendezvous()
            ports.add(info.bootstrap_store_info.master_port)
            info.store.set("key", "value")
            assert info.store.get("key") == b"value"
        assert len(ports) == 2
        for port in ports:
            assert addresses(port) == {LOOPBACK}
            with socket.create_connection(("127.0.0.1", port), timeout=300):
                pass
    finally:
        rendezvous.shutdown()
