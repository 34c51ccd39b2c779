"""Whether a worker holds more of the host's memory than its task is allowed. See decision 0039."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from muster.base.host_memory import part_mib, seen_mib, session_trees
from muster.base.shown_text import shown_mib

#: Faster than one process fills memory, so that it is seen soon after it has come to its limit.
_MIB_PER_S = 4096.0
_LEAST_S, _MOST_S = 0.05, 1.0
#: Of the time between two looks, a look takes this part at most; but nothing is left unseen longer.
_SHARE, _LONGEST_S = 0.05, 2.0
#: To know each process's part of shared pages takes the kernel long, so a thread asks, one at once.
_ASKING = threading.Lock()
_ANSWER_S = 0.01
#: Where the host has no memory left sooner than a look shows why, the kernel ends the process with
#: the highest score: a task, and not a coordinator or somebody else's program.
_OOM_SCORE = 900


def ends_first(pid: int) -> None:
    """Let the kernel choose this process and what it starts, if it has to choose one."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_OOM_SCORE))


class MemoryWatch:
    """Of the worker that leads the session ``pid``. ``due_s``: when to look the next time."""

    def __init__(self, pid: int, most_mib: float) -> None:
        self._pid = pid
        self._most_mib = most_mib
        self._began_s = 0.0
        self._asking: threading.Thread | None = None
        self._held_mib = 0.0
        self.due_s = time.monotonic()

    def begin(self) -> bool:
        """Begin a look; False where one goes on."""
        if self._asking is not None:
            return False
        self._began_s = time.monotonic()
        pids = session_trees(self._pid)
        self._held_mib = seen_mib(pids)
        if self._held_mib > self._most_mib:
            self._asking = threading.Thread(target=self._ask, args=(pids,), daemon=True)
            self._asking.start()
        return True

    def look(self) -> str:
        """Why it has to be killed; "" where it has not, or nobody knows yet."""
        now_s = time.monotonic()
        if self._asking is not None and self._asking.is_alive():
            self.due_s = now_s + _ANSWER_S
            return ""
        self._asking = None
        if self._held_mib > self._most_mib:
            took = shown_mib(self._held_mib, up=True)
            return f"took {took} of {shown_mib(self._most_mib)} allowed (--memory)"
        wait_s = min(_MOST_S, max(_LEAST_S, (self._most_mib - self._held_mib) / _MIB_PER_S))
        took_s = now_s - self._began_s
        self.due_s = now_s + max(wait_s, min(_LONGEST_S, took_s / _SHARE))
        return ""

    def _ask(self, pids: Sequence[int]) -> None:
        with _ASKING:
            self._held_mib = part_mib(pids)
