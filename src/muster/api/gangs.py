"""Runs a program on many devices in lock-step: the folder, the devices, then the launcher."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from muster.api.earlier_work import move_aside
from muster.api.lending import Lending, as_wanted
from muster.api.options import GangOptions, SweepOptions
from muster.api.placing import device_request, remarks, slots_of
from muster.api.trackers.guard import tracking
from muster.api.trackers.tracker import check_installed
from muster.base.atomic_files import explain_os_error
from muster.base.code import Code, code_id
from muster.base.errors import UsageError
from muster.base.processes import lineage
from muster.base.settings import Settings, read_settings
from muster.base.signals import listening
from muster.devices.device_request import DeviceRequest
from muster.devices.discovery import discover
from muster.devices.inventory import Inventory
from muster.devices.leases import Lease, place_and_lease
from muster.devices.placement import Placement, Slot, place
from muster.farm.events import Slots
from muster.farm.task import SlotSpec
from muster.gang.launch import GangEnding, SupervisorHandle, launch_gang
from muster.gang.spec import Entry, GangSpec, Script, Start
from muster.gang.topology import read_topology
from muster.monitor.recorder import record_run
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord, new_record
from muster.run.session import Renew, open_run
from muster.slurm.commands import typed_for_job

__all__ = ["Entry", "GangEnding", "Script"]


@dataclass(frozen=True, kw_only=True)
class GangAudience:
    """Who watches: ``hear`` gets (rank, line) of what ranks print, ``say`` remarks on the run,
    ``warn`` what may be wrong. ``argv`` is the command line, kept in run.json."""

    hear: Callable[[int, str], None] = lambda rank, line: None
    say: Callable[[str], None] = lambda line: None
    warn: Callable[[str], None] = lambda line: None
    argv: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class GangPlan:
    """What would be started: ``--dry-run`` shows it."""

    folder: RunFolder
    options: GangOptions
    placement: Placement
    start: Start
    threads_per_rank: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.placement.slots

    def lines(self) -> list[str]:
        """What a user should know about where the ranks run."""
        labels = [slot.label for slot in self.slots]
        shown = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
        many = f"{len(labels)} rank{'s' if len(labels) > 1 else ''}"
        nodes = self.options.num_nodes
        here = f" on each of {nodes} nodes" if nodes > 1 else ""
        threads = f"{self.threads_per_rank} thread{'s' if self.threads_per_rank > 1 else ''} each"
        return [f"{many}{here}: {shown}, {threads}", *remarks(self.placement)]


def choose_start(program: Script | Entry, options: GangOptions) -> Start:
    """How ranks begin; fork is safe on Linux only (elsewhere system libraries start threads)."""
    if options.start is not None:
        if options.start == "fork" and sys.platform != "linux":
            raise UsageError(f"--start fork is for Linux; this is {sys.platform}.")
        return options.start
    return "fork" if isinstance(program, Entry) and sys.platform == "linux" else "exec"


def plan_gang(folder: RunFolder, program: Script | Entry, options: GangOptions) -> GangPlan:
    """The first half of a run: what would be started, where. It changes nothing and takes no lease.

    Raises what placing raises, and UsageError inside another launcher.
    """
    _refuse_inside()
    check_installed(options.log_to)
    settings, options = read_settings(), _as_asked(folder, options)
    inventory = discover(settings)
    placement = place(
        _request(options, inventory),
        inventory,
        per_gpu=1,
        gpus_per_task=1,
        cpu_count=settings.cpu_count,
        force=options.force or settings.is_task,
        own_pids=lineage(),
    )
    return _plan(folder, program, options, placement, settings)


def run_gang(
    folder: RunFolder,
    program: Script | Entry,
    options: GangOptions,
    audience: GangAudience,
    *,
    kind: Kind = "run",
    code: Code | None = None,
    about: Mapping[str, Any] | None = None,
    supervisor: SupervisorHandle | None = None,
    kept: dict[str, Lease] | None = None,
) -> GangEnding:
    """Run a gang to its end; whatever happens, nothing it started is left running.

    ``kind``, ``code`` and ``about`` go into run.json as what was asked for;
    ``supervisor``: one that was started early (its ``forks`` must suit the options), closed at the
    end in any case; ``kept``: leases by GPU, which a start that moves leaves to the next one.

    Raises what placing raises, SetupError when somebody works on the folder, UsageError inside
    another launcher.
    """
    with listening() as requests, ExitStack() as devices, ExitStack() as stack:
        if supervisor is not None:
            stack.callback(supervisor.close)
        _refuse_inside()
        check_installed(options.log_to)
        settings = read_settings()
        here = _as_asked(folder, options)
        kept = {} if kept is None else kept
        has_moved = bool(kept)
        placement, leases = _take(here, folder.name, settings, kept)
        kept.clear()
        for lease in leases:
            devices.enter_context(lease)
        plan = _plan(folder, program, here, placement, settings)
        # In a job from an older muster, ``argv`` is what its script calls on the node.
        words = typed_for_job(folder, settings.slurm_job_id) or audience.argv
        renew = renewal(folder, program, options, kind, code or {}, about or {}, words)
        if options.restart:
            move_aside(folder, kind, audience.say)
        session = stack.enter_context(open_run(folder, renew, node=options.node_rank))
        stopped: list[str] = []
        if options.node_rank == 0:
            stack.enter_context(
                tracking(
                    folder, options.log_to, audience.warn,
                    is_urgent=lambda: bool(requests.reason or stopped),
                )
            )  # fmt: skip
        for line in plan.lines():
            audience.say(line)
        uuids = {uuid for slot in plan.slots for uuid in slot.device_uuids}
        every_s, node = options.monitor_interval_s, options.node_rank
        stack.enter_context(
            record_run(folder, uuids, every_s, settings, audience.warn, node_rank=node)
        )
        session.begin(ranks=[slot.label for slot in plan.slots], code=code_id(code or {}))
        hear, warn = audience.hear, audience.warn
        workers = _as_workers(options)
        slots = slots_of(plan.placement, workers)
        lending = devices.enter_context(closing(Lending(folder, workers, settings, slots, leases)))
        can_move = kind in ("train", "agent") and options.num_nodes == 1
        if can_move:
            lending.forget_other_choice()

        def moves() -> bool:
            """Whether somebody has asked for other devices, which the next start takes."""
            asked = session.asked() if can_move else []
            events = [event for ask in asked for event in lending.hear(ask)]
            wanted = [event.wanted for event in events if isinstance(event, Slots)]
            return bool(wanted) and _devices_of(wanted[-1]) != _devices_of(slots)

        ending = launch_gang(
            supervisor, _spec(plan, program), hear, warn, session.is_cancelled, moves
        )
        if ending.stopped_by == "SIGINT" and settings.slurm_job_id and folder.slurm.is_dir():
            # Seeing this file, the job's script cancels the job instead of starting it again.
            folder.slurm_cancelled(settings.slurm_job_id).touch()
        fields = {k: v for k, v in dataclasses.asdict(ending).items() if v}
        try:
            session.end(**{"exit_code": 0, **fields})
        except OSError as error:  # how it ended is known all the same
            audience.warn(str(explain_os_error(error, "write", folder.events)))
        stopped += [ending.stopped_by or "moving"] if ending.stopped_by or ending.is_moving else []
        if ending.is_moving or (has_moved and ending.exit_code):  # it may go back
            kept |= lending.keep()
            devices.pop_all()
        devices.close()  # others may have them while trackers get the rest
        return ending


def _devices_of(slots: Sequence[SlotSpec]) -> tuple[int, set[str]]:
    """What a start would have of them; which of the CPU's workers they are does not matter."""
    return len(slots), {uuid for slot in slots for uuid in slot.devices}


def _spec(plan: GangPlan, program: Script | Entry) -> GangSpec:
    folder, options = plan.folder, plan.options
    if options.one_process and isinstance(program, Entry):
        params = {**program.params, "num_devices": len(plan.slots)}
        program = dataclasses.replace(program, params=params)
    return GangSpec(
        folder=RunFolder(folder.path.absolute()),
        program=program,
        num_ranks=1 if options.one_process else len(plan.slots),
        slot=plan.slots[0].kind,
        visible_devices=",".join(slot.visible_devices or "" for slot in plan.slots).strip(","),
        threads_per_rank=plan.threads_per_rank,
        max_restarts=options.max_restarts,
        restart_on=options.restart_on,
        start=plan.start,
        num_nodes=options.num_nodes,
        min_nodes=options.min_nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port or 0,
        stall_timeout_s=options.stall_timeout_s,
        grace_s=options.grace_s,
    )


def _plan(
    folder: RunFolder,
    program: Script | Entry,
    options: GangOptions,
    placement: Placement,
    settings: Settings,
) -> GangPlan:
    slots = placement.slots
    if slots[0].kind == "cpu" and not _names_a_number(options):
        # A worker per core is right for tasks; a gang of unknown size is one rank.
        slots = slots[:1]
    num_here = 1 if options.one_process else len(slots)
    threads = settings.omp_num_threads
    if threads is None or settings.is_task:  # of a task they are its worker's, all it has
        threads = max(1, (threads or settings.cpu_count) // num_here)
    return GangPlan(
        folder=folder,
        options=options,
        placement=dataclasses.replace(placement, slots=slots),
        start=choose_start(program, options),
        threads_per_rank=threads,
    )


def _as_workers(options: GangOptions) -> SweepOptions:
    """The choice of devices as a sweep would make it."""
    many = options.devices if options.num_ranks is None else str(options.num_ranks)
    return SweepOptions(
        devices=many, gpu_ids=options.gpu_ids, max_gpus=options.max_gpus, force=options.force,
        restart=options.restart,
    )  # fmt: skip


def _as_asked(folder: RunFolder, options: GangOptions) -> GangOptions:
    """The options with the devices that somebody has asked for since the command was given."""
    workers = _as_workers(options)
    chosen = as_wanted(folder, workers)
    if chosen is workers:
        return options
    return dataclasses.replace(
        options, devices=chosen.devices, gpu_ids=chosen.gpu_ids, max_gpus=None, num_ranks=None
    )


def _names_a_number(options: GangOptions) -> bool:
    return options.num_ranks is not None or options.devices.strip().startswith("cpu:")


def _request(options: GangOptions, inventory: Inventory) -> DeviceRequest:
    if options.num_ranks is None:
        return dataclasses.replace(device_request(options), is_exact=True)
    has_gpu = any(device.kind == "cuda" for device in inventory.devices)
    text = f"--nproc-per-node {options.num_ranks}"
    return DeviceRequest(
        kind="count" if has_gpu else "cpu", count=options.num_ranks, text=text, is_exact=True
    )


def _take(
    options: GangOptions, run_name: str, settings: Settings, kept: Mapping[str, Lease]
) -> tuple[Placement, list[Lease]]:
    inventory = discover(settings)
    return place_and_lease(
        _request(options, inventory),
        inventory,
        per_gpu=1,
        gpus_per_task=1,
        force=options.force,
        run_name=run_name,
        settings=settings,
        kept=kept,
    )


def _refuse_inside() -> None:
    here = read_topology()
    if here is not None:
        raise UsageError(
            f"This is rank {here.rank} of {here.world_size} of a gang that {here.launcher} has "
            "started: a gang inside every rank would make more ranks than there are devices.",
            hint="start muster outside the launcher, or unset RANK and WORLD_SIZE.",
        )


def renewal(
    folder: RunFolder,
    program: Script | Entry,
    options: GangOptions,
    kind: Kind,
    code: Code,
    about: Mapping[str, Any],
    argv: Sequence[str],
) -> Renew:
    """The record of this start, which replaces that of the run, except for its id and its age."""

    def renew(before: RunRecord | None) -> RunRecord:
        if before is not None:
            before.check_kind(kind, folder)
        spec = {"program": dataclasses.asdict(program), **about}
        now = new_record(folder, kind, options, spec=spec, code=dict(code), argv=tuple(argv))
        if before is None:
            return now
        return dataclasses.replace(now, run_id=before.run_id, created_s=before.created_s)

    return renew
