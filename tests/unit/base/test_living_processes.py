"""Whether a process lives or is stopped, with and without /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from muster.base import processes
from muster.base.processes import is_alive, is_stopped


@pytest.mark.skipif(sys.platform == "win32", reason="Windows stops no process")
@pytest.mark.parametrize("has_proc", [True, False])
def test_a_process_lives_until_it_ends(has_proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_proc and not processes.IS_LINUX:
        pytest.skip("there is no /proc")
    monkeypatch.setattr(processes, "IS_LINUX", has_proc)
    with subprocess.Popen(["sleep", "600"]) as process:
        pid = process.pid
        assert (is_alive(pid), is_stopped(pid)) == (True, False)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert (is_alive(pid), is_stopped(pid)) == (True, True)
        process.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (is_alive(pid), is_stopped(pid)) == (False, False), "what is left is a zombie"
    assert (is_alive(pid), is_stopped(pid)) == (False, False)
