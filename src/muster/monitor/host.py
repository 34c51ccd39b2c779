"""What the host does: CPU, memory, disks and network.

What the system does not say is None. Rates need two readings: they are None in the first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from muster.base.host_memory import host_memory_mib

_MIB = 1024 * 1024
_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr")

Pair = tuple[int, int]


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
    """Readings of counters that only grow; None where they are not known."""

    time_s: float
    cpu: Pair | None  # busy and all ticks
    disk: Pair | None  # bytes read and written
    network: Pair | None  # bytes received and sent


class HostReader:
    """Reads the host; remembers the reading before, for rates.

    ``root``: where /proc and /sys are, so that a recorded host can be read (psutil has a constant
    of its own for /proc).
    """

    def __init__(self, root: Path = Path("/"), cores: Collection[int] | None = None) -> None:
        self._root = root
        self._cores = _usable_cores() if cores is None else set(cores)
        self._before: _Counters | None = None

    def read(self, now_s: float) -> HostUsage:
        """The state at ``now_s``, seconds of a clock that only grows."""
        now = _Counters(
            time_s=now_s,
            cpu=_known(lambda: cpu_ticks(self._root / "proc/stat", self._cores)),
            disk=_known(self._disk_bytes),
            network=_known(self._network_bytes),
        )
        before, self._before = self._before, now
        memory = host_memory_mib(self._root)
        read, write = _rates(before, now, "disk")
        receive, send = _rates(before, now, "network")
        return HostUsage(
            cpu_percent=_cpu_percent(before, now),
            memory_used_mib=memory.used_mib,
            memory_total_mib=memory.total_mib,
            disk_read_mib_s=read,
            disk_write_mib_s=write,
            network_receive_mib_s=receive,
            network_send_mib_s=send,
        )

    def _disk_bytes(self) -> Pair | None:
        """Bytes read and written by whole disks; partitions and volumes would count twice."""
        import psutil

        blocks = self._root / "sys/block"
        return _sum(
            (disk.read_bytes, disk.write_bytes)
            for name, disk in psutil.disk_io_counters(perdisk=True, nowrap=False).items()
            if not name.startswith(_VIRTUAL_DISKS) and (blocks / name.replace("/", "!")).exists()
        )

    def _network_bytes(self) -> Pair | None:
        """Bytes received and sent by network cards, or by all but loopback in a container."""
        import psutil

        found = psutil.net_io_counters(pernic=True, nowrap=False)
        found.pop("lo", None)
        folder = self._root / "sys/class/net"
        cards = [found[name] for name in found if (folder / name / "device").exists()]
        return _sum((card.bytes_recv, card.bytes_sent) for card in cards or found.values())


def cpu_ticks(stat: Path, cores: Collection[int]) -> Pair | None:
    """Busy and all ticks of ``cores`` (all cores where it is empty) in /proc/stat.

    Read here because psutil drops the numbers of the cores: with one switched off, every core
    behind it would be taken for its neighbour. Fields (proc(5)): user, nice, system, idle, iowait,
    irq, softirq, steal, guest, guest_nice. Waiting for a disk is idle; guests are in user already.
    """
    busy = total = 0
    seen = False
    for line in stat.read_text().splitlines():
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


def _sum(pairs: Iterable[Pair]) -> Pair | None:
    found = list(pairs)
    return (sum(one for one, _ in found), sum(two for _, two in found)) if found else None


def _known(read: Callable[[], Pair | None]) -> Pair | None:
    try:
        return read()
    except (OSError, RuntimeError, ValueError, LookupError):  # no /proc, or not such a file in it
        return None


def _usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
