"""Who hears that a program is to end: all processes of it, or only a launcher of ours."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import psutil
import pytest

from muster.farm.worker.inbox import Inbox

_LIMIT_S = 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="it has no /bin/sh")
@pytest.mark.parametrize("passes_on", [False, True])
def test_a_launcher_tells_its_own_processes(passes_on: bool) -> None:
    program = subprocess.Popen(["/bin/sh", "-c", "trap 'exit 75' TERM; sleep 600 & wait"])
    deadline = time.monotonic() + _LIMIT_S
    # A signal between the fork and the exec is the shell's, which has a trap for it.
    below: list[psutil.Process] = []
    while [one.name() for one in below] != ["sleep"]:
        below = psutil.Process(program.pid).children()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(ours)
        inbox.runs(7, program.pid, passes_on=passes_on)
        inbox._halt(7, True)
    assert program.wait(timeout=_LIMIT_S) == 75
    if passes_on:
        assert below[0].is_running()
        below[0].kill()
    else:
        psutil.wait_procs(below, timeout=_LIMIT_S)
        assert not below[0].is_running()
