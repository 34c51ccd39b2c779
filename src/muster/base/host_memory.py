"""The memory of the host, or what a container's or a job's control group leaves of it; and how much
of it a process and all that it has started hold (Linux only).

psutil tells of the whole host, also inside a container or a SLURM job that gets a part: the limits
of control groups (cgroup v1 and v2) are read here.

What processes hold is what the kernel cannot take back from them without swapping or killing:
memory of their own, shared memory, and what of it is swapped out. Pages of files, such as a data
set that is mapped, it can.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MIB = 1 << 20


class HostMemory(NamedTuple):
    """``used_mib``: what programs cannot get any more. None: not known."""

    total_mib: int | None = None
    used_mib: int | None = None
    available_mib: int | None = None


class MemoryLimit(NamedTuple):
    """``used_mib``: what counts against the limit, without cached files that can be dropped."""

    limit_mib: int
    used_mib: int


class _Names(NamedTuple):
    limit: str
    usage: str
    cached: str  # a line of memory.stat


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def host_memory_mib(root: Path = Path("/")) -> HostMemory:
    """Of the host, or of the container or job that limits it."""
    import psutil  # here: starts of muster that look at no memory do not wait for it

    try:
        host = psutil.virtual_memory()
    except (OSError, RuntimeError, LookupError, ValueError):  # no /proc, or no such file in it
        return HostMemory()
    total_mib, available_mib = host.total // _MIB, host.available // _MIB
    limit = memory_limit(total_mib, root)
    if limit is None:
        return HostMemory(total_mib, total_mib - available_mib, available_mib)
    left_mib = max(0, limit.limit_mib - limit.used_mib)
    return HostMemory(limit.limit_mib, limit.used_mib, min(available_mib, left_mib))


def memory_limit(host_mib: int | None, root: Path = Path("/")) -> MemoryLimit | None:
    """The limit of this process's group or of one above it that leaves the least.

    None where no limit is below ``host_mib``, the host's memory. ``root``: where /proc and /sys
    are, so that a recorded host can be read.
    """
    limits = []
    for folder, names in _groups(root):
        limit, usage = _bytes(folder / names.limit), _bytes(folder / names.usage)
        if limit is not None and usage is not None:
            used = max(0, usage - _cached(folder / "memory.stat", names.cached))
            limits.append(MemoryLimit(limit // _MIB, used // _MIB))
    # Without a limit v1 says a number with 19 digits, v2 says "max".
    real = [one for one in limits if host_mib is None or one.limit_mib < host_mib]
    real = [one for one in real if one.limit_mib < 1 << 40]
    return min(real, key=lambda one: one.limit_mib - one.used_mib, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Our memory group and those above it, up to the mount."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        elif number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", _V2
        else:
            continue
        # Inside a container the path may be the host's; the mount is then our group itself.
        parts = [part for part in path.split("/") if part]
        for length in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:length])
            if (folder / names.limit).is_file():
                yield folder, names


def _bytes(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _cached(path: Path, name: str) -> int:
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found


def children(pid: int | str) -> list[int]:
    found: list[int] = []
    with suppress(OSError, ValueError):
        for one in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in one.read_text().split()]
    return found


def session_trees(leader: int) -> list[int]:
    """A worker with its descendants, and with what they have left to this process on their end."""
    found = tree(leader)
    for orphan in children("self"):
        with suppress(OSError):
            if orphan != leader and os.getsid(orphan) == leader:
                found += tree(orphan)
    return found


def part_mib(pids: Iterable[int]) -> float:
    """What they hold together. To know each one's part takes the kernel long."""
    return sum(map(_part_mib, pids))


def seen_mib(pids: Iterable[int]) -> float:
    """At least as much, in no time: processes that were forked share their pages, and each of them
    counts these."""
    return sum(map(_seen_mib, pids))


def _seen_mib(pid: int) -> float:
    return sum(_mib(f"/proc/{pid}/status", ("RssAnon", "RssShmem", "VmSwap")).values())


def _part_mib(pid: int) -> float:
    """One process's part; all that it sees where the kernel does not tell."""
    parts = _mib(f"/proc/{pid}/smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return sum(parts.values()) if "Pss_Anon" in parts else _seen_mib(pid)


def _mib(place: str, names: Collection[str]) -> dict[str, float]:
    found = {}
    with suppress(OSError, ValueError), open(place, errors="replace") as file:  # noqa: PTH123
        for line in file:
            name, _, value = line.partition(":")
            if name in names:
                found[name] = int(value.split()[0]) / 1024
    return found
