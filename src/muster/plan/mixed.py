"""Work on unlike or busy devices: which shares of a gang end together, and how long tasks take.

Equal shares wait for the slowest card; ``muster train --balance auto`` measures the speeds and
shares the batch out as computed here.

The workers of a sweep or a map take the next task whenever they are free, which is list
scheduling: at most 2 - 1/m times the best schedule on m workers (Graham 1966). Longest first is at
most 4/3 - 1/(3m) times it (Graham 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from muster.plan.compute import ComputeTime
from muster.plan.units import Origin, Seconds, weakest


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
    """Equal and balanced shares of a batch.

    ``lost``: the share of an equal step's time that a balanced one saves. Only computing counts,
    because communication is the same for both.
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


@dataclass(frozen=True, kw_only=True)
class Makespan:
    """How long tasks take on some workers.

    ``in_order``: as Muster hands tasks out; ``longest_first``: if the times were known before;
    ``least``: no schedule can be shorter. ``efficiency``: share of the workers' time in tasks.
    """

    num_workers: int
    in_order: Seconds
    longest_first: Seconds
    least: Seconds
    speed_up: float
    efficiency: float


def makespans(times: Sequence[Seconds], worker_counts: Sequence[int]) -> tuple[Makespan, ...]:
    """One makespan for each number of workers; ``times`` in the order of the plan."""
    total = sum(times, Seconds(0.0))
    found = []
    for count in worker_counts:
        taken = list_schedule(times, count)
        speed_up = total / taken if taken > Seconds(0.0) else 1.0
        found.append(
            Makespan(
                num_workers=count,
                in_order=taken,
                longest_first=list_schedule(sorted(times, reverse=True), count),
                least=least_makespan(times, count),
                speed_up=speed_up,
                efficiency=speed_up / count,
            )
        )
    return tuple(found)


def list_schedule(times: Sequence[Seconds], num_workers: int) -> Seconds:
    """When the last task ends, if each goes to the worker that is free first; O(n log m)."""
    free = [0.0] * min(num_workers, max(1, len(times)))
    for time in times:
        heapq.heapreplace(free, free[0] + time.value)
    return Seconds(max(free))


def least_makespan(times: Sequence[Seconds], num_workers: int) -> Seconds:
    """The time of the work if it is shared perfectly, or of the longest task if that is more."""
    total = sum(times, Seconds(0.0))
    return max(total / num_workers, max(times, default=Seconds(0.0)))
