"""Which of the waiting requests go into a batch together. No torch, no threads."""

from __future__ import annotations

from collections.abc import Sequence


def window(lengths: Sequence[int], count: int) -> list[int]:
    """The places of the ``count`` requests to take, where the first waits longest.

    They are neighbours in the order of their lengths, so that little padding is needed, and the
    oldest is always among them, so that none waits forever. Of the windows that hold the oldest,
    the one with the smallest spread is taken.
    """
    if count >= len(lengths):
        return list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    at = order.index(0)
    begins = range(max(0, at - count + 1), min(at, len(order) - count) + 1)

    def spread(begin: int) -> int:
        return lengths[order[begin + count - 1]] - lengths[order[begin]]

    best = min(begins, key=spread)
    return sorted(order[best : best + count])
