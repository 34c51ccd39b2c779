"""``muster plan``: what a training, a sweep or a model's memory will come to, and how wrong it was.

A plan is made from a request (``plan.request``), what is measured here, and tables; nothing here
imports torch: steps are measured by ``muster train`` in a child process.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.api.runs import Run
from muster.base.clock import SystemClock, iso_utc
from muster.base.errors import SetupError, UsageError
from muster.base.settings import Settings
from muster.devices.discovery import discover
from muster.devices.inventory import Device
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.plan.calibrate import Calibration, Probe, calibrate
from muster.plan.compute import (
    Group,
    Makespan,
    Member,
    MixedPlan,
    makespans,
    parse_devices,
    plan_mixed,
)
from muster.plan.inputs import (
    Known,
    compute_on,
    listed_inputs,
    machine_of,
    parameters_of,
    range_of,
    work_of,
)
from muster.plan.memory import (
    Footprint,
    Need,
    footprint,
    largest_micro_batch,
    read_transformer,
    remedies,
)
from muster.plan.prices import PriceList
from muster.plan.request import PlanRequest
from muster.plan.scaling import Prediction, predict
from muster.plan.units import Bytes, Figure, Seconds, assumed, given, measured

_FORMAT = 1
_ALL_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """``memory``: of one device, None for the CPU and unknown cards."""

    need: Need
    group: Group
    footprint: Footprint
    memory: Figure[Bytes] | None
    remedies: tuple[str, ...]
    most_samples: int | None

    @property
    def fits(self) -> bool | None:
        """None where it is not known; a lower bound that is too large already does not fit."""
        if self.memory is None:
            return None
        if not self.footprint.fits(self.memory.value):
            return False
        return True if self.footprint.is_whole else None

    def record(self) -> dict[str, Any]:
        return {
            **self.footprint.record(),
            "device": self.group.name,
            "num_devices": self.group.count,
            "memory": None if self.memory is None else self.memory.record(),
            "fits": self.fits,
            "remedies": list(self.remedies),
            "largest_micro_batch": self.most_samples,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """``mixed``: for unlike devices, in place of ``predictions``.

    ``slowest``, ``fastest``: the same predictions at both ends of what is published for such work,
    where nothing was measured. ``too_small``: numbers of devices on which the model does not fit.
    """

    what: str
    groups: tuple[Group, ...]
    global_batch: int
    strategy: str
    num_steps: int | None
    inputs: Mapping[str, Figure[Any]]
    predictions: tuple[Prediction, ...]
    mixed: MixedPlan | None
    memory: MemoryPlan | None
    slowest: tuple[Prediction, ...] = ()
    fastest: tuple[Prediction, ...] = ()
    too_small: tuple[int, ...] = ()

    def record(self) -> dict[str, Any]:
        """What plan.json holds, and ``--json`` prints."""
        return {
            "format": _FORMAT,
            "made": iso_utc(SystemClock().wall_s()),
            "what": self.what,
            "devices": [{"name": g.name, "count": g.count} for g in self.groups],
            "global_batch": self.global_batch,
            "strategy": self.strategy,
            "num_steps": self.num_steps,
            "inputs": {name: figure.record() for name, figure in self.inputs.items()},
            "predictions": [one.record() for one in self.predictions],
            "slowest": [one.record() for one in self.slowest],
            "fastest": [one.record() for one in self.fastest],
            "too_small": list(self.too_small),
            "mixed": None if self.mixed is None else _mixed_record(self.mixed),
            "memory": None if self.memory is None else self.memory.record(),
        }


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """``times``: of all tasks; those that have not ended take the mean of the others."""

    name: str
    num_measured: int
    num_assumed: int
    mean: Figure[Seconds]
    longest: Figure[Seconds]
    predictions: tuple[Makespan, ...]
    origin: str


def known_model(what: str, request: PlanRequest) -> Known | None:
    """The model that ``params=7e9`` or ``hf:config.json`` names; None for anything else.

    Raises UsageError for a number that is not written so.
    """
    wanted = request.parameters
    said = None if wanted is None else given(int(wanted), "--parameters")
    if what.startswith("params="):
        if said is not None:
            raise UsageError(f"{what} and --parameters {wanted:g} both give the parameters.")
        return Known(request=request, parameters=_number_of_parameters(what))
    if what.startswith("hf:"):
        transformer = read_transformer(Path(what.removeprefix("hf:")))
        count = given(transformer.parameters, "counted from the config")
        return Known(request=request, parameters=said or count, transformer=transformer)
    if not what:
        return Known(request=request, parameters=said)
    if re.fullmatch(r"\d[\d.,_]*(e\+?\d+|[kmbt])|\d[\d,_]{5,}", what, re.IGNORECASE):
        plain = re.sub(r"[,_]", "", what).lower()
        number = plain[:-1] + _POWERS[plain[-1]] if plain[-1] in _POWERS else plain
        raise UsageError(
            f"{what} is neither a task nor a run.",
            hint=f"write params={number} for a number of parameters.",
        )
    return None


#: The letters in the names of models, such as 7B.
_POWERS = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}


def known_task(
    task: str,
    flags: Sequence[str],
    request: PlanRequest,
    settings: Settings,
    say: Callable[[str], None],
) -> Known:
    """What is known of a task: measured with ``--calibrate``, else what the request says."""
    wanted = request.parameters
    said = None if wanted is None else given(int(wanted), "--parameters")
    calibration: Calibration | None = None
    if request.calibrate:
        cards = _cards_here(settings)
        groups = planned_groups(request, settings)
        on_cpu = groups[0].is_cpu or not cards
        num = sum(group.count for group in groups)
        threads = max(1, settings.cpu_count // num) if on_cpu else None
        extra = list(flags)
        if request.precision is not None:
            extra += ["--precision", request.precision]
        probe = Probe(
            task=task,
            flags=tuple(extra),
            num_steps=request.calibrate_steps,
            card="cpu" if on_cpu else cards[0].name,
            threads=settings.omp_num_threads or threads,
        )
        calibration = calibrate(probe, request.global_batch, num, say)
    return Known(request=request, parameters=said, calibration=calibration)


def plan_training(what: str, known: Known, settings: Settings, prices: PriceList) -> TrainingPlan:
    """Step time and what follows from it, for 1…N devices, or for unlike ones together.

    Raises UsageError where the request says too little or its devices cannot share the batch.
    """
    groups = planned_groups(known.request, settings)
    first = groups[0]
    work = work_of(known, first)
    machine = machine_of(known.request, first, prices)
    inputs = listed_inputs(known, first, work, machine)
    memory = _memory_of(known, first)
    mixed = None
    predictions: tuple[Prediction, ...] = ()
    slowest = fastest = predictions
    too_small: tuple[int, ...] = ()
    if len(groups) == 1:
        counts = row_counts(first.count)
        too_small = tuple(n for n in counts if not _may_fit(known, first, n))
        counts = [n for n in counts if n not in too_small]
        predictions = predict(work, machine, counts)
        if (ends := range_of(known, first)) is not None:
            slowest, fastest = (predict(work_of(e, first), machine, counts) for e in ends)
    else:
        for group in groups[1:]:
            inputs[f"time per sample on {group.name}"] = compute_on(known, group).per_sample
        mixed = _mixed(known, groups, work.global_batch)
    return TrainingPlan(
        what=what or "a training",
        groups=groups,
        global_batch=work.global_batch,
        strategy=work.strategy,
        num_steps=None if work.num_steps is None else work.num_steps.value,
        inputs=inputs,
        predictions=predictions,
        slowest=slowest,
        fastest=fastest,
        too_small=too_small,
        mixed=mixed,
        memory=memory,
    )


def _may_fit(known: Known, group: Group, num_devices: int) -> bool:
    """Whether the model fits on so many devices with one sample at a time, as far as is known."""
    plan = _memory_of(known, dataclasses.replace(group, count=num_devices))
    if plan is None or plan.memory is None:
        return True
    least = dataclasses.replace(plan.need, micro_batch=1)
    return footprint(least).fits(plan.memory.value)


def plan_memory(known: Known, settings: Settings) -> tuple[MemoryPlan, ...]:
    """Memory per GPU by part, for each kind of device; also what ``muster doctor`` shows.

    Raises UsageError where the number of parameters is not known.
    """
    groups = planned_groups(known.request, settings)
    found = [_memory_of(known, group) for group in groups]
    plans = tuple(plan for plan in found if plan is not None)
    if not plans:
        raise UsageError(
            "The memory of a model needs its number of parameters.",
            hint="write params=7e9 or hf:config.json for the model, or measure with --calibrate.",
        )
    return plans


def plan_sweep(run: Run, worker_counts: Sequence[int]) -> SweepPlan:
    """Makespans of a sweep from the times its tasks took; SetupError where none has ended."""
    times: list[float | None] = []
    with LedgerReader(run.folder.ledger) as ledger:
        for row in ledger.tasks():
            times.append(row.seconds if row.state is TaskState.DONE else None)
    known = [time for time in times if time is not None]
    if not known:
        raise SetupError(
            f"No task of {run.folder.name} has finished, so nothing is known about their times.",
            hint="plan it again when some have.",
        )
    mean_s = sum(known) / len(known)
    num_assumed = len(times) - len(known)
    full = [Seconds(mean_s if time is None else time) for time in times]
    return SweepPlan(
        name=run.folder.name,
        num_measured=len(known),
        num_assumed=num_assumed,
        mean=measured(Seconds(mean_s), f"{len(known)} finished tasks"),
        longest=measured(Seconds(max(known)), "the longest of them"),
        predictions=makespans(full, worker_counts),
        origin="assumed" if num_assumed else "measured",
    )


def planned_groups(request: PlanRequest, settings: Settings) -> tuple[Group, ...]:
    """The devices of a plan: those that are asked for, or else all GPUs here, or all cores."""
    cards = _cards_here(settings)
    text = request.devices
    if text is None:
        text = str(len(cards)) if cards else f"cpu:{settings.cpu_count}"
    return parse_devices(text, cards)


def row_counts(num_devices: int) -> list[int]:
    """Every number up to 8, above that the powers of two, and N itself."""
    counts = [n for n in range(1, num_devices + 1) if n <= _ALL_ROWS or n & (n - 1) == 0]
    return counts if counts[-1] == num_devices else [*counts, num_devices]


def _memory_of(known: Known, group: Group) -> MemoryPlan | None:
    parameters = parameters_of(known)
    if parameters is None:
        return None
    request = known.request
    shape, length = known.transformer, request.sequence_length
    precision = known.precision_on(group)
    width = 2 if precision in ("bf16", "fp16") else 4
    activations = known.calibration.activations if known.calibration else None
    checkpointed = None
    if request.activation_mib is not None:
        activations = given(Bytes(request.activation_mib * 2**20), "--activation-mib")
    elif shape is not None and length is not None:
        source = "counted from the config (Korthikanti et al. 2022)"
        activations = assumed(shape.activations(length, width), source)
        checkpointed = assumed(shape.checkpointed_activations(length, width), source)
    need = Need(
        parameters=parameters,
        activations=activations,
        checkpointed=checkpointed,
        largest_unit=None if shape is None else shape.largest_unit,
        micro_batch=_micro_batch(request, group),
        precision=precision,
        strategy=request.strategy if group.count > 1 else "single",
        num_devices=group.count,
        optimizer=request.optimizer,
        on_gpu=not group.is_cpu,
    )
    found = footprint(need)
    memory = group.memory_of_each()
    is_short = memory is not None and not found.fits(memory.value)
    return MemoryPlan(
        need=need,
        group=group,
        footprint=found,
        memory=memory,
        remedies=remedies(need, memory.value) if memory is not None and is_short else (),
        most_samples=None if memory is None else largest_micro_batch(need, memory.value),
    )


def _micro_batch(request: PlanRequest, group: Group) -> int:
    if request.batch_size is not None:
        return request.batch_size
    whole = request.global_batch
    return 1 if whole is None else -(-whole // group.count)


def _mixed(known: Known, groups: Sequence[Group], global_batch: int) -> MixedPlan:
    members: list[Member] = []
    for group in groups:
        one = dataclasses.replace(group, count=1)
        memory = _memory_of(known, one)
        member = Member(
            name=group.name,
            compute=compute_on(known, group),
            most_samples=None if memory is None else memory.most_samples,
        )
        members += [member] * group.count
    plan = plan_mixed(members, global_batch)
    if plan is None:
        raise UsageError(
            f"A global batch of {global_batch} cannot be shared by these {len(members)} devices.",
            hint="every device needs a sample, and all of them must fit; try another one.",
        )
    return plan


def _number_of_parameters(what: str) -> Figure[int]:
    text = what.removeprefix("params=")
    with suppress(ValueError, OverflowError):
        if (count := int(float(text))) > 0:
            return given(count, what)
    raise UsageError(f"{what}: {text!r} is not a number of parameters.", hint="write params=7e9.")


def _cards_here(settings: Settings) -> tuple[Device, ...]:
    return tuple(device for device in discover(settings).devices if device.lost is None)


def _mixed_record(plan: MixedPlan) -> dict[str, Any]:
    return {
        "equal": {"shares": list(plan.equal.shares), "step_s": plan.equal.step.value},
        "balanced": {"shares": list(plan.balanced.shares), "step_s": plan.balanced.step.value},
        "lost": plan.lost,
        "origin": plan.origin,
    }
