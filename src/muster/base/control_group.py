"""The control group (cgroup v2) in which this process is, and whether its memory can be divided."""

from __future__ import annotations

from pathlib import Path

#: How often a group came to its own limit, and not to one above it. Linux has it since 5.2.
OWN_EVENTS = "memory.events.local"


def own_group(root: Path = Path("/")) -> Path | None:
    """The folder of this process's group in the tree of cgroup v2; None where it has none here.
    ``root``: where /proc and /sys are.
    """
    path = next(
        (line[3:] for line in lines(root / "proc/self/cgroup") if line.startswith("0::/")), None
    )
    if path is None or ".." in path.split("/"):
        return None
    for line in lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        if after.split()[:1] != ["cgroup2"]:
            continue
        top, place = before.split()[3:5]  # the mount shows the tree from this group on
        if Path(path).is_relative_to(top):
            return root / place.lstrip("/") / Path(path).relative_to(top)
    return None


def divides_memory(group: Path) -> bool:
    """Whether its memory is handed on, so that groups in it can have limits of their own."""
    return "memory" in words(group / "cgroup.controllers")


def counts_own_limit(group: Path) -> bool:
    """Whether the kernel tells of each group how often it came to its limit. Without that nobody
    could say whether a task has come to its own one or to that of a sweep around it.
    """
    return (group / OWN_EVENTS).exists()


def words(path: Path) -> list[str]:
    return " ".join(lines(path)).split()


def lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
