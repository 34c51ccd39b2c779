"""Where a sweep's workers run: from options and this machine's devices to slots."""

from __future__ import annotations

from typing import Protocol

from muster.api.options import SweepOptions
from muster.api.packing import PerGpuAuto
from muster.base.errors import UsageError
from muster.base.settings import Settings, read_settings
from muster.devices.discovery import discover
from muster.devices.leases import Lease, place_and_lease
from muster.devices.placement import (
    DeviceRequest,
    Placement,
    Slot,
    parse_devices,
    parse_gpu_ids,
    place,
)
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.table import CLUSTERS
from muster.farm.task import SlotSpec
from muster.slurm.site import with_defaults


class DeviceChoice(Protocol):
    """The options that choose devices, of a sweep and of a gang."""

    @property
    def devices(self) -> str: ...

    @property
    def gpu_ids(self) -> str | None: ...

    @property
    def max_gpus(self) -> int | None: ...


def take_devices(
    options: SweepOptions, run_name: str, settings: Settings
) -> tuple[Placement, list[Lease]]:
    """The placement and the leases that hold its GPUs; the caller keeps and releases them."""
    if options.executor in CLUSTERS:
        return _on_cluster(options), []
    return place_and_lease(
        device_request(options),
        discover(settings),
        per_gpu=_per_gpu(options),
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        run_name=run_name,
        settings=settings,
    )


def would_take(options: SweepOptions, settings: Settings) -> Placement:
    """The placement without leases, for ``--dry-run``."""
    if options.executor in CLUSTERS:
        return _on_cluster(options)
    return place(
        device_request(options),
        discover(settings),
        per_gpu=_per_gpu(options),
        gpus_per_task=options.gpus_per_task,
        cpu_count=settings.cpu_count,
        force=options.force,
    )


def _on_cluster(options: SweepOptions) -> Placement:
    """A slot for each worker; which devices it has is known only where it runs."""
    _refuse_local(options)
    request = options.cluster
    on_ray = options.executor == "ray"
    num_threads = request.cores_per_actor if on_ray else request.cores_per_job
    return Placement(
        slots=tuple(
            Slot(
                slot_id=number,
                label=f"{options.executor}/{number}",
                kind="cuda" if request.gpus_per_worker else "cpu",
                visible_devices=None,
                num_threads=num_threads,
            )
            for number in range(request.num_workers)
        )
    )


def _refuse_local(options: SweepOptions) -> None:
    """What chooses devices of this machine would be ignored on a cluster."""
    given = {
        f"--devices {options.devices}": options.devices != "auto",
        f"--gpu-ids {options.gpu_ids}": options.gpu_ids is not None,
        f"--max-gpus {options.max_gpus}": options.max_gpus is not None,
        f"--per-gpu {options.per_gpu}": options.per_gpu != 1,
        f"--gpus-per-task {options.gpus_per_task}": options.gpus_per_task != 1,
        "--force": options.force,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if named:
        raise UsageError(
            f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} no effect with "
            f"--on {options.executor}.",
            hint="--workers, --gpus-per-worker and --cpus-per-worker say what runs there.",
        )


def _per_gpu(options: SweepOptions) -> int:
    return PerGpuAuto.CAP if options.per_gpu == "auto" else options.per_gpu


def device_request(options: DeviceChoice) -> DeviceRequest:
    if options.gpu_ids is not None:
        return parse_gpu_ids(options.gpu_ids)
    if options.max_gpus is not None and options.devices == "auto":
        return DeviceRequest(
            kind="auto", count=options.max_gpus, text=f"--max-gpus {options.max_gpus}"
        )
    return parse_devices(options.devices)


def placement_lines(placement: Placement, options: SweepOptions) -> list[str]:
    """What a user should know about where the workers run."""
    labels = [slot.label for slot in placement.slots]
    if options.per_gpu == "auto":
        labels = [label for label in labels if "/" not in label]
    shown = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
    lines = [f"{len(labels)} worker{'s' if len(labels) != 1 else ''} on {shown}"]
    if options.per_gpu == "auto" and placement.slots[0].kind == "cuda":
        lines[0] += f", then up to {PerGpuAuto.CAP} on each as memory allows"
    if options.executor == "slurm":
        lines.append(_asked_of_slurm(options.cluster))
    return lines + remarks(placement)


def _asked_of_slurm(request: ClusterRequest) -> str:
    num_gpus = with_defaults(request.on_slurm(), read_settings()).num_gpus
    if num_gpus:
        return f"each worker asks SLURM for {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
    return "each worker asks SLURM for no GPU; --gpus-per-worker N asks for some"


def remarks(placement: Placement) -> list[str]:
    """What was left alone and why, and what is different from what was asked for."""
    skipped = [f"left alone {item.device}: {item.reason}" for item in placement.skipped]
    return [*skipped, *placement.notes]


def slots_of(placement: Placement) -> tuple[SlotSpec, ...]:
    return tuple(
        SlotSpec(
            slot_id=slot.slot_id,
            label=slot.label,
            devices=slot.device_uuids,
            kind=slot.kind,
            visible_devices=slot.visible_devices,
            num_threads=slot.num_threads,
            memory_mib=slot.memory_mib,
        )
        for slot in placement.slots
    )
