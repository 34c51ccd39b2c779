"""How the supervisors of a gang meet: torch's rendezvous, for a fixed set of nodes.

Against the general one of torch it keeps ``--node-rank`` (there the order of the ranks follows the
names of the hosts), starts without a random delay, and gives every round a store of its own at a
port that the kernel has chosen, so that no key of an earlier round can be met again.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

_POLL_S = 0.05
_BACKLOG = 2048
_STORE_TIMEOUT = timedelta(seconds=300)


class GangRendezvous(RendezvousHandler):
    """Node 0 hosts the store where nodes meet, at ``addr:port``; one node needs none."""

    def __init__(
        self, run_id: str, node_rank: int, num_nodes: int, addr: str, port: int, join_s: float
    ) -> None:
        self._run_id = run_id
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._addr = addr
        self._port = port
        self._join_s = join_s
        self._round = 0
        self._meeting: TCPStore | None = None
        self._stores: list[TCPStore] = []

    def get_backend(self) -> str:
        return "muster"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the supervisor's store and open none themselves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        if self._num_nodes > 1:
            self._join()
        addr, port = self._addr, 0
        if self._node_rank == 0:
            host = self._host_store()
            self._stores = [*self._stores[-1:], host]  # ranks of the last round may still close
            port = host.port
            if self._meeting is not None:
                self._meeting.set(self._key("port"), str(port))
        else:
            assert self._meeting is not None
            port = int(self._meeting.get(self._key("port")))
            self._stores = [
                TCPStore(
                    addr, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
                )
            ]
        store = PrefixStore("muster/agents", self._stores[-1])
        info = RendezvousStoreInfo(master_addr=addr, master_port=port)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, info)

    def ranks_met(self) -> bool | None:
        """Whether ranks have made a process group; None where it cannot be told.

        Its backend leaves keys in the store that are none of ours.
        """
        if self._node_rank != 0 or not self._stores or not hasattr(TCPStore, "list_keys"):
            return None
        keys = self._stores[-1].list_keys()
        return any(not key.lstrip("/").startswith("muster/") for key in keys)

    def _host_store(self) -> TCPStore:
        """The store of this round; of one node on the loopback interface alone.

        Left to itself torch listens on all interfaces, and a store asks nobody for a password.
        """
        listening, port = None, 0
        if self._num_nodes == 1:
            with socket.create_server((self._addr, 0), backlog=_BACKLOG) as ours:
                port, listening = ours.getsockname()[1], ours.detach()
        return TCPStore(
            self._addr,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listening,
        )

    def is_closed(self) -> bool:
        return self._meeting is not None and bool(self._meeting.check([self._closed_key]))

    def set_closed(self) -> None:
        """Say that this node has given up, so that the others do not wait for it."""
        if self._meeting is not None:
            self._meeting.set(self._closed_key, "1")

    @property
    def _closed_key(self) -> str:
        return f"{self._run_id}/closed"

    def num_nodes_waiting(self) -> int:
        """How many nodes have failed and wait for this one in the next round."""
        if self._meeting is None:
            return 0
        return int(self._meeting.add(f"{self._run_id}/joined/{self._round + 1}", 0))

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._stores = []
        self._meeting = None
        return True

    def _join(self) -> None:
        deadline = time.monotonic() + self._join_s
        if self._meeting is None:
            self._meeting = TCPStore(
                self._addr,
                self._port,
                is_master=self._node_rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._join_s),
            )
        joined = int(self._meeting.add(self._key("joined"), 1))
        while joined < self._num_nodes:
            if self.is_closed():
                raise RendezvousClosedError("another node has given up")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{joined} of {self._num_nodes} nodes came to {self._addr}:{self._port} "
                    f"within {self._join_s:.0f} s"
                )
            time.sleep(_POLL_S)
            joined = int(self._meeting.add(self._key("joined"), 0))

    def _key(self, what: str) -> str:
        return f"{self._run_id}/{what}/{self._round}"


_SIOCGIFADDR = 0x8915


def interface_towards(host: str, port: int) -> str | None:
    """The network interface that packets to ``host`` leave from; None if it is not known.

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
