"""Where a sweep's workers run: from options and this machine's devices to slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from muster.api.options import SweepOptions
from muster.base.errors import UsageError
from muster.base.processes import family
from muster.base.settings import Settings, read_settings
from muster.devices.discovery import discover
from muster.devices.leases import Lease, place_and_lease
from muster.devices.packing import MemorySampler, workers_that_fit
from muster.devices.placement import (
    DeviceRequest,
    Placement,
    Slot,
    parse_devices,
    parse_gpu_ids,
    place,
)
from muster.farm.events import Capacity, Event
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.table import CLUSTERS
from muster.farm.task import SlotSpec
from muster.farm.view import RunView, WorkerLine
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


class PerGpuAuto:
    """Starts with one worker per GPU; after finished tasks grows to what their peaks allow.

    What a worker holds is read from the driver by process, descendants included. Where the
    driver does not list our processes (some containers) nothing is known and one worker stays.
    """

    CAP = 8

    def __init__(self, settings: Settings, slots: tuple[SlotSpec, ...]) -> None:
        self._sampler = MemorySampler(settings)
        self._shares: dict[str, list[SlotSpec]] = {}
        for slot in slots:
            self._shares.setdefault(slot.device_key, []).append(slot)
        devices = {device.uuid: device for device in discover(settings).devices}
        self._totals = {uuid: device.memory_total_mib for uuid, device in devices.items()}
        self._others = {uuid: device.memory_used_mib or 0 for uuid, device in devices.items()}
        self._allowed = dict.fromkeys(self._shares, 0)
        self._peaks: dict[str, int] = {}

    def sample(self, view: RunView) -> list[Event]:
        """New limits where the peaks allow more workers or force fewer."""
        lines = {line.slot: line for line in view.workers}
        events: list[Event] = []
        for key, slots in self._shares.items():
            now = self._fitting(key, slots, lines)
            if now != self._allowed[key]:
                self._allowed[key] = now
                events.append(Capacity(key, now))
        return events

    def _fitting(self, key: str, slots: list[SlotSpec], lines: Mapping[str, WorkerLine]) -> int:
        uuids = slots[0].devices
        mine = [lines[slot.label] for slot in slots if lines[slot.label].pid is not None]
        for line in mine:
            assert line.pid is not None
            held = self._sampler.used_by(family(line.pid), uuids)
            if held:
                self._peaks[key] = max(self._peaks.get(key, 0), held)
        current = max(1, self._allowed[key])
        has_finished = any(line.num_ended for line in mine)
        if key not in self._peaks or (current == 1 and not has_finished):
            return current
        totals = [self._totals.get(uuid) for uuid in uuids]
        known = [total for total in totals if total is not None]
        return workers_that_fit(
            peaks_mib=[self._peaks[key]],
            total_mib=sum(known) if len(known) == len(uuids) else None,
            others_mib=sum(self._others.get(uuid, 0) for uuid in uuids),
            current=current,
            cap=len(slots),
        )
