"""How a worker is kept to the memory of the host that its task is allowed (decisions 0039, 0059).

Best by a control group (cgroup v2), in which the kernel keeps the limit. That takes a part of the
tree of groups which is ours to divide: the group in which this process was started, where nobody
else's process is in it and its memory is handed on to us. Systemd hands such a group to a scope or
service with ``Delegate=yes``, in which ``--detach`` runs where lingering is on; in a login session,
a container and most jobs there is none, and a worker is watched instead (``MemoryWatch``).

The kernel wants processes in the leaves of the tree alone, so this process goes into a group of
its own beside those of its workers, and back when the last executor has closed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from muster.base.control_group import (
    OWN_EVENTS,
    counts_own_limit,
    divides_memory,
    lines,
    own_group,
    words,
)
from muster.base.host_memory import part_mib, seen_mib, session_trees, tree
from muster.base.shown_text import shown_mib

_MOVES = 20
_EMPTY_S, _LOOK_S = 2.0, 0.01


class MemoryGroup:
    """The group of one worker and all that it starts, daemons too."""

    def __init__(self, folder: Path, most_mib: float) -> None:
        self.folder = folder
        self._most_mib = most_mib

    @property
    def took(self) -> str:
        """That its processes came to the limit, upon which the kernel has ended all of them; "" as
        long as they have not."""
        # The local file is about this limit alone; the other counts those of groups in it too.
        if not _number(self.folder / OWN_EVENTS, "oom"):
            return ""
        return f"took all of {shown_mib(self._most_mib)} allowed (--memory), and asked for more"

    @property
    def was_hit(self) -> bool:
        """Whether the kernel has ended one of them for lack of memory, here or of the host."""
        return _number(self.folder / "memory.events", "oom_kill") > 0

    def kill(self) -> None:
        with suppress(OSError):  # a kernel before 5.14 has no such file; the session is killed too
            (self.folder / "cgroup.kill").write_text("1")


class MemoryGroups:
    """The groups of this process's workers. One for all executors of the process; see ``open``."""

    _lock = threading.Lock()
    _ours: MemoryGroups | None = None

    def __init__(self, home: Path) -> None:
        self._home = home
        self._inner = home / f"muster-{os.getpid()}"
        self._num_open = 0
        self._num_made = 0
        self._left: list[Path] = []  # of workers that have ended; the kernel may need a moment more

    @classmethod
    def open(cls, root: Path = Path("/")) -> MemoryGroups | None:
        """None where no group can be had. ``root``: where /proc and /sys are."""
        with cls._lock:
            if cls._ours is None:
                home = own_group(root)
                if home is None or not (divides_memory(home) and counts_own_limit(home)):
                    return None
                made = cls(home)
                if not made._move_in():
                    return None
                cls._ours = made
            cls._ours._num_open += 1
            return cls._ours

    def make(self, pid: int, most_mib: float) -> MemoryGroup | None:
        """A group with this limit and that process in it; None where the kernel refuses."""
        with self._lock:
            self._num_made += 1
            folder = self._home / f"muster-{os.getpid()}-{self._num_made}"
        try:
            folder.mkdir()
            (folder / "memory.max").write_text(str(int(most_mib * (1 << 20))))
            # What is swapped out counts as held, so there is nothing to be gained by it.
            if (swap := folder / "memory.swap.max").exists():
                swap.write_text("0")
            # Half a task is none: the worker goes with what it has started.
            (folder / "memory.oom.group").write_text("1")
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            return None
        return MemoryGroup(folder, most_mib)

    def end(self, group: MemoryGroup) -> None:
        """Kill what is in it, and remove it as soon as that is gone."""
        group.kill()
        with self._lock:
            self._left = [one for one in (*self._left, group.folder) if not _is_removed(one)]

    def close(self) -> None:
        """Once for each ``open``. After the last one this process is where it was before."""
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                MemoryGroups._ours = None
                self._move_back()

    def _move_in(self) -> bool:
        """Leave the home to groups that have the memory controller; False where that cannot be."""
        try:
            self._inner.mkdir()
            for _ in range(_MOVES):  # a process may start another one meanwhile
                inside = _processes(self._home)
                if not inside:
                    (self._home / "cgroup.subtree_control").write_text("+memory")
                    return True
                if not set(inside) <= set(tree(os.getpid())):
                    break  # those of others are not ours to move
                _move(inside, self._inner)
        except OSError:
            pass
        self._move_back()
        return False

    def _move_back(self) -> None:
        until = time.monotonic() + _EMPTY_S
        while not all(map(_is_removed, self._left)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        with suppress(OSError):
            (self._home / "cgroup.subtree_control").write_text("-memory")
        for _ in range(_MOVES):
            inside = _processes(self._inner)
            if not inside:
                break
            with suppress(OSError):
                _move(inside, self._home)
        with suppress(OSError):
            self._inner.rmdir()


def _move(pids: list[int], folder: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            (folder / "cgroup.procs").write_text(str(pid))


def _is_removed(folder: Path) -> bool:
    """Remove it with the groups that a task has made in it; False where something is in them."""
    with suppress(OSError):
        for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            inner.rmdir()
        folder.rmdir()
    return not folder.exists()


def _processes(folder: Path) -> list[int]:
    return [int(word) for word in words(folder / "cgroup.procs")]


def _number(path: Path, name: str) -> int:
    """What a line of a flat file says; 0 where there is none."""
    found = (line.split() for line in lines(path))
    return next((int(line[1]) for line in found if line[:1] == [name]), 0)


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
