"""Where a sweep's workers run: from options and this machine's devices to slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from muster.api.options import DeviceOptions, GangOptions, SweepOptions
from muster.base.atomic_files import write_atomic
from muster.base.codec import read_as
from muster.base.errors import PlacementError, UsageError
from muster.base.processes import family, lineage
from muster.base.settings import Settings, read_settings
from muster.devices.discovery import discover
from muster.devices.inventory import Inventory
from muster.devices.leases import Lease
from muster.devices.packing import CONTEXT_MIB, MemorySampler, workers_that_fit
from muster.devices.placement import (
    DeviceRequest,
    Placement,
    Slot,
    parse_devices,
    parse_gpu_ids,
    place,
)
from muster.devices.waiting import Wait, lease_in_turn, not_free
from muster.farm.events import Capacity, Event
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.ray_hosts import Node, ask_hosts
from muster.farm.executors.table import CLUSTERS
from muster.farm.task import SlotSpec
from muster.farm.view import RunView, WorkerLine
from muster.run.folder import RunFolder
from muster.run.session import open_run
from muster.slurm.request import with_defaults

_Options = TypeVar("_Options", SweepOptions, GangOptions)


class DeviceChoice(Protocol):
    """The options that choose devices, of a sweep and of a gang."""

    @property
    def devices(self) -> str: ...

    @property
    def gpu_ids(self) -> str | None: ...

    @property
    def max_gpus(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What ``devices.json`` says. ``devices``: UUIDs, of CPU workers their labels; ``labels``: of
    the slots; ``against``: the choice of devices in the command, in place of which this was said.
    """

    kind: str
    devices: tuple[str, ...]
    labels: tuple[str, ...]
    against: Mapping[str, Any]


def read_wanted(folder: RunFolder) -> Wanted | None:
    """What somebody has asked for; None where the devices are those of the command."""
    if not folder.devices_json.exists():
        return None
    return read_as(Wanted, folder.devices_json, "record of the devices")


def holds(wanted: Wanted, options: DeviceOptions) -> bool:
    """Whether the command still makes the choice in place of which this was asked for."""
    return not options.is_chosen_anew and dict(wanted.against) == options.choice


def as_wanted(folder: RunFolder, options: _Options) -> _Options:
    """The options with the devices that somebody has asked for since the command was given."""
    wanted = None if options.restart else read_wanted(folder)
    if wanted is None or not holds(wanted, options):
        return options
    text, ids = str(len(wanted.devices)), None
    if wanted.kind == "cpu":
        text = f"cpu:{text}"
    elif {device.uuid for device in discover(read_settings()).devices}.issuperset(wanted.devices):
        text, ids = "auto", ",".join(wanted.devices)
    # Else on another host, or with other GPUs by now: as many.
    return options.choosing(text, ids)


def forget_wanted(folder: RunFolder) -> None:
    """Let a command that chooses devices go before what was asked for, in all stages of a map.

    Raises SetupError where somebody works on the run.
    """
    whole = RunFolder(folder.whole)
    for path in [whole.devices_json, *whole.stage(0).parent.glob(f"*/{whole.devices_json.name}")]:
        if path.exists():
            with open_run(RunFolder(path.parent)):
                path.unlink(missing_ok=True)


def hand_on(before: RunFolder, after: RunFolder) -> None:
    """Let a stage of a map that has not begun have what was asked for of the one before."""
    if before.devices_json.exists() and not after.exists():
        after.create()
        write_atomic(after.devices_json, before.devices_json.read_bytes())


def take_devices(
    options: SweepOptions,
    run_name: str,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Placement, list[Lease]]:
    """The placement and the leases that hold its GPUs; the caller keeps and releases them.

    Raises what `lease_in_turn` raises, and UsageError for options without effect on a cluster.
    """
    if options.executor in CLUSTERS:
        return _on_cluster(options), []
    return lease_in_turn(
        device_request(options),
        settings,
        per_gpu=partial(per_gpu_of, options),
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        run_name=run_name,
        wait=wait_of(options, say),
    )


def wait_of(options: DeviceOptions, say: Callable[[str], None]) -> Wait:
    return Wait(most_s=options.wait_s, priority=options.queue_priority, say=say)


def would_take(options: SweepOptions, settings: Settings, *, now: bool = False) -> Placement:
    """The placement without taking leases. ``now``: around the GPUs that other runs hold at this
    moment, for ``--dry-run``."""
    if options.executor in CLUSTERS:
        return _on_cluster(options)
    inventory = discover(settings)
    return would_place(
        device_request(options),
        inventory,
        settings,
        per_gpu=per_gpu_of(options, inventory),
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        waits=options.wait_s > 0,
        now=now,
    )


def would_place(
    request: DeviceRequest,
    inventory: Inventory,
    settings: Settings,
    *,
    per_gpu: int = 1,
    gpus_per_task: int = 1,
    force: bool,
    waits: bool,
    now: bool = True,
) -> Placement:
    """Where it would run, or, if it ``waits``, what it would wait for."""
    has_gpus = any(device.kind == "cuda" for device in inventory.devices)
    asks_nobody = force or settings.is_task or request.kind == "cpu" or not has_gpus
    taken = not_free(inventory, settings) if waits or (now and not asks_nobody) else {}

    def placed(*, force: bool) -> Placement:
        return place(
            request, inventory, per_gpu=per_gpu, gpus_per_task=gpus_per_task,
            cpu_count=settings.cpu_count, force=force, leased=taken, own_pids=lineage(),
        )  # fmt: skip

    try:
        found = placed(force=force)
    except PlacementError:
        if not waits:
            raise
        found = None
    is_on_cpu = found is not None and found.slots[0].kind == "cpu" and request.kind == "auto"
    if found is None or (waits and has_gpus and is_on_cpu):
        found = placed(force=True)
        note = "Too few GPUs are free now, so it would wait; `muster queue` shows who else does."
        found = dataclasses.replace(found, notes=(*found.notes, note))
    return found


def _on_cluster(options: SweepOptions) -> Placement:
    """A slot for each worker; which devices it has is known only where it runs."""
    _refuse_local(options)
    request, nodes = options.cluster, list[Node]()
    if request.hosts is not None:
        request, nodes = ask_hosts(request)
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
        ),
        notes=tuple(node.shown for node in nodes),
    )


def on_hosts(options: SweepOptions) -> SweepOptions:
    """The options with the workers that ``--hosts`` has room for; all others as they are.

    Raises SetupError for a host that cannot be used.
    """
    if options.cluster.hosts is None:
        return options
    return dataclasses.replace(options, cluster=ask_hosts(options.cluster)[0])


def _refuse_local(options: SweepOptions) -> None:
    """Raise UsageError for options that choose devices of this machine: a cluster ignores them."""
    given = {
        f"--devices {options.devices}": options.devices != "auto",
        f"--gpu-ids {options.gpu_ids}": options.gpu_ids is not None,
        f"--max-gpus {options.max_gpus}": options.max_gpus is not None,
        f"--per-gpu {options.per_gpu}": options.per_gpu != 1,
        f"--gpus-per-task {options.gpus_per_task}": options.gpus_per_task != 1,
        "--force": options.force,
        "--wait": options.wait_s > 0,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if named:
        raise UsageError(
            f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} no effect with "
            f"--on {options.executor}.",
            hint="--workers, --gpus-per-worker and --cpus-per-worker say what runs there.",
        )


def per_gpu_of(options: SweepOptions, inventory: Inventory) -> int:
    if options.per_gpu != "auto":
        return options.per_gpu
    modes = {device.compute_mode for device in inventory.devices}
    can_share = inventory.has_mps or "exclusive process" not in modes
    return PerGpuAuto.CAP if can_share else 1


def gpus_per_worker(options: Mapping[str, Any], *, has_gpus: bool) -> float:
    """What an hour of a worker counts in GPU hours. ``options``: as a run's record has them.

    ``has_gpus``: whether workers have GPUs of this machine, which ``--devices auto`` does not tell.
    A worker on CPU cores counts as one GPU, and so does each with ``--per-gpu auto``, where nobody
    knows before how many share one.
    """
    of_cluster = (options.get("cluster") or {}).get("gpus_per_worker")
    per_gpu = options.get("per_gpu", 1)
    if of_cluster or per_gpu == "auto" or not has_gpus:
        return float(of_cluster or 1)
    return float(options.get("gpus_per_task", 1) / per_gpu)


def device_request(options: DeviceChoice) -> DeviceRequest:
    """What the options ask for; UsageError for a choice of devices that is not one."""
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
    if len(labels) < len(placement.slots):
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


def slots_of(placement: Placement, options: SweepOptions) -> tuple[SlotSpec, ...]:
    """The slots of a placement, as the farm sees them."""
    sharing = Counter(slot.device_uuids for slot in placement.slots)
    # With "auto" these are all the slots that there may ever be: it begins with one worker.
    is_shared = options.per_gpu != "auto"
    return tuple(
        SlotSpec(
            slot_id=slot.slot_id,
            label=slot.label,
            devices=slot.device_uuids,
            kind=slot.kind,
            visible_devices=slot.visible_devices,
            num_threads=slot.num_threads,
            memory_mib=slot.memory_mib,
            num_sharing=sharing[slot.device_uuids] if slot.device_uuids and is_shared else 1,
        )
        for slot in placement.slots
    )


class PerGpuAuto:
    """Starts with one worker per GPU; after finished tasks grows to what their peaks allow.

    What a worker holds is what the driver lists for its processes, or what its tasks report of
    torch's memory with a context beside it, whichever is more: in some containers the driver lists
    no processes. After a task that found no memory beside others its GPU has one worker fewer for
    the rest of the run; one that was alone there says nothing about how many fit.
    """

    CAP = 8

    def __init__(self, settings: Settings, slots: tuple[SlotSpec, ...]) -> None:
        self._sampler = MemorySampler(settings)
        self._shares: dict[str, list[SlotSpec]] = {}
        self._totals = {
            device.uuid: device.memory_total_mib for device in discover(settings).devices
        }
        self._others: dict[str, int] = {}
        self._allowed: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._num_oom: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self.take(slots)

    def take(self, slots: Iterable[SlotSpec]) -> None:
        """Look after the devices of these slots as well."""
        new: dict[str, list[SlotSpec]] = {}
        for slot in slots:
            new.setdefault(slot.device_key, []).append(slot)
        for key, shares in new.items():
            self._shares[key] = shares
            self._others[key] = self._sampler.in_use(shares[0].devices) or 0
            self._most[key] = len(shares)
            self._allowed[key] = self._num_oom[key] = self._peaks[key] = 0

    def sample(self, view: RunView) -> list[Event]:
        """Events that set new limits, where the peaks allow more workers or force fewer."""
        lines = {line.slot: line for line in view.workers}
        events: list[Event] = []
        for key, slots in self._shares.items():
            shown = [lines[slot.label] for slot in slots if slot.label in lines]
            now = self._fitting(key, slots[0].devices, shown)
            if now != self._allowed[key]:
                self._allowed[key] = now
                events.append(Capacity(key, now))
        return events

    def _fitting(self, key: str, uuids: Sequence[str], lines: Sequence[WorkerLine]) -> int:
        held = {line.slot: self._sampler.used_by(_family(line), uuids) or 0 for line in lines}
        # A slot that was taken since the view was made has no line in it.
        self._peaks[key] = max([self._peaks[key], *map(_known_mib, lines), *held.values()])
        current = max(1, self._allowed[key])
        num_oom = sum(line.num_oom for line in lines)
        if num_oom > self._num_oom[key]:
            self._most[key] = max(1, current - (num_oom - self._num_oom[key]))
            self._num_oom[key] = num_oom
        if current == 1 and not any(line.num_ended for line in lines):
            return 1
        in_use = self._sampler.in_use(uuids)
        if in_use is not None:
            alive = [line for line in lines if line.pid is not None]
            ours = sum(held.values()) or sum(map(_known_mib, alive))
            self._others[key] = max(0, in_use - ours)
        totals = [self._totals.get(uuid) for uuid in uuids]
        known = [total for total in totals if total is not None]
        return workers_that_fit(
            peaks_mib=[self._peaks[key]],
            total_mib=sum(known) if len(known) == len(uuids) else None,
            others_mib=self._others[key],
            current=current,
            cap=self._most[key],
        )


def _family(line: WorkerLine) -> set[int]:
    return set() if line.pid is None else family(line.pid)


def _known_mib(line: WorkerLine) -> int:
    """What a worker has held by its own account, and the context that it does not count."""
    return 0 if line.device_peak_mib is None else int(line.device_peak_mib) + CONTEXT_MIB
