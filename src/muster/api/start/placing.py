"""Where a sweep's workers run: from options and this machine's devices to slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muster.api.start.options import DeviceOptions, GangOptions, SweepOptions
from muster.base.atomic_files import write_atomic
from muster.base.codec import read_as
from muster.base.errors import PlacementError, UsageError
from muster.base.processes import lineage
from muster.base.settings import Settings, read_settings
from muster.base.shown_text import count
from muster.devices.discovery import discover
from muster.devices.inventory import DeviceRequest, Inventory, parse_devices, parse_gpu_ids
from muster.devices.packing import MOST_PER_GPU, within_memory
from muster.devices.placement import Placement, Slot, place
from muster.farm.executors.cluster import CLUSTERS, ClusterRequest
from muster.farm.task import SlotSpec
from muster.run.folder import RunFolder, id_of
from muster.slurm.request import with_defaults

if TYPE_CHECKING:
    from muster.devices.leases import Lease
    from muster.devices.waiting import Wait

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
            from muster.run.session import open_run  # here: few have such a file

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
    folder: Path | None = None,
) -> tuple[Placement, list[Lease]]:
    """The placement and the leases that hold its GPUs; the caller keeps and releases them.

    ``folder``: of the run, by which it is known in the queue. Raises what `lease_in_turn` raises,
    and UsageError for options without effect on a cluster.
    """
    if options.executor in CLUSTERS:
        return _on_cluster(options), []
    if device_request(options).kind == "cpu" and not options.wait_s:  # which nobody leases
        return would_take(options, settings), []
    from muster.devices.waiting import lease_in_turn  # here: it takes a tenth of a short start

    placement, leases = lease_in_turn(
        device_request(options),
        settings,
        per_gpu=partial(per_gpu_of, options),
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        run_name=run_name,
        place="" if folder is None else id_of(folder),
        wait=wait_of(options, say, folder),
    )
    try:  # after the wait, when others may have given memory back
        placement = within_memory(placement, options.memory_mib, settings.cpu_count)
    except UsageError:
        for lease in leases:
            lease.release()
        raise
    used = {uuid for slot in placement.slots for uuid in slot.device_uuids}
    for lease in leases:
        if lease.uuid not in used:
            lease.release()
    return placement, [lease for lease in leases if lease.uuid in used]


def wait_of(options: DeviceOptions, say: Callable[[str], None], folder: Path | None) -> Wait:
    from muster.devices.waiting import Wait

    most_s, priority = options.wait_s, options.queue_priority
    return Wait(most_s=most_s, priority=priority, say=say, folder=folder)


def would_take(options: SweepOptions, settings: Settings, *, now: bool = False) -> Placement:
    """The placement without taking leases. ``now``: around the GPUs that other runs hold at this
    moment, for ``--dry-run``."""
    if options.executor in CLUSTERS:
        return _on_cluster(options)
    inventory = discover(settings)
    placement = would_place(
        device_request(options),
        inventory,
        settings,
        per_gpu=per_gpu_of(options, inventory),
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        waits=options.wait_s > 0,
        now=now,
    )
    return within_memory(placement, options.memory_mib, settings.cpu_count)


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
    taken: dict[str, str] = {}
    if waits or (now and not asks_nobody):
        from muster.devices.waiting import not_free

        taken = not_free(inventory, settings)

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
    request, notes = options.cluster, tuple[str, ...]()
    if request.hosts is not None:
        request, notes = _ask_hosts(request)
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
        notes=notes,
    )


def on_hosts(options: SweepOptions, *, is_needed: bool = True) -> SweepOptions:
    """The options with the workers that ``--hosts`` has room for; all others as they are.

    Where nothing is to be done (not ``is_needed``), no host is touched and none is named.
    Raises SetupError for a host that cannot be used.
    """
    cluster = options.cluster
    if cluster.hosts is None:
        return options
    if not is_needed:
        nowhere = dataclasses.replace(cluster, hosts=None, hosts_python=None, hosts_setup=())
        return dataclasses.replace(options, cluster=nowhere)
    return dataclasses.replace(options, cluster=_ask_hosts(cluster)[0])


def hosts_kept_open(options: SweepOptions) -> AbstractContextManager[None]:
    """Hosts that are asked what they have room for within this stay connected for the start."""
    if options.cluster.hosts is None:
        return nullcontext()
    from muster.farm.executors.ray_hosts import kept_open

    return kept_open()


def _ask_hosts(request: ClusterRequest) -> tuple[ClusterRequest, tuple[str, ...]]:
    """The request with the workers that its hosts have room for, and a line about each host."""
    from muster.farm.executors.ray_hosts import ask_hosts  # the fewest sweeps have hosts

    request, nodes = ask_hosts(request)
    return request, tuple(node.shown for node in nodes)


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
    return MOST_PER_GPU if can_share else 1


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
    lines = [f"{count(len(labels), 'worker')} on {shown}"]
    if len(labels) < len(placement.slots):
        most = max(Counter(slot.device_uuids for slot in placement.slots).values())
        lines[0] += f", then up to {most} on each as memory allows"
    if options.executor == "slurm":
        lines.append(_asked_of_slurm(options.cluster))
    return lines + remarks(placement)


def _asked_of_slurm(request: ClusterRequest) -> str:
    num_gpus = with_defaults(request.on_slurm(), read_settings()).num_gpus
    if num_gpus:
        return f"each worker asks SLURM for {count(num_gpus, 'GPU')}"
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
            most_host_mib=options.memory_mib,
            num_sharing=sharing[slot.device_uuids] if slot.device_uuids and is_shared else 1,
        )
        for slot in placement.slots
    )
