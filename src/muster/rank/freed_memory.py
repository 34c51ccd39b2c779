"""Memory of a rank on the CPU: what it frees stays with it, so that the next step need not ask for
it again; and how much it may keep to save work.

glibc gives the end of its memory back to the system whenever enough of it is free, and large blocks
always. A training frees nearly all of its activations in every backward and asks for as much in the
next forward: each page is then given and cleared once more, a third of the time of learning.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from muster.base.host_memory import host_memory_mib
from muster.gang.topology import read_topology

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER, _NONE = -1, 0
#: As glibc begins, and where its own adaption ends: any setting switches that off, and blocks of
#: more than the 128 KiB it begins with would be from the system, and go back, from then on.
_USUAL_BLOCKS, _USUAL_THRESHOLD, _USUAL_TRIM = 65536, 32 << 20, 64 << 20


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside it, freed memory stays with the process; the end of the heap is given back after it.

    It changes nothing where malloc is not glibc's.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_MMAP_MAX, _NONE)  # blocks from the system would go back at once
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _USUAL_BLOCKS)
        libc.mallopt(_MMAP_THRESHOLD, _USUAL_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)
        libc.malloc_trim(0)


def bytes_to_keep(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> int | None:
    """How much this rank may keep to save work: its part of a quarter of what the host, or the
    container or job, has available now. None: not known.

    ``root``: where /proc and /sys are. ``environment``: the process's own by default.
    """
    available_mib = host_memory_mib(root).available_mib
    if available_mib is None:
        return None
    topology = read_topology(environment)
    num_ranks = 1 if topology is None else max(1, topology.local_world_size)
    return (available_mib << 20) // (4 * num_ranks)
