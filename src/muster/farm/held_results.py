"""Results of short tasks wait in their worker for a millisecond, so that many are sent at once, in
memory that it shares with the executor. What a worker that died had not sent is taken from there.

The memory begins with how many bytes of frames wait, which is 0 once they are sent.
"""

from __future__ import annotations

import mmap
import os
import struct

_SIZE = struct.Struct("<Q")
BYTES = 1 << 16
#: Of a result's frame without its value there are 62 bytes.
MOST_FRAMES = BYTES // 62


def make() -> int | None:
    """A descriptor of such memory, for both ends; None where a system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("muster-results")
        os.ftruncate(descriptor, BYTES)
    except OSError:
        return None
    return descriptor


def share(descriptor: int) -> mmap.mmap:
    """The memory; the descriptor is closed, so that no task of this process can take it away."""
    try:
        return mmap.mmap(descriptor, BYTES)
    finally:
        os.close(descriptor)


def left_in(memory: mmap.mmap) -> bytes:
    """The frames that a worker which is gone had not sent, or had just sent."""
    [size] = _SIZE.unpack_from(memory)
    return memory[_SIZE.size : _SIZE.size + size]


class Held:
    """The worker's end. Not for several threads at once."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._end = _SIZE.size

    def __bool__(self) -> bool:
        return self._end > _SIZE.size

    def add(self, frame: bytes) -> bool:
        """Keep it; False where it has no room."""
        start, end = self._end, self._end + len(frame)
        if end > BYTES:
            return False
        self._memory[start:end] = frame
        # Last, so that whatever is counted is there.
        _SIZE.pack_into(self._memory, 0, end - _SIZE.size)
        self._end = end
        return True

    def frames(self) -> memoryview:
        """All that wait."""
        return memoryview(self._memory)[_SIZE.size : self._end]

    def clear(self) -> None:
        """They are sent."""
        self._end = _SIZE.size
        _SIZE.pack_into(self._memory, 0, 0)
