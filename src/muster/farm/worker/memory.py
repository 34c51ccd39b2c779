"""How much memory a task has used at its peak, without importing anything for it."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path

from muster.base.device_faults import is_in_use

if sys.platform != "win32":
    import resource

_FIRST_LOOK_S, _LONGEST_S = 0.01, 0.5
_SELF = Path("/proc/self")


def begin_peak() -> None:
    """Start a new peak from here on, where the kernel can forget the last one."""
    with suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def peak_mib() -> tuple[float | None, bool]:
    """The peak since ``begin_peak`` in MiB, and whether it is memory of the device.

    Where CUDA is in use it is the device's memory, else this process's resident set. Without
    Linux's ``/proc/self/clear_refs`` it is the peak of the whole process so far, an upper bound.
    It is ``None`` where neither is known.
    """
    if is_in_use():
        torch = sys.modules["torch"]
        try:
            peak = float(torch.cuda.max_memory_reserved()) / 2**20
            torch.cuda.reset_peak_memory_stats()
        except Exception:  # a context that has failed answers nothing any more
            return None, False
        return peak, True
    if sys.platform == "win32":
        return None, False
    _, highest = _resident_mib("self")
    return highest or _mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), False


def wait_for(pid: int) -> tuple[int, float | None]:
    """Wait for a child; returns its wait status and the peak resident memory of its tree in MiB.

    The tree is measured every half a second, and more often early on; pages that its processes
    share count in each. Where there is no /proc it is the peak of the largest single process.
    """
    sampled = 0.0
    if hasattr(os, "pidfd_open") and _SELF.exists():
        with suppress(OSError):
            sampled = _watch(pid)
    _, status, usage = os.wait4(pid, 0)
    largest = _mib(usage.ru_maxrss)
    # Between fork and exec a child counts as large as this process was.
    own = _resident_mib("self")[1]
    return status, max(sampled, largest) if largest > own or not sampled else sampled


def _watch(pid: int) -> float:
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        highest, wait_s = 0.0, _FIRST_LOOK_S
        while not poll.poll(1000 * wait_s):
            highest = max(highest, _tree_mib(pid))
            wait_s = min(2 * wait_s, _LONGEST_S)
        return highest
    finally:
        os.close(descriptor)


def _tree_mib(pid: int) -> float:
    """The tree's resident MiB now, or the peak of its largest process where that is more."""
    total = largest = 0.0
    for member in tree(pid):
        now, highest = _resident_mib(str(member))
        total += now
        largest = max(largest, highest)
    return max(total, largest)


def tree(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError, ValueError):
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found += [int(word) for word in children.read_text().split()]
    return found


def _resident_mib(process: str) -> tuple[float, float]:
    """Resident MiB of a process now and at its peak; 0 where that is not known."""
    values = {}
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                values[name] = int(value.split()[0]) / 2**10
    return values.get("VmRSS", 0.0), values.get("VmHWM", 0.0)


def _mib(maxrss: int) -> float:
    """``ru_maxrss`` is in bytes on macOS and in KiB elsewhere."""
    return maxrss / 2**20 if sys.platform == "darwin" else maxrss / 2**10
