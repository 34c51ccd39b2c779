"""How often Python looks for cycles of objects that nobody needs any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 50_000


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Look after so many new objects, and not after 700, where many come and go by hundreds."""
    often, *others = gc.get_threshold()
    if often:  # 0: somebody wants no looks at all
        gc.set_threshold(max(often, _RARELY), *others)
    try:
        yield
    finally:
        gc.set_threshold(often, *others)


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
