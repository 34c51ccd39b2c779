"""Calls that hold memory in proportion to how much they do at once.

On a card the memory is the card's. In a rehearsal it is pretended: 100 units, which are free again
when what holds them is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from muster import batched

_IS_CARD = os.environ["DEVICE"] == "cuda"
if _IS_CARD:  # a rehearsal needs no torch
    import torch
_TOTAL = int(os.environ["TOTAL_MIB"])
_HELD = [0]


class OutOfMemoryError(RuntimeError):
    """As torch's own is called."""


class Held:
    """A share of all memory, in percent, for as long as it lives."""

    def __init__(self, percent: int) -> None:
        self._units = 0
        if _IS_CARD:
            size = _TOTAL * percent // 100 << 20
            self._room = torch.empty(size, dtype=torch.uint8, device="cuda")
        elif _HELD[0] + percent > 100:
            raise OutOfMemoryError(f"CUDA out of memory: asked {percent}, held {_HELD[0]} of 100")
        else:
            self._units = percent
            _HELD[0] += percent

    def __del__(self) -> None:
        _HELD[0] -= self._units


@batched(static=(), max_batch=16)
def together(tasks: Sequence[Any]) -> list[dict[str, int]]:
    """40 % and 10 % for each task: five at once fit."""
    weights, rest = Held(40), Held(10 * len(tasks))
    assert weights is not rest
    return [{"n": len(tasks)} for _ in tasks]


class Stage:
    """The same for records."""

    def process(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        weights, rest = Held(40), Held(10 * len(batch))
        assert weights is not rest
        return [{**record, "n": len(batch)} for record in batch]


def fills(i: int) -> dict[str, int]:
    """Fills what is free before its first product: no room for the library's own workspace."""
    free, _ = torch.cuda.mem_get_info()
    room = torch.empty(max(0, free - (300 << 20)), dtype=torch.uint8, device="cuda")
    time.sleep(0.5)
    left = torch.randn(512, 512, device="cuda")
    done = float((left @ left).sum())
    return {"i": i, "room": room.numel() >> 20, "is_number": int(done == done)}
