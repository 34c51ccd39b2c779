"""A process that has imported what workers need, and is forked into them on request.

It is started while the coordinator still imports and plans, has one thread, and touches no device.
Each worker is forked twice: once the process between the two has ended, the kernel makes the worker
a child of the coordinator, which collects its exit as that of any other.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence

from muster.base.processes import RUN_MARKER
from muster.base.reaper import die_with_parent
from muster.base.settings import replace_environment, show_in_place

#: How long a worker waits to become a child of the coordinator; it takes some microseconds.
_ADOPTED_WITHIN_S = 5.0
MESSAGE_BYTES = 1 << 17
#: What stands in the environment of this process for the mark of a run, which no run has yet.
NO_MARK_YET = "-" * 80


def serve(argv: Sequence[str]) -> list[str] | None:
    """Called with [SOCKET, COORDINATOR_PID, MODULES...]: fork until the socket is closed.

    Returns None then, and in each forked worker the arguments for it.
    """
    coordinator = int(argv[1])
    die_with_parent(coordinator)
    connection = socket.socket(fileno=int(argv[0]))
    connection.set_inheritable(False)
    for name in argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker would copy the pages of everything imported
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not data:
            return None
        pid = _fork_twice()
        if pid == 0:
            connection.close()
            return _become_worker(json.loads(data), descriptors, coordinator)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _fork_twice() -> int:
    """The number of the new process; 0 in it."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(write_end, str(pid).encode())
            os._exit(0)
        os.close(read_end)
        os.close(write_end)
        return 0
    os.close(write_end)
    os.waitpid(between, 0)
    with os.fdopen(read_end, "rb") as pipe:
        return int(pipe.read())


def _become_worker(
    environment: dict[str, str], descriptors: list[int], coordinator: int
) -> list[str]:
    deadline_s = time.monotonic() + _ADOPTED_WITHIN_S
    while os.getppid() != coordinator:
        if time.monotonic() > deadline_s:  # it has ended
            os._exit(70)
        time.sleep(0.0002)
    os.setsid()
    connection, log, lifeline = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    show_in_place(RUN_MARKER, NO_MARK_YET, environment[RUN_MARKER])
    replace_environment(environment)
    arguments = [str(connection), str(coordinator), str(lifeline)]
    sys.argv[1:] = arguments
    return arguments
