"""How much memory a task has used at its peak, without importing anything for it."""

from __future__ import annotations

import functools
import math
import mmap
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from muster.base.device_faults import is_in_use
from muster.base.host_memory import tree

if sys.platform != "win32":
    import resource

_FIRST_LOOK_S, _LONGEST_S = 0.01, 0.5
#: To ask the kernel takes a tenth of that: what so short a task gets is not told, nor is it told of
#: the next task.
_TOO_SHORT_S = 1e-4
#: So short tasks that follow each other within this time begin with the same.
_STRETCH_S = 1e-3
_SELF = Path("/proc/self")
_STATM_BYTES = 256
_PAGE_MIB = mmap.PAGESIZE / 2**20


class Peak:
    """The most memory that this process had since ``begin``.

    Where CUDA is in use it is the device's memory, else this process's resident set. Reading the
    latter's peak costs more than a short task, and a process that had no page fault has got no
    memory: its peak is then what it began with. So is that of a task of less than 0.1 ms, whatever
    it got; and the kernel is asked what such a task begins with once in a millisecond, so that a
    longer one behind it may be charged with what can be got, and given back, in 0.1 ms.
    """

    def __init__(self) -> None:
        self._resident = 0.0  # MiB; 0 where it is not known
        self._faults = -1  # until the last time that the kernel was made to forget
        self._has_grown = True  # since then, as far as is known
        self._looked_s = -math.inf  # by the clock of `time.perf_counter`
        self._size: int | None = None  # a descriptor
        with suppress(OSError):
            self._size = os.open(_SELF / "statm", os.O_RDONLY)

    def __del__(self) -> None:
        if self._size is not None:
            with suppress(OSError):
                os.close(self._size)

    def begin(self, now: float | None = None) -> None:
        """Start a new peak from here on, where the kernel can forget the last one. ``now``: by
        `time.perf_counter`, where that was just asked.
        """
        now = time.perf_counter() if now is None else now
        if now - self._looked_s < _STRETCH_S and not self._has_grown:
            return
        self._looked_s = now
        resident = self._resident_now()
        is_as_it_was = resident == self._resident and 0 < self._faults == _page_faults()
        if self._has_grown or not resident or not is_as_it_was:
            with suppress(OSError):
                (_SELF / "clear_refs").write_text("5")
            self._resident, self._faults = self._resident_now(), _page_faults()
            self._has_grown = False

    def mib(self, seconds: float = math.inf) -> tuple[float | None, bool]:
        """The peak in MiB, and whether it is memory of the device. ``seconds``: how long it is
        since ``begin``.

        Without Linux's ``/proc/self/clear_refs`` it is the peak of the whole process so far, an
        upper bound. It is ``None`` where neither is known.
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
        if self._resident and seconds < _TOO_SHORT_S:
            return self._resident, False
        self._has_grown = not 0 < self._faults == _page_faults()
        if self._resident and not self._has_grown:
            return self._resident, False
        self._has_grown = True
        _, highest = _resident_mib("self")
        return highest or _mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), False

    def _resident_now(self) -> float:
        if self._size is None:
            return 0.0
        try:
            return int(os.pread(self._size, _STATM_BYTES, 0).split()[1]) * _PAGE_MIB
        except (OSError, ValueError, IndexError):  # a task has closed what it does not own
            return 0.0


def wait_for(
    pid: int, meanwhile: Callable[[], None], unwatched: Callable[[], None]
) -> tuple[int, float | None]:
    """Wait for a child; returns its wait status and the peak resident memory of its tree in MiB.

    The tree is measured every half a second, and more often early on; pages that its processes
    share count in each. Where there is no /proc it is the peak of the largest single process.
    ``meanwhile`` is called twice a second; where that is not possible (see `can_watch`; or there is
    no room for one more descriptor) ``unwatched`` is called once instead.
    """
    sampled = 0.0
    try:
        descriptor = os.pidfd_open(pid) if can_watch() else None
    except OSError:
        descriptor = None
    if descriptor is None:
        unwatched()
    else:
        sampled = _watch(pid, descriptor, meanwhile)
    _, status, usage = os.wait4(pid, 0)
    largest = _mib(usage.ru_maxrss)
    # Between fork and exec a child counts as large as this process was.
    if not sampled or largest > _resident_mib("self")[1]:
        return status, max(sampled, largest)
    return status, sampled


@functools.cache
def can_watch() -> bool:
    """Whether a program can be waited for and something else be done meanwhile: on Linux, unless a
    sandbox refuses it.
    """
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _watch(pid: int, descriptor: int, meanwhile: Callable[[], None]) -> float:
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        highest, wait_s, looked_s = 0.0, _FIRST_LOOK_S, time.monotonic()
        while not poll.poll(1000 * wait_s):
            highest = max(highest, _tree_mib(pid))
            wait_s = min(2 * wait_s, _LONGEST_S)
            if (now := time.monotonic()) - looked_s >= _LONGEST_S:
                looked_s = now
                meanwhile()
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


def _resident_mib(process: str) -> tuple[float, float]:
    """Resident MiB of a process now and at its peak; 0 where that is not known."""
    values = {}
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                values[name] = int(value.split()[0]) / 2**10
    return values.get("VmRSS", 0.0), values.get("VmHWM", 0.0)


def _page_faults() -> int:
    """Of this process so far; 0 where nobody counts them, as in some sandboxes."""
    if sys.platform == "win32":
        return 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _mib(maxrss: int) -> float:
    """``ru_maxrss`` is in bytes on macOS and in KiB elsewhere."""
    return maxrss / 2**20 if sys.platform == "darwin" else maxrss / 2**10
