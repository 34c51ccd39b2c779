"""A held port is given to nobody who has not named it, and a store of torch can listen there."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from tests.ray_cluster import wait_for

from muster.base.held_port import held_port
from muster.hosts.far_program import calls
from muster.slurm.script import _MEETING

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not held")

#: Linux 6.3: the ports from which a socket that names none gets one.
IP_LOCAL_PORT_RANGE = 51
SCRIPT = """
scontrol() {
    case "$*" in *hostnames*) echo n1;; *) echo "NodeName=n1 NodeAddr=127.0.0.1 State=IDLE";; esac
}
"""


def is_given_away(port: int) -> bool:
    """Whether the kernel gives this port to somebody who binds to any, or who connects."""
    both = (port << 16 | port).to_bytes(4, sys.byteorder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for connects in (False, True):
            with socket.socket() as one:
                try:
                    one.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, both)
                except OSError:
                    pytest.skip("the kernel is older than 6.3")
                try:
                    if connects:
                        one.connect(server.getsockname())
                    else:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        one.bind(("127.0.0.1", 0))
                except OSError as error:
                    assert error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
                else:
                    assert one.getsockname()[1] == port
                    return True
    return False


@pytest.mark.parametrize("held", [held_port, calls([""])["held_port"]])
def test_nobody_gets_the_port_until_a_store_listens_there(held: object) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    assert callable(held)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert is_given_away(port)  # what was looked for and let go of
    port = held()
    assert not is_given_away(port)
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_job_of_slurm_holds_the_port_at_which_its_nodes_meet_to_its_end() -> None:
    script = "\n".join([SCRIPT, *_MEETING, 'echo "$address $port"', "read -r word"])
    with subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        address, port = job.stdout.readline().split()
        assert address == "127.0.0.1"
        assert not is_given_away(int(port))
        job.stdin.write("end\n")
        job.stdin.close()
    wait_for(lambda: is_given_away(int(port)), 120)
