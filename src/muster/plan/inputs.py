"""Turns what was asked for, what was measured and the tables into the inputs of the formulas.

Each value has its origin; what is missing is an error that says how to give it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from muster.base.errors import UsageError
from muster.devices.cards import Card, Precision
from muster.plan.calibrate import Calibration
from muster.plan.communication import Fabric, find_link, given_link, presumed, usual_link
from muster.plan.compute import ComputeTime, Group, card_of, from_flops
from muster.plan.memory import Transformer
from muster.plan.prices import PriceList
from muster.plan.published import Reach, of_kind, reach
from muster.plan.request import KindOfWork, PlanRequest
from muster.plan.scaling import Machine, Work
from muster.plan.units import (
    Bytes,
    Figure,
    Flops,
    FlopsPerSecond,
    Seconds,
    Watts,
    assumed,
    derived,
    from_table,
    given,
)

#: What a training of which nothing is known reaches of the peak: usually, at least, at most.
_OF_OTHERS = Reach(0.25, 0.1, 0.5)
_GRADIENT_BYTES = 4  # under autocast gradients are fp32


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of the model before anything is computed. ``transformer``: from a config."""

    request: PlanRequest
    parameters: Figure[int] | None = None
    calibration: Calibration | None = None
    transformer: Transformer | None = None

    @property
    def precision(self) -> Precision | None:
        wanted = self.request.precision
        if wanted is not None or self.calibration is None:
            return wanted
        return self.calibration.precision  # type: ignore[return-value]

    def precision_on(self, group: Group) -> Precision:
        return self.precision or ("fp32" if group.is_cpu else "bf16")


def work_of(known: Known, group: Group) -> Work:
    """The training as the formulas take it. Raises UsageError for what is missing."""
    request = known.request
    batch = _global_batch(known)
    rate, spread = request.input_rate, request.step_spread
    loading = assumed(Seconds(0.0), "not known; that loaders keep up")
    if known.calibration is not None:
        loading = known.calibration.loading
    is_here = known.calibration is not None and known.calibration.card == group.name
    compute, gradients = compute_on(known, group), _gradients(known)
    # Muster's FSDP gathers weights in bf16 where it computes in it; of fp16, fp32 is gathered.
    is_half = known.precision_on(group) == "bf16"
    return Work(
        compute=compute,
        crowding=known.calibration.crowding if known.calibration and is_here else None,
        gradients=gradients,
        gathered=derived(gradients.value * 0.5, gradients) if is_half else None,
        global_batch=batch.value,
        micro_batch=request.batch_size,
        num_steps=_num_steps(request, known.calibration, batch.value),
        strategy=request.strategy,
        loading=loading,
        input_rate=None if rate is None else given(rate, "--input-rate"),
        spread=None if spread is None else given(spread, "--step-spread"),
    )


def machine_of(request: PlanRequest, group: Group, prices: PriceList) -> Machine:
    """How devices of ``group`` are joined and what they cost."""
    name = request.link or usual_link(group.name)
    link = given_link(name, request.link_bandwidth_gb_s, request.link_latency_us)
    if request.link is None:
        link = presumed(link)
    nodes = request.devices_per_node
    if nodes is not None and group.count > nodes and request.network is None:
        raise UsageError(
            f"{group.count} devices, {nodes} per node, are {math.ceil(group.count / nodes)} nodes, "
            "and nothing is said about what joins them.",
            hint="add --network net100.",
        )
    network = None if request.network is None else find_link(request.network)
    host = link if group.is_cpu else find_link("gloo-loopback")
    return Machine(
        fabric=Fabric(
            link=link,
            devices_per_node=nodes,
            network=network,
            host=host,
            overlaps=not group.is_cpu,
        ),
        power=_power(request, group.card),
        price=prices.price(group.name, is_owned=request.owned),
    )


def compute_on(known: Known, group: Group) -> ComputeTime:
    """The time of a step on one device of ``group``: measured, measured elsewhere, or derived."""
    calibration = known.calibration
    if calibration is None or is_derived(known, group):
        return _derived(known, group)
    if _is_measured_on(calibration, group):
        return calibration.compute
    here = card_of(calibration.card)
    precision = known.precision_on(group)
    mine = None if here is None else here.peak_flops(precision)
    theirs = None if group.card is None else group.card.peak_flops(precision)
    if mine is None or theirs is None:
        raise UsageError(
            f"The steps were measured on {calibration.card}, which says nothing about "
            f"{group.name}: their peaks in {precision} are not both known.",
            hint="give --flops-per-sample, or plan the device that was measured.",
        )
    ratio = assumed(mine / theirs, f"as their peaks in {precision}")
    return calibration.compute.scaled(ratio)


def is_derived(known: Known, group: Group) -> bool:
    """Whether steps were measured neither on such a device nor on one whose peak compares."""
    calibration = known.calibration
    if calibration is None:
        return True
    if _is_measured_on(calibration, group):
        return False
    is_unknown = card_of(calibration.card) is None or group.card is None
    return is_unknown and flops_of(known) is not None


def _is_measured_on(calibration: Calibration, group: Group) -> bool:
    here = card_of(calibration.card)
    return calibration.card == group.name or (here is not None and here == group.card)


def peak_of(known: Known, group: Group) -> Figure[FlopsPerSecond]:
    """Dense peak of one device. Raises UsageError where it is not known."""
    wanted = known.request.peak_tflops
    if wanted is not None:
        return given(FlopsPerSecond(wanted * 1e12), "--peak-tflops")
    precision = known.precision_on(group)
    peak = None if group.card is None else group.card.peak_flops(precision)
    if peak is None or group.card is None:
        raise UsageError(
            f"The peak of {group.name} in {precision} is not in the table of cards.",
            hint="give it as --peak-tflops, or plan a task and measure with --calibrate.",
        )
    return from_table(FlopsPerSecond(peak), f"{group.card.source}, {precision}, dense")


def flops_of(known: Known) -> Figure[Flops] | None:
    """Operations of one sample: as given, as counted, or from the config of a transformer."""
    wanted = known.request.flops_per_sample
    if wanted is not None:
        return given(Flops(wanted), "--flops-per-sample")
    if known.calibration is not None and known.calibration.flops_per_sample is not None:
        return known.calibration.flops_per_sample
    length = known.request.sequence_length
    if known.transformer is not None and length is not None:
        flops = known.transformer.flops_per_sample(length)
        return given(flops, f"6 N + 12 L H Q T per token of {length}, from the config")
    return None


def parameters_of(known: Known) -> Figure[int] | None:
    if known.parameters is not None:
        return known.parameters
    return None if known.calibration is None else known.calibration.parameters


def listed_inputs(
    known: Known, group: Group, work: Work, machine: Machine
) -> dict[str, Figure[Any]]:
    """Everything the predictions rest on, by name, for showing."""
    link, network = machine.fabric.link, machine.fabric.network
    found: dict[str, Figure[Any] | None] = {
        **(_derived_from(known, group) if is_derived(known, group) else {}),
        "time per sample": work.compute.per_sample,
        "fixed time per step": work.compute.fixed,
        "gradients": work.gradients,
        "loading per sample": work.loading,
        "input rate, samples/s": work.input_rate,
        "spread of step times": work.spread,
        "longer with all at work": work.crowding.factor if work.crowding else None,
        "optimizer steps": work.num_steps,
        f"{link.name}: latency": link.alpha,
        f"{link.name}: bandwidth": link.bandwidth,
        f"{link.name}: share reached": link.share,
        "power per device": machine.power,
    }
    if network is not None:
        found[f"{network.name}: latency"] = network.alpha
        found[f"{network.name}: bandwidth"] = network.bandwidth
    if machine.price is not None:
        price = machine.price
        found["price"] = Figure(value=str(price), origin=price.origin, source=price.source)
    return {name: figure for name, figure in found.items() if figure is not None}


def _derived_from(known: Known, group: Group) -> dict[str, Figure[Any] | None]:
    return {
        "operations per sample": flops_of(known),
        "peak": peak_of(known, group),
        "utilisation": _utilisation(known, group),
    }


def _utilisation(known: Known, group: Group) -> Figure[float]:
    rate = known.request.utilisation
    if rate is not None:
        return given(rate, "--utilisation")
    found, source = _reach(known, group)
    return assumed(found.usual, f"between {found.least:.2g} and {found.most:.2g}: {source}")


def _reach(known: Known, group: Group) -> tuple[Reach, str]:
    """The shares of the peak that such work reaches on such a device, and where they are from."""
    kind = kind_of_work(known)
    if kind == "other":
        return _OF_OTHERS, "nothing is known of the work (--work); from small kernels to LLMs"
    cases = of_kind(kind)
    card = None if known.request.peak_tflops is not None else group.card
    found = reach(kind, card, known.precision_on(group), cases)
    names = ", ".join(dict.fromkeys(case.name.partition(",")[0] for case in cases))
    return found, f"nine of ten, by what is published of {len(cases)} trainings: {names}"


def kind_of_work(known: Known) -> KindOfWork:
    """What the model mostly computes: as given, or a transformer where its config was read."""
    said = known.request.work
    return said or ("transformer" if known.transformer is not None else "other")


def range_of(known: Known, group: Group) -> tuple[Known, Known] | None:
    """``known`` with the least and with the most utilisation, as published work has it.

    None where nothing of the kind is assumed: steps were measured, or the utilisation is given.
    """
    if known.request.utilisation is not None or not is_derived(known, group):
        return None
    found, _ = _reach(known, group)
    return _with_utilisation(known, found.least), _with_utilisation(known, found.most)


def _with_utilisation(known: Known, rate: float) -> Known:
    return replace(known, request=replace(known.request, utilisation=rate))


def _derived(known: Known, group: Group) -> ComputeTime:
    flops = flops_of(known)
    if flops is None:
        hint = "give --flops-per-sample, or for a task add --calibrate to measure some steps here."
        if known.transformer is not None:
            hint = "add --sequence-length."
        raise UsageError("Nothing is known about how long a step takes.", hint=hint)
    return from_flops(flops, peak_of(known, group), _utilisation(known, group))


def _global_batch(known: Known) -> Figure[int]:
    wanted = known.request.global_batch
    if wanted is not None:
        return given(wanted, "--global-batch")
    if known.calibration is not None:
        return known.calibration.global_batch
    if flops_of(known) is not None:
        raise UsageError(
            "A plan needs the number of samples per optimizer step.", hint="give --global-batch."
        )
    if known.transformer is not None:
        hint = "give --global-batch and --sequence-length."
    elif known.parameters is not None:
        hint = "give --global-batch and --flops-per-sample."
    else:
        hint = (
            "add --calibrate to measure some steps of the task here, which gives both; or give "
            "--global-batch and --flops-per-sample."
        )
    raise UsageError(
        "A plan needs the number of samples per optimizer step, and how long a step takes.",
        hint=hint,
    )


def _gradients(known: Known) -> Figure[Bytes]:
    count = parameters_of(known)
    if count is None:
        raise UsageError(
            "The number of parameters is not known, so neither is what has to be communicated.",
            hint="give --parameters 7e9, or params=7e9 in place of the task.",
        )
    source = f"{count.value:,} parameters x {_GRADIENT_BYTES} bytes ({count.source})"
    return derived(Bytes(float(count.value * _GRADIENT_BYTES)), count, source=source)


def _num_steps(
    request: PlanRequest, calibration: Calibration | None, global_batch: int
) -> Figure[int] | None:
    if request.steps is not None:
        return given(request.steps, "--steps")
    samples: Figure[int] | None = calibration.num_samples if calibration else None
    epochs: Figure[int] | Figure[float] | None = calibration.epochs if calibration else None
    if request.samples is not None:
        samples = given(int(request.samples), "--samples")
    if request.epochs is not None:
        epochs = given(request.epochs, "--epochs")
    if samples is None or (epochs is None and request.samples is None):
        return None
    passes = 1.0 if epochs is None else float(epochs.value)
    steps = math.ceil(math.ceil(samples.value / global_batch) * passes)
    times = f"{passes:g} epoch{'s' * (passes != 1)}"
    source = f"{times} of {samples.value:,} samples, {global_batch} at a time"
    return derived(steps, samples, epochs, source=source)


def _power(request: PlanRequest, card: Card | None) -> Figure[Watts] | None:
    if request.power_w is not None:
        return given(Watts(request.power_w), "--power-w")
    if card is None:
        return None
    return from_table(
        Watts(float(card.power_w)), f"{card.source}: the card's limit, all the time; no host"
    )
