"""How often Python looks for cycles of objects that nobody needs any more."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 50_000
_lock = threading.Lock()
_often: list[int] = []  # what was set before the first of those that are within, in any thread
_num_within = 0


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Look after so many new objects, and not after 700, where many come and go by hundreds."""
    global _num_within
    with _lock:
        _num_within += 1
        if _num_within == 1:
            _often[:] = gc.get_threshold()
            if _often[0]:  # 0: somebody wants no looks at all
                gc.set_threshold(max(_often[0], _RARELY), *_often[1:])
    try:
        yield
    finally:
        with _lock:
            _num_within -= 1
            if not _num_within:
                gc.set_threshold(*_often)


@contextmanager
def without_collector() -> Iterator[None]:
    """Rows hold no cycles, and looking for some takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
