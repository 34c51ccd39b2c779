"""Finding and ending every process a run has started. Linux reads /proc; elsewhere by group.

/proc is read here and not by psutil, because the reaper runs without installed packages, and
because only the session and the environment tell whose a process is after it was orphaned.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: Carried by every process muster starts for a run, so that descendants which left their
#: session are still recognised as ours.
RUN_MARKER = "MUSTER_RUN_MARK"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
IS_LINUX = sys.platform == "linux"
#: Nearly every kernel for Linux does.
_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()
_MOST_AT_ONCE = 1 << 14
#: Windows knows no KILL; there ``os.kill`` with any signal ends the process at once.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str


def set_subreaper(wanted: bool) -> bool:
    """Whether orphaned descendants become this process's children instead of init's.

    Linux only; returns what was in force before, so that it can be put back.
    """
    if not IS_LINUX:
        return False
    import ctypes  # here: a dry run and a look start nothing

    before = _is_subreaper()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
    return before


def _is_subreaper() -> bool:
    """Whether it is in force: a sandbox may refuse it, and another run of this program end it."""
    import ctypes

    value = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def allow_files(count: int, pid: int = 0) -> int:
    """Let a process (0: this one; others on Linux alone) have so many files open at a time, as far
    as its hard limit goes. Returns how many it may then.

    Nothing changes where that is so already: the soft limit is there for programs, and children,
    that know no more than 1,024.
    """
    if sys.platform == "win32":
        return count
    import resource

    kind = resource.RLIMIT_NOFILE
    of_this = sys.platform != "linux" or pid == 0
    soft, hard = resource.getrlimit(kind) if of_this else resource.prlimit(pid, kind)
    if 0 <= soft < count:
        soft = hard
        if of_this:
            resource.setrlimit(kind, (soft, hard))
        else:
            resource.prlimit(pid, kind, (soft, hard))
    return sys.maxsize if soft < 0 else soft


def find_marked(mark: str, sessions: Iterable[int] = ()) -> list[int]:
    """Living processes that belong to ``mark``.

    Those whose environment carries the mark, those in one of ``sessions`` or in the session of a
    marked one, and all descendants of these: a process that called ``setsid`` is still found by
    its environment, one that cleared its environment by its session or its parent. This process
    is never among them. Empty where there is no /proc.
    """
    if not IS_LINUX:
        return []
    table, me = _living(), os.getpid()
    found = {pid for pid in table if pid != me and _carries(pid, mark)}
    wanted = set(sessions) | {table[pid].session for pid in found}
    wanted.discard(table[me].session if me in table else -1)
    found |= {pid for pid, p in table.items() if p.session in wanted}
    return sorted(_with_descendants(found, table) - {me})


def family(pid: int) -> set[int]:
    """``pid`` and its living descendants."""
    import psutil  # here: the reaper has no installed packages, and few others ask

    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:  # it has ended
        return {pid}


def lineage() -> set[int]:
    """This process and those above it; just this one where there is no /proc."""
    found = {os.getpid()}
    process = _read_stat(os.getpid()) if IS_LINUX else None
    while process is not None and process.parent > 1:
        found.add(process.parent)
        process = _read_stat(process.parent)
    return found


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    if not IS_LINUX:
        return _psutil_status(pid) not in ("", "zombie")
    process = _read_stat(pid)
    return process is not None and process.state != "Z"


def is_stopped(pid: int) -> bool:
    """Whether it waits to be continued, as after Ctrl-Z."""
    if not IS_LINUX:
        return _psutil_status(pid) == "stopped"
    process = _read_stat(pid)
    return process is not None and process.state in ("T", "t")


def end_marked(mark: str, sessions: Iterable[int] = (), *, limit_s: float = 2.0) -> list[int]:
    """Kill everything that belongs to ``mark``; returns what is still there after ``limit_s``.

    Repeats until nothing is found, because a process may fork while it is being killed.
    """
    sessions = tuple(sessions)
    deadline = time.monotonic() + limit_s
    killed: set[int] = set()
    begun: set[int] = set()
    while True:
        alive = find_marked(mark, sessions)
        begun.update(map(_session_of, alive))
        for pid in alive:
            send_signal(pid, KILL)
        killed.update(alive)
        reap(killed)
        if not alive:
            _reap_leaders(begun.difference(sessions))
            return []
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.002)


def end_orphans(mark: str, session: int, spared: set[int]) -> list[int]:
    """Kill what a dead session leader has left behind; returns what survives two seconds.

    Those are the members of its session, and marked processes that have been handed to this
    process because their parent died. ``spared``: session leaders that are still wanted. All of
    them descend from this process where it is a subreaper, but through none of the ``spared``.
    """
    deadline = time.monotonic() + 2.0
    me = os.getpid()
    killed: set[int] = set()
    begun: set[int] = set()
    while True:
        table = _below(me, spared)
        found = {pid for pid, p in table.items() if p.session == session}
        found |= {
            pid
            for pid, p in table.items()
            if p.parent == me and pid not in spared and p.session not in spared
            and _carries(pid, mark)
        }  # fmt: skip
        found = _with_descendants(found, table)
        begun |= {table[pid].session for pid in found}
        for pid in found:
            send_signal(pid, KILL)
        killed |= found
        reap(killed)  # those killed in an earlier round are dead by now
        if not found:
            _reap_leaders(begun - spared - {session})
            return []
        if time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.002)


def send_signal(pid: int, number: int) -> None:
    """Signal one process; nothing happens if it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def signal_group(group: int, number: int) -> None:
    """Signal a process group; nothing happens if it is gone."""
    if sys.platform == "win32":
        send_signal(group, signal.SIGTERM)
        return
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def reap(pids: Iterable[int]) -> None:
    """Collect the exit of adopted children among ``pids``, so that no zombie stays."""
    if sys.platform == "win32":
        return
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except (ChildProcessError, OSError):
            continue


def reap_group(leader: int) -> None:
    """Collect the exits of orphans that ``leader``, a living child, has left to this process.

    A command that leaves a background process behind makes one of them per task.
    """
    if not IS_LINUX:
        return
    while True:
        try:
            done = os.waitid(os.P_PGID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if done is None or done.si_pid == leader:  # the leader's exit is read by its owner
            return
        reap([done.si_pid])


def reap_orphans(but: int = 0) -> bool:
    """Collect the exits of all children; returns whether there are any more.

    For a process that gets the orphans of what it starts (`set_subreaper`), and whose only other
    child is ``but``.
    """
    while True:
        try:
            done = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if done is None or done.si_pid == but:
            return True
        reap([done.si_pid])


def reap_adopted(sessions: Iterable[int]) -> None:
    """Collect dead children of this process that belong to one of ``sessions``."""
    if not IS_LINUX or not _has_dead_child():
        return
    wanted, me = set(sessions), os.getpid()
    ours = _children(me) if _LISTS_CHILDREN else _processes()
    reap(p.pid for p in ours if p.parent == me and p.state == "Z" and p.session in wanted)


def _reap_leaders(sessions: set[int]) -> None:
    """Collect leaders that ended by themselves and left a process in their session: double forks.

    Dead before they could be found, they are not among those that were killed. This process's own
    session is left alone, because the exits in it belong to those who started the processes.
    """
    if IS_LINUX:
        reap_adopted(sessions - {os.getsid(0)})


def resident_mib() -> float:
    """Physical memory that this process holds, in MiB."""
    import psutil

    return float(psutil.Process().memory_info().rss) / (1 << 20)


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory, here or in our cgroup."""
    total = 0
    sources = ((Path("/proc/vmstat"), "oom_kill "), (_cgroup_events(), "oom_kill "))
    for path, prefix in sources:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(prefix))
    return total


def _cgroup_events() -> Path:
    try:
        entry = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return Path("/nonexistent")
    return Path("/sys/fs/cgroup") / entry.rsplit(":", 1)[-1].lstrip("/") / "memory.events"


def _processes() -> list[_Process]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _read_stat(int(name))
            if process is not None:
                found.append(process)
    return found


def _living() -> dict[int, _Process]:
    return {process.pid: process for process in _processes() if process.state not in "ZX"}


def _below(pid: int, spared: set[int]) -> dict[int, _Process]:
    """Living processes that descend from one, but through none of the ``spared``. Where the kernel
    lists no children, or gives orphans to init, it is all processes, of which a shared machine may
    have thousands.
    """
    if not (_LISTS_CHILDREN and _is_subreaper()):
        return _living()
    found: dict[int, _Process] = {}
    parents = [pid]
    while parents:
        children = [p for p in _children(parents.pop()) if p.pid not in spared]
        found |= {p.pid: p for p in children if p.state not in "ZX"}
        parents += [p.pid for p in children]  # the first thread may have ended, and others live on
    return found


def _children(pid: int) -> list[_Process]:
    """Those of all threads of a process, with the dead that were not collected; none where it has
    ended. None of our own is missed: only we take one from the list, by collecting it.
    """
    found: list[_Process | None] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # it has ended, and another has its children
                listed = _read(pid, f"task/{thread}/children").split()
                found += map(_read_stat, map(int, listed))
    return [process for process in found if process is not None]


def _with_descendants(found: set[int], table: dict[int, _Process]) -> set[int]:
    while more := {pid for pid, p in table.items() if p.parent in found} - found:
        found = found | more
    return found


def _has_dead_child() -> bool:
    """Whether a child has ended and was not collected: no other process need be looked at then."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _read(pid: int, name: str) -> bytes:
    """A file of a process, of which there may be thousands: a Path takes three times as long."""
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    try:
        parts = [os.read(descriptor, _MOST_AT_ONCE)]
        while len(parts[-1]) == _MOST_AT_ONCE:
            parts.append(os.read(descriptor, _MOST_AT_ONCE))
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _read_stat(pid: int) -> _Process | None:
    try:
        text = _read(pid, "stat")
    except OSError:
        return None
    # The command's name may hold spaces and parentheses: fields start after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Process(pid, int(fields[1]), int(fields[3]), fields[0].decode())


def _psutil_status(pid: int) -> str:
    """psutil's word for what it does, where there is no /proc; "" where it has ended."""
    import psutil  # here: the reaper has no installed packages

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""
    except psutil.Error:  # another user's
        return "running"


def _session_of(pid: int) -> int:
    process = _read_stat(pid)
    return -1 if process is None else process.session


def _carries(pid: int, mark: str) -> bool:
    try:
        return f"{RUN_MARKER}={mark}".encode() in _read(pid, "environ")
    except OSError:
        return False
