"""Step time, speed-up, efficiency, wall time, energy and money on 1…N devices of one kind.

    step = compute x straggler factor + loading + exposed communication + agreement
    step ≥ global batch / input rate

Every device takes an equal share of the global batch, the largest share being rounded up. What the
model leaves out: start-up, evaluation, checkpoints, clocks that fall when a card gets hot, and
cores that run out when many ranks load data.

Gradients are sent while the backward still runs, bucket by bucket, as DistributedDataParallel does
(Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training"). They
become ready from the last layer to the first; a bucket is sent when it is full and the one before
it has gone. What is not yet sent when the backward ends is *exposed*: the step waits for it.

Devices wait for the slowest: synchronous reinforcement learning for the longest episode, a gang
for its slowest rank. Times are taken as independent and normal around their mean, with a relative
spread. Devices of one host also slow each other by what they share (`Crowding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from muster.base.errors import UsageError
from muster.plan.communication import Fabric, agreement, gradient_sum, sharded_sum
from muster.plan.compute import ComputeTime
from muster.plan.prices import Price
from muster.plan.units import (
    Bytes,
    Figure,
    Joules,
    Money,
    Seconds,
    Watts,
    assumed,
    derived,
    measured,
)

#: Where the integral of `expected_largest` is cut off, and how many points it has.
_LIMIT, _POINTS = 9.0, 1801


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """Devices that slow each other by sharing something, as cores share memory and caches.

    ``factor``: how much longer each takes when ``num_devices`` of them are at work, measured
    without communication. In between it is taken to grow evenly.
    """

    factor: Figure[float]
    num_devices: int

    def at(self, num_devices: int) -> float:
        """The factor of ``num_devices``; 1 for one."""
        return 1.0 + (self.factor.value - 1.0) * (num_devices - 1) / (self.num_devices - 1)


def expected_largest(count: int) -> float:
    """The expected largest of ``count`` standard normal values, in standard deviations.

    The integral of x n φ(x) Φ(x)^(n-1) by Simpson's rule; 1/√π for two. David & Nagaraja 2003,
    "Order Statistics", table of expected values.

    >>> round(expected_largest(1), 6) + 0.0, round(expected_largest(2), 4)
    (0.0, 0.5642)
    """
    step = 2 * _LIMIT / (_POINTS - 1)
    total = 0.0
    for index in range(_POINTS):
        x = -_LIMIT + index * step
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        below = 0.5 * math.erfc(-x / math.sqrt(2))
        weight = 1 if index in (0, _POINTS - 1) else 4 if index % 2 else 2
        total += weight * x * count * density * below ** (count - 1)
    return max(0.0, total * step / 3)


def straggler_factor(count: int, spread: float) -> float:
    """How much longer the slowest of ``count`` takes than the mean, as a factor of at least 1.

    ``spread``: standard deviation over mean of one device's time.
    """
    return 1.0 + spread * expected_largest(count)


#: torch's defaults: 1 MiB first, so that sending starts early, then 25 MiB. Where nothing is hidden
#: by an early start, on CPUs, a training has no small first one.
FIRST_BUCKET = Bytes(2**20)
BUCKET = Bytes(25 * 2**20)


def buckets_of(size: Bytes, *, overlaps: bool) -> tuple[Bytes, ...]:
    """The sizes of the buckets, in the order in which they are sent; they add up to ``size``.
    ``overlaps``: see `Fabric`.
    """
    first = FIRST_BUCKET if overlaps else BUCKET
    if size <= first:
        return (size,)
    rest = size - first
    whole = int(rest / BUCKET)
    last = rest - BUCKET * whole
    return (first, *[BUCKET] * whole, *([last] if last.value > 0 else []))


def exposed(
    buckets: Sequence[Bytes], backward: Seconds, send: Callable[[Bytes], Seconds]
) -> Seconds:
    """How long the step waits for gradients after a backward that takes ``backward``.

    Gradients are taken to become ready evenly. ``send``: the time of an all-reduce. The result is
    never less than the last bucket's own time, and never more than that of all of them.
    """
    total = sum(bucket.value for bucket in buckets)
    ready, line_free = 0.0, Seconds(0.0)
    for bucket in buckets:
        ready += bucket.value
        is_full_at = backward * (ready / total if total > 0 else 1.0)
        line_free = max(is_full_at, line_free) + send(bucket)
    return max(line_free - backward, Seconds(0.0))


Strategy = Literal["ddp", "fsdp"]
#: What a step spends most of its time on.
Bound = Literal["compute", "communication", "input"]

#: A backward computes twice what a forward does (Kaplan et al. 2020, "Scaling laws", section 2.1).
BACKWARD_SHARE = assumed(2 / 3, "a backward computes twice what a forward does")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training.

    ``gradients``: bytes that are added up per step, and ``gathered``: those of the weights as FSDP
    gathers them, None where they have as many; ``loading``: time per sample that a rank spends on
    fetching it between steps (loader processes hide it, then it is 0); ``input_rate``: samples/s
    that can be delivered to all devices together; ``num_steps``: None where it is not known;
    ``spread``: of a device's compute time, standard deviation over mean.
    """

    compute: ComputeTime
    gradients: Figure[Bytes]
    global_batch: int
    loading: Figure[Seconds]
    micro_batch: int | None = None
    num_steps: Figure[int] | None = None
    strategy: Strategy = "ddp"
    gathered: Figure[Bytes] | None = None
    input_rate: Figure[float] | None = None
    spread: Figure[float] | None = None
    crowding: Crowding | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``power``: of one device under load, and ``price``: None where they are not known."""

    fabric: Fabric
    power: Figure[Watts] | None = None
    price: Price | None = None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The parts of a step on some devices. ``communication`` is all of it, hidden or not."""

    num_devices: int
    samples_per_device: int
    step: Figure[Seconds]
    compute: Figure[Seconds]
    loading: Figure[Seconds]
    communication: Figure[Seconds]
    exposed: Figure[Seconds]
    bound: Bound


@dataclass(frozen=True, kw_only=True)
class Prediction(_Step):
    """The prediction for one number of devices."""

    samples_per_s: Figure[float]
    speed_up: Figure[float]
    efficiency: Figure[float]
    wall: Figure[Seconds] | None
    energy: Figure[Joules] | None
    cost: Figure[Money] | None

    def record(self) -> dict[str, Any]:
        """As JSON, each figure with its unit and origin."""
        return {
            name: value.record() if isinstance(value, Figure) else value
            for name, value in vars(self).items()
        }


def predict(work: Work, machine: Machine, counts: range | list[int]) -> tuple[Prediction, ...]:
    """Predict for each number of devices. Raises UsageError where a device would get no sample."""
    if max(counts, default=0) > work.global_batch:
        raise UsageError(
            f"A global batch of {work.global_batch} cannot be shared by {max(counts)} devices.",
            hint="give a larger --global-batch, or fewer devices.",
        )
    alone = _step(work, machine, 1)
    return tuple(_finished(work, machine, alone, _step(work, machine, n)) for n in counts)


def _step(work: Work, machine: Machine, num_devices: int) -> _Step:
    samples = -(-work.global_batch // num_devices)
    compute = _compute(work, samples, num_devices)
    loading = derived(work.loading.value * samples, work.loading)
    communication, waits = _communication(work, machine.fabric, num_devices, samples)
    parts: dict[Bound, Seconds] = {
        "compute": compute.value,
        "communication": waits.value,
        "input": loading.value,
    }
    bound = max(parts, key=lambda name: parts[name])
    total = compute.value + loading.value + waits.value
    if work.input_rate is not None:
        least = Seconds(work.global_batch / work.input_rate.value)
        total, bound = (least, "input") if least > total else (total, bound)
    return _Step(
        num_devices=num_devices,
        samples_per_device=samples,
        step=derived(total, compute, loading, waits, work.input_rate),
        compute=compute,
        loading=loading,
        communication=communication,
        exposed=waits,
        bound=bound,
    )


def _compute(work: Work, samples: int, num_devices: int) -> Figure[Seconds]:
    time = work.compute.of(samples, work.micro_batch)
    if num_devices == 1:
        return time
    crowding, spread = work.crowding, work.spread
    factor = 1.0 if crowding is None else crowding.at(num_devices)
    factor *= 1.0 if spread is None else straggler_factor(num_devices, spread.value)
    return derived(time.value * factor, time, crowding.factor if crowding else None, spread)


def _communication(
    work: Work, fabric: Fabric, num_devices: int, samples: int
) -> tuple[Figure[Seconds], Figure[Seconds]]:
    """All communication of a step, and the part of it that the step waits for."""
    if num_devices == 1:
        nothing = measured(Seconds(0.0), "one device")
        return nothing, nothing
    rounds = 1 if work.micro_batch is None else -(-samples // work.micro_batch)
    in_round = -(-samples // rounds)
    small = agreement(num_devices, fabric)
    one_round = work.compute.of(in_round)
    gradient: Figure[Seconds]
    if work.strategy == "fsdp":
        weights = work.gathered or work.gradients
        moved = weights.value, work.gradients.value
        gradient = sharded_sum(*moved, num_devices, fabric, rounds)
        # Gathering ahead hides it behind all of the computing; that it does is assumed.
        hides = work.compute.of(samples, work.micro_batch).value
        late = max(gradient.value - hides, Seconds(0.0)) if fabric.overlaps else gradient.value
    else:
        buckets = buckets_of(work.gradients.value, overlaps=fabric.overlaps)
        sums = [gradient_sum(bucket, num_devices, fabric) for bucket in buckets]
        total = sum((one.value for one in sums), Seconds(0.0))
        gradient = derived(total, *sums)
        backward = one_round.value * (BACKWARD_SHARE.value if fabric.overlaps else 0.0)
        late = exposed(buckets, backward, lambda b: gradient_sum(b, num_devices, fabric).value)
    everything = derived(gradient.value + small.value, gradient, work.gradients, small)
    waits = derived(late + small.value, gradient, one_round, work.gradients, BACKWARD_SHARE, small)
    return everything, waits


def _finished(work: Work, machine: Machine, alone: _Step, step: _Step) -> Prediction:
    num = step.num_devices
    speed_up = alone.step.value / step.step.value
    wall = energy = cost = None
    if work.num_steps is not None:
        wall = derived(step.step.value * work.num_steps.value, step.step, work.num_steps)
        if machine.power is not None:
            energy = derived(machine.power.value * wall.value * num, machine.power, wall)
        if machine.price is not None:
            cost = machine.price.of(num, wall, energy)
    return Prediction(
        **vars(step),
        samples_per_s=derived(work.global_batch / step.step.value.value, step.step),
        speed_up=derived(speed_up, alone.step, step.step),
        efficiency=derived(speed_up / num, alone.step, step.step),
        wall=wall,
        energy=energy,
        cost=cost,
    )
