"""How long devices compute: one by itself, unlike ones in a gang, and workers that share tasks.

One device: from what was measured at some batches, or from FLOPs and a peak.

The model of a forward and backward is a line: ``fixed + samples x per_sample``. The fixed part is
what a step costs whatever its batch is (starting kernels, the optimizer, Python); it is why the
same global batch on more devices does not divide the time by their number.

Unlike devices: equal shares wait for the slowest card; ``muster train --balance auto`` measures the
speeds and shares the batch out as computed here. The workers of a sweep or a map take the next task
whenever they are free, which is list scheduling: at most 2 - 1/m times the best schedule on m
workers (Graham 1966). Longest first is at most 4/3 - 1/(3m) times it (Graham 1969).

``--devices`` of a plan means a number of a named card, of the cards here, or CPU ranks.

>>> [(g.name, g.count) for g in parse_devices("H100 SXM x8", here=())]
[('H100 SXM', 8)]
>>> [(g.name, g.count) for g in parse_devices("RTX 4090 x1, RTX 3090", here=())]
[('RTX 4090', 1), ('RTX 3090', 1)]
>>> [(g.name, g.count) for g in parse_devices("cpu:2", here=())]
[('cpu', 2)]
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muster.base.errors import SetupError, UnknownNameError, UsageError
from muster.devices.cards import CARDS, Card, find_card
from muster.devices.inventory import Device
from muster.plan.units import (
    Bytes,
    Figure,
    Flops,
    FlopsPerSecond,
    Origin,
    Seconds,
    assumed,
    derived,
    from_table,
    measured,
    weakest,
)


class Timing(NamedTuple):
    """A measured forward and backward with its update: ``samples`` in it, and its time."""

    samples: int
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """``fixed``: the time of every forward and backward; ``per_sample``: what each sample adds."""

    fixed: Figure[Seconds]
    per_sample: Figure[Seconds]

    def of(self, samples: int, micro_batch: int | None = None) -> Figure[Seconds]:
        """The time of an optimizer step of ``samples``, in rounds of at most ``micro_batch``."""
        rounds = 1 if micro_batch is None else max(1, -(-samples // micro_batch))
        seconds = self.fixed.value * rounds + self.per_sample.value * samples
        return derived(seconds, self.fixed, self.per_sample)

    def scaled(self, factor: Figure[float]) -> ComputeTime:
        """The same work on a device that takes ``factor`` times as long for every sample.

        The fixed part is the host's and stays as it is.
        """
        seconds = self.per_sample.value * factor.value
        source = f"{self.per_sample.source} x {factor.value:.3g} ({factor.source})"
        scaled = derived(seconds, self.per_sample, factor, source=source)
        return ComputeTime(fixed=self.fixed, per_sample=scaled)


def from_timings(timings: Sequence[Timing], source: str) -> ComputeTime:
    """The line through the smallest and the largest batch; with one batch, one through zero.

    Noise can make either part negative. A negative fixed part is taken as none; where more samples
    took no more time, only the larger batch counts. ``timings`` must not be empty.
    """
    small, large = min(timings), max(timings)
    per_sample = large.seconds / large.samples
    fixed = Seconds(0.0)
    if large.samples > small.samples:
        slope = (large.seconds - small.seconds) / (large.samples - small.samples)
        rest = small.seconds - slope * small.samples
        if slope > Seconds(0.0) and rest >= Seconds(0.0):
            per_sample, fixed = slope, rest
    return ComputeTime(fixed=measured(fixed, source), per_sample=measured(per_sample, source))


def from_flops(
    per_sample: Figure[Flops], peak: Figure[FlopsPerSecond], utilisation: Figure[float]
) -> ComputeTime:
    """FLOPs of forward and backward / (peak x utilisation); nothing is known of a fixed part.

    ``utilisation`` is the MFU of Chowdhery et al. 2022 ("PaLM", appendix B).
    """
    seconds = per_sample.value / (peak.value * utilisation.value)
    source = (
        f"{per_sample.value} / ({peak.value} x {utilisation.value:g} utilisation), {peak.source}"
    )
    return ComputeTime(
        fixed=assumed(Seconds(0.0), "not known without measuring"),
        per_sample=derived(seconds, per_sample, peak, utilisation, source=source),
    )


_MOST_DEVICES = 65_536


@dataclass(frozen=True, kw_only=True)
class Group:
    """``count`` devices of one kind; ``card`` is None for CPU ranks and for unknown GPUs.

    ``memory_mib``: what the driver reports of each; None where they are not those of this machine.
    """

    name: str
    count: int
    card: Card | None = None
    memory_mib: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def memory_of_each(self) -> Figure[Bytes] | None:
        """What the driver reports, else what the data sheet says."""
        if self.memory_mib is not None:
            return measured(Bytes(float(self.memory_mib * 2**20)), "as the driver reports it")
        if self.card is None:
            return None
        return from_table(Bytes(float(self.card.memory_gib * 2**30)), self.card.source)


def parse_devices(text: str, here: Sequence[Device]) -> tuple[Group, ...]:
    """The groups in ``text``; ``here``: the GPUs of this machine.

    Raises UsageError for a text that makes no sense, UnknownNameError for a card that is not in the
    table, and SetupError for a bare number on a machine without a GPU.
    """
    groups = [_group(part.strip(), text, here) for part in text.split(",")]
    if len({group.is_cpu for group in groups}) > 1:
        raise UsageError(f"--devices {text}: CPU ranks and GPUs do not form one gang.")
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise UsageError(f"--devices {text} names a card twice.", hint="write its whole number.")
    return tuple(groups)


def card_of(name: str) -> Card | None:
    """A card by its name in the table, in any case, or by what its driver calls it."""
    exact = next((card for card in CARDS if card.name.lower() == name.lower()), None)
    return exact or find_card(name)


def _group(part: str, text: str, here: Sequence[Device]) -> Group:
    if found := re.fullmatch(r"cpu(?::(\d+))?", part, re.I):
        return Group(name="cpu", count=_count(found[1] or "1", text))
    if part.isdigit():
        return _of_this_machine(_count(part, text), here)
    named = re.fullmatch(r"(.+?)(?:\s+[x×]\s*|\s*[×]\s*|\s+x)(\d+)", part)
    name, count = (named[1], named[2]) if named else (part, "1")
    card = card_of(name)
    if card is None:
        raise UnknownNameError("card", name, [card.name for card in CARDS])
    return Group(name=card.name, count=_count(count, text), card=card)


def _of_this_machine(count: int, here: Sequence[Device]) -> Group:
    if not here:
        raise SetupError(
            f"--devices {count}: this machine has no GPU, so it is not known which card is meant.",
            hint=f'name the card: --devices "H100 SXM x{count}"; or plan CPU ranks: cpu:{count}.',
        )
    names = sorted({device.name for device in here})
    if len(names) > 1:
        raise UsageError(
            f"--devices {count}: this machine has unlike GPUs ({', '.join(names)}).",
            hint='name each: --devices "RTX 4090 x1, RTX 3090 x1".',
        )
    reported = [d.memory_total_mib for d in here if d.memory_total_mib is not None]
    memory_mib = min(reported, default=None)
    card = find_card(names[0], memory_mib)
    return Group(
        name=card.name if card else names[0], count=count, card=card, memory_mib=memory_mib
    )


def _count(digits: str, text: str) -> int:
    count = int(digits)
    if not 1 <= count <= _MOST_DEVICES:
        raise UsageError(f"--devices {text}: write 1 to {_MOST_DEVICES:,} devices, not {count}.")
    return count


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
