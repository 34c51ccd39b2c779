"""How much of the host's memory a process and all that it has started hold. Linux only.

Counted is what the kernel cannot take back without swapping or killing: memory of their own, shared
memory, and what of it is swapped out. Pages of files, such as a data set that is mapped, it can.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path


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
