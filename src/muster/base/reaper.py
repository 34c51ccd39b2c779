"""Nothing outlives a coordinator or a launcher: what they start ends with them, also by kill -9.

Three arrangements: workers and ranks ask the kernel to die with their parent (`die_with_parent`);
a pipe ends a whole process group when its writer is gone (`end_group_with`); and a small process
beside the coordinator, the reaper, kills what *they* have started, in sessions of their own too.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muster.base.processes import IS_LINUX, RUN_MARKER, end_marked

if sys.platform == "linux":
    import fcntl
if TYPE_CHECKING:
    import subprocess

_GOODBYE_S = 5.0


class Reaper:
    """Keeps a reaper process beside this one, and starts another should it be killed.

    Linux only: elsewhere workers watch their parent themselves and ``start`` does nothing.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        if not IS_LINUX:
            return
        import subprocess  # not above: the reaper and every worker begin sooner without

        from muster.base.settings import child_environment

        read_end, self._pipe = os.pipe()
        source = str(Path(__file__).parents[2])
        # Without site-packages: a reaper must start fast and outlive a broken environment.
        start = (
            "import os, select, sys; pipe = int(sys.argv[2])\n"
            # Workers begin now, and a short run is over before there is anything to import.
            "news = select.poll(); news.register(pipe, select.POLLIN)\n"  # any descriptor's number
            "if news.poll(1000) and os.read(pipe, 1): os._exit(0)\n"
            "sys.path.insert(0, sys.argv[1])\n"
            # At once: somebody waits for its end, and it holds nothing.
            "from muster.base.reaper import main; os._exit(main(sys.argv[2:]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", start, source, str(read_end), self._mark],
            pass_fds=(read_end,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=child_environment({}),
        )
        os.close(read_end)

    def check(self) -> None:
        """Start one where there is none, or where it has died; costs one system call."""
        if self._process is None:
            self.start()
        elif self._process.poll() is not None:
            os.close(self._pipe)
            self.start()

    def dismiss(self) -> None:
        """Everything has been ended: the reaper may go."""
        if self._process is None:
            return
        import subprocess

        with suppress(BrokenPipeError):
            os.write(self._pipe, b".")
        os.close(self._pipe)
        try:
            self._process.wait(timeout=_GOODBYE_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()
        self._process = None


_KEPT: list[Reaper] = []


def guarded() -> dict[str, str]:
    """The environment of programs that a reaper kills with all of theirs when this process is gone,
    however it ends.
    """
    mark = f"guarded-{os.urandom(8).hex()}"
    _KEPT.append(Reaper(mark))
    _KEPT[-1].start()
    return {RUN_MARKER: mark}


def main(argv: list[str]) -> int:
    """The reaper process, called with [FD, MARK].

    It waits for the pipe FD to close, which happens when the parent ends however it ends, then
    kills every process that carries MARK.
    """
    descriptor, mark = int(argv[0]), argv[1]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    orderly = False
    while True:
        data = os.read(descriptor, 16)
        if not data:
            break
        orderly = True  # one byte says: everything was ended, go without looking
    if orderly:
        return 0
    return 1 if end_marked(mark, limit_s=10.0) else 0


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
        import threading

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
    except OSError:  # a sandbox without it: the reaper is there
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
