"""How many workers fit on one GPU, learnt from the tasks that have finished there. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def workers_that_fit(
    *,
    peaks_mib: Sequence[int],
    total_mib: int | None,
    others_mib: int,
    current: int,
    cap: int,
    headroom: float = 0.1,
) -> int:
    """The number of workers that this GPU should have now, between 1 and ``cap``.

    ``peaks_mib``: the highest memory of each finished task on this GPU; values of 0 mean that the
    sampler saw nothing and are left out. ``others_mib``: what processes that are not ours hold.
    ``headroom``: the fraction of the total that stays free, for a task larger than all before.

    Without a peak or a total there is nothing to go by, so the number stays. It at most doubles
    per call: each doubling is checked against the peaks of the tasks that ran beside each other
    before the next. It shrinks at once when a peak or somebody else leaves less room.

    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=1, cap=16)
    2
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=6, cap=16)
    8
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=60000, current=8, cap=16)
    1
    """
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")
    if not 0.0 <= headroom < 1.0:
        raise ValueError(f"headroom must be a fraction from 0 up to 1, not {headroom}")
    current = min(max(current, 1), cap)
    seen = [peak for peak in peaks_mib if peak > 0]
    if not seen or total_mib is None:
        return current
    room_mib = total_mib * (1.0 - headroom) - others_mib
    fitting = int(room_mib // max(seen))
    return max(1, min(fitting, 2 * current, cap))
