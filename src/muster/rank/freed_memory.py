"""What a process on the CPU frees stays with it, so that the next step need not ask for it again.

glibc gives the end of its memory back to the system whenever enough of it is free, and large blocks
always. A training frees nearly all of its activations in every backward and asks for as much in the
next forward: each page is then given and cleared once more, a third of the time of learning.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
#: The largest that glibc takes. Larger blocks still come from the system and go back at once.
_LARGEST_KEPT = 32 << 20
_NEVER = -1


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside it, freed blocks of up to 32 MiB stay with the process; they are given back after it.

    It changes nothing where malloc is not glibc's.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        # Where glibc's own adaption ends, which setting a value has switched off.
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)
        libc.malloc_trim(0)
