"""Step time, speed-up, efficiency, wall time, energy and money on 1…N devices of one kind.

    step = compute x straggler factor + loading + exposed communication + agreement
    step ≥ global batch / input rate

Every device takes an equal share of the global batch, the largest share being rounded up. What the
model leaves out: start-up, evaluation, checkpoints, clocks that fall when a card gets hot, and
cores that run out when many ranks load data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from muster.base.errors import UsageError
from muster.plan.communication import Fabric, agreement, gradient_sum, sharded_sum
from muster.plan.compute import ComputeTime
from muster.plan.origin import Figure, assumed, measured, weakest
from muster.plan.overlap import buckets_of, exposed
from muster.plan.prices import Price
from muster.plan.stragglers import Crowding, straggler_factor
from muster.plan.units import Bytes, Joules, Money, Seconds, Watts

Strategy = Literal["ddp", "fsdp"]

#: A backward computes twice what a forward does (Kaplan et al. 2020, "Scaling laws", section 2.1).
BACKWARD_SHARE = assumed(2 / 3, "a backward computes twice what a forward does")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training.

    ``gradients``: bytes that are added up per step; ``loading``: time per sample that a rank spends
    on fetching it between steps (loader processes hide it, then it is 0); ``input_rate``: samples/s
    that can be delivered to all devices together; ``num_steps``: None where it is not known;
    ``spread``: of a device's compute time, relative, and ``crowding``: see ``stragglers``.
    """

    compute: ComputeTime
    gradients: Figure[Bytes]
    global_batch: int
    loading: Figure[Seconds]
    micro_batch: int | None = None
    num_steps: Figure[int] | None = None
    strategy: Strategy = "ddp"
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
class Prediction:
    """What one number of devices comes to. ``communication`` is all of it, hidden or not."""

    num_devices: int
    samples_per_device: int
    step: Figure[Seconds]
    compute: Figure[Seconds]
    loading: Figure[Seconds]
    communication: Figure[Seconds]
    exposed: Figure[Seconds]
    samples_per_s: Figure[float]
    speed_up: Figure[float]
    efficiency: Figure[float]
    wall: Figure[Seconds] | None
    energy: Figure[Joules] | None
    cost: Figure[Money] | None
    bound: Literal["compute", "communication", "input"]

    def record(self) -> dict[str, Any]:
        """As JSON, each figure with its unit and origin."""
        return {
            name: value.record() if isinstance(value, Figure) else value
            for name, value in vars(self).items()
        }


def predict(work: Work, machine: Machine, counts: range | list[int]) -> tuple[Prediction, ...]:
    """A prediction for each number of devices; UsageError where a device would get no sample."""
    if max(counts, default=0) > work.global_batch:
        raise UsageError(
            f"A global batch of {work.global_batch} cannot be shared by {max(counts)} devices.",
            hint="give a larger --global-batch, or fewer devices.",
        )
    alone = _step(work, machine, 1)
    return tuple(_finished(work, machine, alone, _step(work, machine, n)) for n in counts)


@dataclass(frozen=True, kw_only=True)
class _Step:
    num_devices: int
    samples: int
    compute: Figure[Seconds]
    loading: Figure[Seconds]
    communication: Figure[Seconds]
    exposed: Figure[Seconds]
    total: Figure[Seconds]
    is_fed: bool


def _step(work: Work, machine: Machine, num_devices: int) -> _Step:
    samples = -(-work.global_batch // num_devices)
    compute = _compute(work, samples, num_devices)
    loading = _loading(work, samples)
    communication, waits = _communication(work, machine.fabric, num_devices, samples)
    total = compute.value + loading.value + waits.value
    origin = weakest([compute, loading, waits])
    is_fed = True
    if work.input_rate is not None:
        least = Seconds(work.global_batch / work.input_rate.value)
        origin = weakest([compute, loading, waits, work.input_rate])
        is_fed = least <= total
        total = max(total, least)
    return _Step(
        num_devices=num_devices,
        samples=samples,
        compute=compute,
        loading=loading,
        communication=communication,
        exposed=waits,
        total=Figure(value=total, origin=origin),
        is_fed=is_fed,
    )


def _compute(work: Work, samples: int, num_devices: int) -> Figure[Seconds]:
    time = work.compute.of(samples, work.micro_batch)
    if num_devices == 1:
        return time
    rests_on: list[Figure[Any]] = [time]
    factor = 1.0
    if work.crowding is not None:
        factor *= work.crowding.at(num_devices)
        rests_on.append(work.crowding.factor)
    if work.spread is not None:
        factor *= straggler_factor(num_devices, work.spread.value)
        rests_on.append(work.spread)
    return Figure(value=time.value * factor, origin=weakest(rests_on))


def _loading(work: Work, samples: int) -> Figure[Seconds]:
    return Figure(value=work.loading.value * samples, origin=work.loading.origin)


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
        gradient = sharded_sum(work.gradients.value, num_devices, fabric, rounds)
        # Gathering ahead hides it behind all of the computing; that it does is assumed.
        hides = work.compute.of(samples, work.micro_batch).value
        late = max(gradient.value - hides, Seconds(0.0)) if fabric.overlaps else gradient.value
    else:
        buckets = buckets_of(work.gradients.value)
        sums = [gradient_sum(bucket, num_devices, fabric) for bucket in buckets]
        total = sum((one.value for one in sums), Seconds(0.0))
        gradient = Figure(value=total, origin=weakest(sums))
        backward = one_round.value * (BACKWARD_SHARE.value if fabric.overlaps else 0.0)
        late = exposed(buckets, backward, lambda b: gradient_sum(b, num_devices, fabric).value)
    everything = Figure(
        value=gradient.value + small.value, origin=weakest([gradient, work.gradients, small])
    )
    inputs: list[Figure[Any]] = [gradient, one_round, work.gradients, BACKWARD_SHARE, small]
    return everything, Figure(value=late + small.value, origin=weakest(inputs))


def _finished(work: Work, machine: Machine, alone: _Step, step: _Step) -> Prediction:
    num = step.num_devices
    speed_up = alone.total.value / step.total.value
    origin = weakest([alone.total, step.total])
    rate = Figure(value=work.global_batch / step.total.value.value, origin=step.total.origin)
    wall = energy = cost = None
    if work.num_steps is not None:
        wall = Figure(
            value=step.total.value * work.num_steps.value,
            origin=weakest([step.total, work.num_steps]),
        )
        if machine.power is not None:
            energy = Figure(
                value=machine.power.value * wall.value * num,
                origin=weakest([machine.power, wall]),
            )
        if machine.price is not None:
            cost = machine.price.of(num, wall, energy)
    return Prediction(
        num_devices=num,
        samples_per_device=step.samples,
        step=step.total,
        compute=step.compute,
        loading=step.loading,
        communication=step.communication,
        exposed=step.exposed,
        samples_per_s=rate,
        speed_up=Figure(value=speed_up, origin=origin),
        efficiency=Figure(value=speed_up / num, origin=origin),
        wall=wall,
        energy=energy,
        cost=cost,
        bound=_bound(step),
    )


def _bound(step: _Step) -> Literal["compute", "communication", "input"]:
    if not step.is_fed:
        return "input"
    parts: dict[Literal["compute", "communication", "input"], Seconds] = {
        "compute": step.compute.value,
        "communication": step.exposed.value,
        "input": step.loading.value,
    }
    return max(parts, key=lambda name: parts[name])
