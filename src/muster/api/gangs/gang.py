"""Runs a program on many devices in lock-step: the folder, the devices, then the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass

from muster.api.gangs.host_plan import HostsPlan, plan_on_hosts
from muster.api.gangs.hosts import run_on_hosts
from muster.api.gangs.work import (
    GangAudience,
    GangWork,
    check_gang,
    choose_start,
    note_ending,
    tell_ending,
    wants_limits,
)
from muster.api.start.earlier_work import move_aside
from muster.api.start.lending import Lending
from muster.api.start.limits import refuse_to_begin
from muster.api.start.options import GangOptions, SweepOptions
from muster.api.start.placing import (
    as_wanted,
    device_request,
    remarks,
    slots_of,
    wait_of,
    would_place,
)
from muster.api.start.services import Services, run_services, told_in_queue
from muster.base.code import code_id
from muster.base.settings import Settings, read_settings
from muster.base.shown_text import count
from muster.base.signals import CANCEL, listening
from muster.devices.discovery import discover
from muster.devices.inventory import DeviceRequest, Inventory
from muster.devices.leases import Lease
from muster.devices.placement import Placement, Slot
from muster.devices.waiting import lease_in_turn
from muster.farm.events import Slots
from muster.farm.task import SlotSpec
from muster.gang.handle import SupervisorHandle
from muster.gang.launch import GangEnding, launch_gang
from muster.gang.spec import Entry, GangSpec, Script, Start
from muster.run.folder import RunFolder, id_of
from muster.run.session import check_open, open_run
from muster.slurm.commands import typed_for_job


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

    @property
    def ranks(self) -> list[str]:
        return [slot.label for slot in self.slots]

    @property
    def num_nodes(self) -> int:
        return self.options.num_nodes

    def lines(self) -> list[str]:
        """What a user should know about where the ranks run."""
        labels = self.ranks
        shown = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
        many = count(len(labels), "rank")
        nodes, are_unlike = self.options.num_nodes, bool(self.options.ranks_of_nodes)
        here = f" on each of {nodes} nodes" if nodes > 1 and not are_unlike else ""
        threads = f"{count(self.threads_per_rank, 'thread')} each"
        return [f"{many}{here}: {shown}, {threads}", *remarks(self.placement)]


def plan_gang(work: GangWork, options: GangOptions) -> GangPlan | HostsPlan:
    """The first half of a run: what would be started, where. It changes nothing and takes no lease.

    Raises what placing raises, SetupError for a host that cannot be used, and UsageError inside
    another launcher.
    """
    check_gang(options)
    if options.hosts is not None:
        return plan_on_hosts(work, options)
    settings, options = read_settings(), as_wanted(work.folder, options)
    inventory = discover(settings)
    placement = would_place(
        _request(options, inventory),
        inventory,
        settings,
        force=options.force or settings.is_task,
        waits=options.wait_s > 0,
    )
    return _plan(work, options, placement, settings)


def run_gang(
    work: GangWork,
    options: GangOptions,
    audience: GangAudience,
    *,
    supervisor: SupervisorHandle | None = None,
    kept: dict[str, Lease] | None = None,
) -> GangEnding:
    """Run a gang to its end, here or on the hosts that the options name; whatever happens, nothing
    it started is left running.

    ``supervisor``: one that was started early (its ``forks`` must suit the options), closed at the
    end in any case; ``kept``: leases by GPU, which a start that moves leaves to the next one.

    Raises what ``plan_gang`` raises, and SetupError when somebody works on the folder.
    """
    if options.hosts is not None:
        if supervisor is not None:
            supervisor.close()
        return run_on_hosts(work, options, audience)
    with listening() as requests, ExitStack() as devices, ExitStack() as stack:
        if supervisor is not None:
            stack.callback(supervisor.close)
        check_gang(options)
        settings = read_settings()
        folder = work.folder
        if not (kept or options.node_rank):  # nodes may share the folder, which the first one holds
            check_open(folder)
        # On every node: one that begins alone would wait for the others.
        has_limits = wants_limits(work, options)
        if has_limits:
            refuse_to_begin(folder, options, requests, is_new=options.restart)
        here = as_wanted(folder, options)
        kept = {} if kept is None else kept
        has_moved = bool(kept)
        # One that moves keeps what it had where it is refused, which is no end.
        with nullcontext() if has_moved else told_in_queue(folder, options, audience.warn):
            placement, leases = _take(here, folder, settings, kept, audience.say)
            kept.clear()
            for lease in leases:
                devices.enter_context(lease)
            plan = _plan(work, here, placement, settings)
            workers = _as_workers(options)
            slots = slots_of(plan.placement, workers)
            has_gpus = any(slot.devices for slot in slots)
            options.check_idle(has_gpus=has_gpus, records=options.monitor_interval_s > 0)
            if has_limits and options.wait_s:  # the queue may have taken hours
                refuse_to_begin(folder, options, requests, is_new=options.restart)
        # In a job from an older muster, ``argv`` is what its script calls on the node.
        words = typed_for_job(folder, settings.slurm_job_id) or audience.argv
        if options.restart:
            move_aside(folder, work.kind, audience.say)
        renew = work.renewal(options, words)
        session = stack.enter_context(open_run(folder, renew, node=options.node_rank))
        for line in plan.lines():
            audience.say(line)
        lending = devices.enter_context(closing(Lending(folder, workers, settings, slots, leases)))
        services = stack.enter_context(
            run_services(
                folder, options, session, requests, settings, lending.uuids, audience.warn,
                node=options.node_rank,
            )
        )  # fmt: skip
        session.begin(ranks=[slot.label for slot in plan.slots], code=code_id(work.code))
        can_move = work.kind in ("train", "agent") and options.num_nodes == 1
        if can_move:
            lending.forget_other_choice()
        watcher = _Watcher(audience, services, lending, slots, can_move)
        many = len(slots) * options.num_nodes
        with services.limited(lambda: many) if has_limits else nullcontext():
            ending = launch_gang(supervisor, _spec(plan, work.program), watcher)
        if (
            ending.stopped_by in ("SIGINT", CANCEL)
            and settings.slurm_job_id
            and folder.slurm.is_dir()
        ):
            # Seeing this file, the job's script cancels the job instead of starting it again.
            folder.slurm_cancelled(settings.slurm_job_id).touch()
        note_ending(ending, session, folder, audience)
        services.is_urgent = bool(ending.stopped_by or requests.reason) or ending.is_moving
        if ending.is_moving or (has_moved and ending.exit_code):  # it may go back
            kept |= lending.keep()
            devices.pop_all()
        devices.close()  # others may have them while trackers get the rest
        tell_ending(ending, services)
        return ending


@dataclass(frozen=True)
class _Watcher:
    """What the launcher tells while the ranks work, and what others want of them."""

    audience: GangAudience
    services: Services
    lending: Lending
    slots: tuple[SlotSpec, ...]
    can_move: bool

    def hear(self, rank: int, line: str) -> None:
        self.audience.hear(rank, line)

    def say(self, line: str) -> None:
        if line.startswith("stalled: "):
            self.services.tell("stalled", line)
        self.audience.warn(line)

    def is_cancelled(self) -> bool:
        return self.services.session.is_cancelled()

    def moves(self) -> bool:
        """Whether somebody has asked for other devices, which the next start takes."""
        for line in self.lending.touch():
            self.audience.warn(line)
        asked = self.services.session.asked() if self.can_move else []
        events = [event for ask in asked for event in self.lending.hear(ask)]
        wanted = [event.wanted for event in events if isinstance(event, Slots)]
        return bool(wanted) and _devices_of(wanted[-1]) != _devices_of(self.slots)


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
        ranks_of_nodes=options.ranks_of_nodes,
        min_nodes=options.min_nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port or 0,
        stall_timeout_s=options.stall_timeout_s,
        grace_s=options.grace_s,
    )


def _plan(
    work: GangWork,
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
        folder=work.folder,
        options=options,
        placement=dataclasses.replace(placement, slots=slots),
        start=choose_start(work.program, options),
        threads_per_rank=threads,
    )


def _as_workers(options: GangOptions) -> SweepOptions:
    """The choice of devices as a sweep would make it."""
    return SweepOptions(
        **options.choice, force=options.force, is_chosen_anew=options.is_chosen_anew
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
    options: GangOptions,
    folder: RunFolder,
    settings: Settings,
    kept: Mapping[str, Lease],
    say: Callable[[str], None],
) -> tuple[Placement, list[Lease]]:
    return lease_in_turn(
        _request(options, discover(settings)),
        settings,
        force=options.force,
        run_name=folder.name,
        place=id_of(folder.path),
        kept=kept,
        wait=wait_of(options, say, folder.path),
    )
