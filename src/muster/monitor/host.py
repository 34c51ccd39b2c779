"""What the host does: CPU, memory, disks and network, from Linux's /proc.

Elsewhere there is no /proc and every field is None. Rates need two readings: they are None in the
first one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from muster.base.memory_limit import memory_limit

_SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk's own sectors are
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class HostUsage:
    """``cpu_percent``: of the cores this process may use, 100 when all are busy.

    Memory is that of the host, or of the container or job that limits it: used is what programs
    cannot get any more. Disks and network are summed over the real devices, in MiB per second since
    the reading before.
    """

    cpu_percent: float | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    disk_read_mib_s: float | None = None
    disk_write_mib_s: float | None = None
    network_receive_mib_s: float | None = None
    network_send_mib_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """Counters that only grow; None where the file does not exist."""

    time_s: float
    cpu: tuple[int, int] | None  # busy and all ticks
    disk: tuple[int, int] | None  # bytes read and written
    network: tuple[int, int] | None  # bytes received and sent


class HostReader:
    """Reads the host; remembers the reading before, for rates.

    ``root``: where /proc and /sys are, so that a recorded host can be read.
    """

    def __init__(self, root: Path = Path("/"), cores: Collection[int] | None = None) -> None:
        self._root = root
        self._proc = root / "proc"
        self._sys = root / "sys"
        self._cores = _usable_cores() if cores is None else set(cores)
        self._before: _Counters | None = None

    def read(self, now_s: float) -> HostUsage:
        """The state at ``now_s``, seconds of a clock that only grows."""
        now = _Counters(
            time_s=now_s,
            cpu=cpu_ticks(_lines(self._proc / "stat"), self._cores),
            disk=disk_bytes(_lines(self._proc / "diskstats"), self._disks()),
            network=network_bytes(_lines(self._proc / "net/dev"), self._interfaces()),
        )
        before, self._before = self._before, now
        used_mib, total_mib = memory_mib(_lines(self._proc / "meminfo"))
        limit = memory_limit(total_mib, self._root)
        if limit is not None:
            used_mib, total_mib = limit.used_mib, limit.limit_mib
        read, write = _rates(before, now, "disk")
        receive, send = _rates(before, now, "network")
        return HostUsage(
            cpu_percent=_cpu_percent(before, now),
            memory_used_mib=used_mib,
            memory_total_mib=total_mib,
            disk_read_mib_s=read,
            disk_write_mib_s=write,
            network_receive_mib_s=receive,
            network_send_mib_s=send,
        )

    def _disks(self) -> set[str]:
        """Whole disks. Partitions, loops and mapped volumes would count the same bytes twice."""
        return {
            name
            for name in _names(self._sys / "block")
            if not name.startswith(("loop", "ram", "zram", "dm-", "md", "sr"))
        }

    def _interfaces(self) -> set[str]:
        """Network cards; where there are none (a container), everything but the loop."""
        folder = self._sys / "class/net"
        names = {name for name in _names(folder) if name != "lo"}
        return {name for name in names if (folder / name / "device").exists()} or names


def cpu_ticks(lines: Iterable[str], cores: Collection[int]) -> tuple[int, int] | None:
    """Busy and all ticks of ``cores`` (all cores where it is empty) in /proc/stat.

    Fields (proc(5)): user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice.
    Waiting for a disk is idle; guests are already in user.
    """
    busy = total = 0
    seen = False
    for line in lines:
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break  # they come first; the rest of the file is long
        if name == "cpu" or (cores and int(name[3:]) not in cores):
            continue
        ticks = [int(field) for field in fields[:8]]
        seen = True
        total += sum(ticks)
        busy += sum(ticks) - ticks[3] - (ticks[4] if len(ticks) > 4 else 0)
    return (busy, total) if seen else None


def memory_mib(lines: Iterable[str]) -> tuple[int | None, int | None]:
    """Used and total MiB in /proc/meminfo. Used: what is not available to programs."""
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    total = _kib(fields.get("MemTotal"))
    available = _kib(fields.get("MemAvailable"))
    if total is None or available is None:
        return None, None if total is None else total // 1024
    return (total - available) // 1024, total // 1024


def disk_bytes(lines: Iterable[str], disks: Collection[str]) -> tuple[int, int] | None:
    """Bytes read and written by ``disks`` in /proc/diskstats (kernel's admin-guide/iostats)."""
    read = written = 0
    seen = False
    for line in lines:
        fields = line.split()
        if len(fields) >= 10 and fields[2] in disks:
            seen = True
            read += int(fields[5])
            written += int(fields[9])
    return (read * _SECTOR_BYTES, written * _SECTOR_BYTES) if seen else None


def network_bytes(lines: Iterable[str], interfaces: Collection[str]) -> tuple[int, int] | None:
    """Bytes received and sent by ``interfaces`` in /proc/net/dev."""
    received = sent = 0
    seen = False
    for line in lines:
        name, colon, rest = line.partition(":")
        if colon and name.strip() in interfaces:
            fields = rest.split()
            seen = True
            received += int(fields[0])
            sent += int(fields[8])
    return (received, sent) if seen else None


def _cpu_percent(before: _Counters | None, now: _Counters) -> float | None:
    if before is None or before.cpu is None or now.cpu is None:
        return None
    busy, total = (new - old for old, new in zip(before.cpu, now.cpu, strict=True))
    # Ticks are 10 ms: two readings may see none. Counters of idle time may step back a little.
    return None if total <= 0 else min(100.0, max(0.0, 100 * busy / total))


def _rates(
    before: _Counters | None, now: _Counters, field: str
) -> tuple[float | None, float | None]:
    old = None if before is None else getattr(before, field)
    new = getattr(now, field)
    if before is None or old is None or new is None or now.time_s <= before.time_s:
        return None, None
    seconds = now.time_s - before.time_s
    # A device that went away takes its bytes with it; that is not a negative rate.
    first, second = (max(0, b - a) / _MIB / seconds for a, b in zip(old, new, strict=True))
    return first, second


def _usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _kib(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0])
