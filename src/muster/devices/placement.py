"""Where workers run: a request and an inventory in, slots out. Pure; see ``leases`` for the edge.

GPUs are named as the user's own programs name them, ``cuda:N``, where N counts the visible
devices. Workers are given UUIDs, which mean the same GPU whatever else is visible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from muster.base.errors import PlacementError, UsageError
from muster.base.shown_text import count as counted
from muster.devices.inventory import Device, DeviceRequest, Inventory

#: A GPU counts as free while others hold no more of it than this.
_BUSY_MIB = 500
_NOBODY: Mapping[str, str] = MappingProxyType({})
#: Why a MIG instance is left alone.
_MIG = "a MIG instance: one process sees a single one of them"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One place where a worker runs.

    ``label``: ``cuda:0``, ``cuda:0/1`` (the second worker on that GPU), ``cuda:2+3``, ``cpu:1``.
    ``visible_devices``: the worker's CUDA_VISIBLE_DEVICES; ``""`` hides every GPU (CPU slots).
    ``num_threads``: the worker's share of the cores, at least 1.
    ``memory_mib``: the slot's share of its devices' memory, None where that is not known.
    """

    slot_id: int
    label: str
    kind: Literal["cuda", "cpu"]
    device_uuids: tuple[str, ...] = ()
    visible_devices: str | None = ""
    num_threads: int = 1
    memory_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A device (by its label) that was considered and left alone, and why."""

    device: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    """``notes``: sentences that say where this differs from what was asked for."""

    slots: tuple[Slot, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Gpu:
    ordinal: int
    device: Device

    @property
    def label(self) -> str:
        return f"cuda:{self.ordinal}"


def place(
    request: DeviceRequest,
    inventory: Inventory,
    *,
    per_gpu: int,
    gpus_per_task: int,
    cpu_count: int,
    force: bool,
    leased: Mapping[str, str] = _NOBODY,
    own_pids: Collection[int] = (),
) -> Placement:
    """The slots that ``request`` means on this host.

    A GPU is left out, with the reason in ``skipped``, when it is lost, when others hold more than
    500 MiB of it, or when its UUID is in ``leased`` (UUID -> reason); ``force`` takes it all the
    same unless it is lost. ``own_pids``: this process and those it runs for, which may hold a GPU
    that they now ask for. It is no error that fewer GPUs are free than were asked for, as long as
    one task fits and the request is not exact. Raises UsageError for numbers that contradict each
    other, and PlacementError when the host has too few GPUs or none is left.
    """
    _check(request, per_gpu, gpus_per_task, cpu_count)
    if request.kind == "cpu":
        return _on_cpu(request.count, cpu_count, (), _idle_options(per_gpu, gpus_per_task))

    gpus = _candidates(request, inventory, gpus_per_task)
    reasons = {gpu.ordinal: _reason(gpu, leased, own_pids) for gpu in gpus}
    usable = [
        gpu for gpu in gpus if gpu.device.lost is None and (force or not reasons[gpu.ordinal])
    ]
    # A gang has one list of visible devices, and so has a task of several GPUs.
    together = _in_one_list(usable) if request.is_exact or gpus_per_task > 1 else usable
    asked = len(request.ids) if request.kind == "ids" else request.count
    if asked is None or len(together) < asked:
        reasons |= {gpu.ordinal: _MIG for gpu in usable if gpu not in together}
    usable = together
    if request.count is not None:
        # With force, a GPU that nobody uses still comes before one that somebody does.
        usable.sort(key=lambda gpu: reasons[gpu.ordinal] is not None)
        usable = sorted(usable[: request.count], key=lambda gpu: gpu.ordinal)
    skipped = [
        Skipped(device=gpu.label, reason=reason)
        for gpu in gpus
        if (reason := reasons[gpu.ordinal]) and gpu not in usable
    ]

    if request.is_exact and request.kind != "auto" and asked is not None and len(usable) < asked:
        raise _too_few(request, asked, usable, skipped)
    groups = [
        usable[start : start + gpus_per_task]
        for start in range(0, len(usable) - gpus_per_task + 1, gpus_per_task)
    ]
    notes = tuple(note for note in (inventory.visibility_note,) if note is not None)
    if not groups:
        if request.kind == "auto" and gpus_per_task == 1:
            if skipped:
                notes = (*notes, "No GPU is free, so the workers run on the CPU.")
            notes = (*notes, *_idle_options(per_gpu, gpus_per_task))
            return _on_cpu(None, cpu_count, tuple(skipped), notes)
        raise _nothing_left(request, inventory, usable, skipped, gpus_per_task)
    skipped += [
        Skipped(device=gpu.label, reason=f"left over from groups of {gpus_per_task} GPUs")
        for gpu in usable[len(groups) * gpus_per_task :]
    ]
    if per_gpu > 1 and inventory.has_mps:
        notes = (*notes, "NVIDIA MPS runs here: the workers of a GPU compute side by side.")
    elif per_gpu > 1:
        _refuse_sharing(usable, per_gpu)
    slots = _gpu_slots(groups, per_gpu, cpu_count)
    return Placement(slots=slots, skipped=tuple(skipped), notes=notes)


def busy_reason(device: Device, own_pids: Collection[int] = ()) -> str | None:
    """Who else than ``own_pids`` holds ``device``, in words; None when it is free.

    It is free while others hold no more than 500 MiB in total. The total counts because the driver
    may not list processes of other containers and users.
    """
    others = [holder for holder in device.holders if holder.pid not in own_pids]
    own = [holder.used_mib for holder in device.holders if holder.pid in own_pids]
    held_mib = sum(holder.used_mib or 0 for holder in others)
    if device.memory_used_mib is not None and None not in own:
        held_mib = device.memory_used_mib - sum(mib or 0 for mib in own)
    if held_mib <= _BUSY_MIB:
        return None
    if not others:
        return f"busy: {held_mib} MiB are held by processes that the driver does not list"
    largest = sorted(others, key=lambda holder: (-(holder.used_mib or 0), holder.pid))
    words = [
        f"pid {holder.pid} ({holder.user or 'unknown user'}) holds "
        + ("memory" if holder.used_mib is None else f"{holder.used_mib} MiB")
        for holder in largest[:3]
    ]
    left = len(largest) - 3
    more = f" and {counted(left, 'more process', 'more processes')}" if left > 0 else ""
    return f"busy: {', '.join(words)}{more}"


def _check(request: DeviceRequest, per_gpu: int, gpus_per_task: int, cpu_count: int) -> None:
    for name, value in (
        ("--per-gpu", per_gpu),
        ("--gpus-per-task", gpus_per_task),
        ("the number of CPU cores", cpu_count),
    ):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
    if per_gpu > 1 and gpus_per_task > 1:
        raise UsageError(
            f"--per-gpu {per_gpu} shares a GPU between tasks and --gpus-per-task {gpus_per_task} "
            "gives a task several: the two cannot be combined.",
            hint="leave one of them out.",
        )
    asked = len(request.ids) if request.kind == "ids" else request.count
    if request.kind in ("ids", "count") and asked is not None and asked % gpus_per_task:
        raise UsageError(
            f"{request.text} names {counted(asked, 'GPU')}, which is not divisible by "
            f"--gpus-per-task {gpus_per_task}: {asked % gpus_per_task} would stay idle.",
            hint="ask for a multiple, or for --devices auto.",
        )


def _candidates(request: DeviceRequest, inventory: Inventory, gpus_per_task: int) -> list[_Gpu]:
    """The GPUs that the request could mean, before asking whether they are free."""
    cuda = [device for device in inventory.devices if device.kind == "cuda"]
    gpus = [_Gpu(ordinal, device) for ordinal, device in enumerate(cuda)]
    if request.kind == "count":
        count = request.count or 0
        if count > len(gpus):
            hint = (
                "write --devices cpu to run on the CPU."
                if not gpus
                else "use --gpus-per-task 1."
                if gpus_per_task > 1
                else f"use --devices {len(gpus)}, or --per-gpu to share them."
            )
            raise PlacementError(
                f"Cannot place {counted(count // gpus_per_task, 'task')} of "
                f"{counted(gpus_per_task, 'GPU')}: {_host(inventory)}.",
                hint=hint,
            )
        return gpus
    if request.kind == "ids":
        chosen: list[_Gpu] = []
        for name in request.ids:
            gpu = _find(name, gpus, request, inventory)
            if gpu in chosen:
                raise UsageError(
                    f"{request.text}: {name} is {gpu.label}, which is already in the list.",
                    hint="list each GPU once; --per-gpu 2 puts two workers on each.",
                )
            chosen.append(gpu)
        return chosen
    return gpus


def _find(name: str, gpus: Sequence[_Gpu], request: DeviceRequest, inventory: Inventory) -> _Gpu:
    if name.isdigit():
        matches = [gpu for gpu in gpus if gpu.ordinal == int(name)]
    else:
        exact = [gpu for gpu in gpus if gpu.device.uuid == name]
        matches = exact or [gpu for gpu in gpus if gpu.device.uuid.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        labels = ", ".join(gpu.label for gpu in matches)
        raise PlacementError(
            f"{request.text}: {name} is the beginning of {len(matches)} UUIDs ({labels}).",
            hint="write more of the UUID, or the GPU's number.",
        )
    hint = "nvidia-smi -L lists the GPUs of this host with their UUIDs."
    if gpus and name.isdigit():
        hint = f"they are numbered 0 to {len(gpus) - 1}, in the order in which CUDA shows them."
    elif not gpus:
        hint = "write --devices cpu to run on the CPU."
    what = f"GPU {name}" if name.isdigit() else name
    raise PlacementError(f"{request.text}: there is no {what}; {_host(inventory)}.", hint=hint)


def _reason(gpu: _Gpu, leased: Mapping[str, str], own_pids: Collection[int]) -> str | None:
    if gpu.device.lost is not None:
        return f"lost: {gpu.device.lost}"
    if gpu.device.compute_mode == "prohibited":
        return "its compute mode is PROHIBITED (nvidia-smi -c DEFAULT lets programs use it)"
    return leased.get(gpu.device.uuid) or busy_reason(gpu.device, own_pids)


def _refuse_sharing(usable: Sequence[_Gpu], per_gpu: int) -> None:
    for gpu in usable:
        if gpu.device.compute_mode == "exclusive process":
            raise PlacementError(
                f"--per-gpu {per_gpu}: {gpu.label} is in compute mode EXCLUSIVE_PROCESS, so only "
                "the first of its workers could use it.",
                hint="use --per-gpu 1, start NVIDIA's MPS server (nvidia-cuda-mps-control -d), or "
                f"let processes share it (nvidia-smi -i {gpu.device.index} -c DEFAULT).",
            )


def _in_one_list(usable: Sequence[_Gpu]) -> list[_Gpu]:
    """What one CUDA_VISIBLE_DEVICES can show: whole GPUs, or a single MIG instance."""
    whole = [gpu for gpu in usable if gpu.device.parent_uuid is None]
    return whole or list(usable[:1])


def _too_few(
    request: DeviceRequest, asked: int, usable: Sequence[_Gpu], skipped: Sequence[Skipped]
) -> PlacementError:
    free = ", ".join(gpu.label for gpu in usable) or "none"
    lines = "\n".join(f"  {item.device}: {item.reason}" for item in skipped)
    return PlacementError(
        f"Cannot start {counted(asked, 'rank')} ({request.text}): "
        f"{len(usable)} of the GPUs can be used ({free}).\n{lines}",
        hint="wait for them (--wait), choose other GPUs, take what is free with --devices auto or "
        "--max-gpus, or use --force to run beside what is there.",
    )


def _nothing_left(
    request: DeviceRequest,
    inventory: Inventory,
    usable: Sequence[_Gpu],
    skipped: Sequence[Skipped],
    gpus_per_task: int,
) -> PlacementError:
    what = f"Cannot place a task of {counted(gpus_per_task, 'GPU')} ({request.text})"
    if not skipped:
        return PlacementError(
            f"{what}: {_host(inventory)}.",
            hint="use --gpus-per-task 1."
            if gpus_per_task > 1
            else "write --devices cpu to run on the CPU.",
        )
    lines = "\n".join(f"  {item.device}: {item.reason}" for item in skipped)
    free = "no GPU is free" if not usable else f"only {counted(len(usable), 'GPU')} can be used"
    if all(item.reason.startswith("lost: ") for item in skipped):
        hint = "choose other GPUs, or write --devices cpu to run on the CPU."
    else:
        hint = "wait (--wait), choose other GPUs, or use --force to run beside what is there."
    return PlacementError(f"{what}: {free}.\n{lines}", hint=hint)


def _gpu_slots(groups: Sequence[Sequence[_Gpu]], per_gpu: int, cpu_count: int) -> tuple[Slot, ...]:
    # First one worker on every GPU, then the second ones: few tasks spread over all the GPUs.
    shares = [(share, group) for share in range(per_gpu) for group in groups]
    slots: list[Slot] = []
    for slot_id, (share, group) in enumerate(shares):
        uuids = tuple(gpu.device.uuid for gpu in group)
        totals = [gpu.device.memory_total_mib for gpu in group]
        known = [total for total in totals if total is not None]
        slots.append(
            Slot(
                slot_id=slot_id,
                label="cuda:"
                + "+".join(str(gpu.ordinal) for gpu in group)
                + (f"/{share}" if share else ""),
                kind="cuda",
                device_uuids=uuids,
                visible_devices=",".join(uuids),
                num_threads=max(1, cpu_count // len(shares)),
                memory_mib=sum(known) // per_gpu if len(known) == len(totals) else None,
            )
        )
    return tuple(slots)


def _on_cpu(
    count: int | None, cpu_count: int, skipped: tuple[Skipped, ...], notes: tuple[str, ...]
) -> Placement:
    workers = cpu_count if count is None else count
    slots = tuple(
        Slot(
            slot_id=slot_id,
            label=f"cpu:{slot_id}",
            kind="cpu",
            num_threads=max(1, cpu_count // workers),
        )
        for slot_id in range(workers)
    )
    return Placement(slots=slots, skipped=skipped, notes=notes)


def _idle_options(per_gpu: int, gpus_per_task: int) -> tuple[str, ...]:
    options = (("--per-gpu", per_gpu), ("--gpus-per-task", gpus_per_task))
    return tuple(f"{name} {n} has no effect on CPU workers." for name, n in options if n > 1)


def _host(inventory: Inventory) -> str:
    value = inventory.cuda_visible_devices
    variable = "CUDA_VISIBLE_DEVICES" + (" is not set" if value is None else f"={value}")
    if inventory.devices:
        count = len(inventory.devices)
        why = inventory.visibility_note or variable
        return f"this host has {counted(count, 'visible GPU')} ({why.rstrip('.')})"
    why = inventory.problem or inventory.visibility_note or variable
    return f"this host has no visible GPU ({why.rstrip('.')})"
