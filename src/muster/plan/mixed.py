"""Unlike cards in one gang: equal shares wait for the slowest; which shares would end together.

``muster train --balance auto`` measures the speeds and shares the batch out like this.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from muster.plan.compute import ComputeTime
from muster.plan.origin import Origin, weakest
from muster.plan.units import Seconds


@dataclass(frozen=True, kw_only=True)
class Member:
    """One card of a gang. ``most_samples``: what fits in its memory; None where not known."""

    name: str
    compute: ComputeTime
    most_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class Split:
    """``shares``: samples per card of the global batch; ``step``: until the last has computed."""

    shares: tuple[int, ...]
    step: Seconds
    idle: tuple[Seconds, ...]


@dataclass(frozen=True, kw_only=True)
class MixedPlan:
    """``lost``: the share of an equal step's time that a balanced one saves. Computing alone:
    communication is the same for both.
    """

    equal: Split
    balanced: Split
    lost: float
    origin: Origin


def plan_mixed(members: Sequence[Member], global_batch: int) -> MixedPlan | None:
    """Equal and balanced shares; None where the global batch does not fit on these cards."""
    limits = [global_batch if m.most_samples is None else m.most_samples for m in members]
    if sum(limits) < global_batch or global_batch < len(members):
        return None
    equal = _split(members, _equal_shares(len(members), global_batch))
    balanced = _split(members, balanced_shares(members, global_batch))
    lost = 1.0 - balanced.step / equal.step if equal.step > Seconds(0.0) else 0.0
    times = [m.compute.of(1) for m in members]
    return MixedPlan(equal=equal, balanced=balanced, lost=max(0.0, lost), origin=weakest(times))


def balanced_shares(members: Sequence[Member], global_batch: int) -> tuple[int, ...]:
    """Whole samples per card so that the slowest ends as early as it can.

    Each next sample goes to the card that would end first with it, which is optimal because a
    card's time only grows with its share. Every card gets one sample at least; none gets more than
    fits. The caller has checked that the batch fits.
    """
    shares = [1] * len(members)
    queue = [
        (_time(member, 2), place)
        for place, member in enumerate(members)
        if member.most_samples is None or member.most_samples > 1
    ]
    heapq.heapify(queue)
    for _ in range(global_batch - len(members)):
        _, place = heapq.heappop(queue)
        shares[place] += 1
        most = members[place].most_samples
        if most is None or shares[place] < most:
            heapq.heappush(queue, (_time(members[place], shares[place] + 1), place))
    return tuple(shares)


def _equal_shares(count: int, global_batch: int) -> tuple[int, ...]:
    base, extra = divmod(global_batch, count)
    return tuple(base + (place < extra) for place in range(count))


def _split(members: Sequence[Member], shares: tuple[int, ...]) -> Split:
    times = [Seconds(_time(m, share)) for m, share in zip(members, shares, strict=True)]
    step = max(times)
    return Split(shares=shares, step=step, idle=tuple(step - time for time in times))


def _time(member: Member, samples: int) -> float:
    return member.compute.of(samples).value.value
