"""Nothing survives a coordinator or a launcher: what they start dies with its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time

if sys.platform == "linux":
    import fcntl

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when ``parent_pid`` ends.

    Linux does it in the kernel; elsewhere a thread looks twice a second. If the parent is gone
    already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the request took effect
            os._exit(70)
    elif sys.platform != "win32":
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()


def end_group_with(descriptor: int) -> None:
    """Have this process's group killed when the last writer of a pipe ends; Linux only.

    The kernel does it, so what this process has started dies as well, also when every process of
    ours is killed at the same instant. ``descriptor``: the pipe's reading end. A direct child
    inherits what holds the arrangement, in case this process is gone first.
    """
    if sys.platform != "linux" or os.getpgrp() != os.getpid():
        return
    try:
        # Opened anew: the owner of a signal belongs to the open file, which others share.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | fcntl.FASYNC)
    except OSError:  # a sandbox without it: the warden is there
        return
    os.set_inheritable(own, True)
    waiting = select.poll()
    waiting.register(own, 0)
    if waiting.poll(0):  # it ended before the kernel was asked
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)
