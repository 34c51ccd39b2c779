"""Runs a program on many devices in lock-step: the folder, the devices, then the launcher."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from muster.api.earlier_work import move_aside
from muster.api.lending import Lending
from muster.api.limits import refuse_to_begin
from muster.api.options import GangOptions, SweepOptions
from muster.api.placing import (
    as_wanted,
    device_request,
    remarks,
    slots_of,
    wait_of,
    would_place,
)
from muster.api.services import Services, check_services, run_services, told_in_queue
from muster.base.atomic_files import explain_os_error
from muster.base.code import Code, code_id
from muster.base.errors import UsageError
from muster.base.settings import Settings, read_settings
from muster.base.signals import listening
from muster.devices.device_request import DeviceRequest
from muster.devices.discovery import discover
from muster.devices.inventory import Inventory
from muster.devices.leases import Lease
from muster.devices.placement import Placement, Slot
from muster.devices.waiting import lease_in_turn
from muster.farm.events import Slots
from muster.farm.task import SlotSpec
from muster.gang.handle import SupervisorHandle
from muster.gang.launch import GangEnding, launch_gang
from muster.gang.spec import Entry, GangSpec, Script, Start
from muster.gang.topology import read_topology
from muster.run.folder import RunFolder
from muster.run.record import Kind, RunRecord, new_record
from muster.run.session import Renew, Session, open_run
from muster.run.state import last_word
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
class GangWork:
    """What ranks do, and in which folder; ``about``: what else the run's record says of it."""

    folder: RunFolder
    program: Script | Entry
    kind: Kind = "run"
    code: Code = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def renewal(self, options: GangOptions, argv: Sequence[str]) -> Renew:
        """The record of a start, which replaces that of the run, except for its id and its age."""

        def renew(before: RunRecord | None) -> RunRecord:
            if before is not None:
                before.check_kind(self.kind, self.folder)
            spec = {"program": dataclasses.asdict(self.program), **self.about}
            now = new_record(
                self.folder, self.kind, options, spec=spec, code=dict(self.code), argv=tuple(argv)
            )
            if before is None:
                return now
            return dataclasses.replace(now, run_id=before.run_id, created_s=before.created_s)

        return renew


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
        many = f"{len(labels)} rank{'s' if len(labels) > 1 else ''}"
        nodes, are_unlike = self.options.num_nodes, bool(self.options.ranks_of_nodes)
        here = f" on each of {nodes} nodes" if nodes > 1 and not are_unlike else ""
        threads = f"{self.threads_per_rank} thread{'s' if self.threads_per_rank > 1 else ''} each"
        return [f"{many}{here}: {shown}, {threads}", *remarks(self.placement)]


def choose_start(program: Script | Entry, options: GangOptions) -> Start:
    """How ranks begin; fork is safe on Linux only (elsewhere system libraries start threads)."""
    if options.start is not None:
        if options.start == "fork" and sys.platform != "linux":
            raise UsageError(f"--start fork is for Linux; this is {sys.platform}.")
        return options.start
    return "fork" if isinstance(program, Entry) and sys.platform == "linux" else "exec"


def plan_gang(work: GangWork, options: GangOptions) -> GangPlan:
    """The first half of a run: what would be started, where. It changes nothing and takes no lease.

    Raises what placing raises, and UsageError inside another launcher.
    """
    check_gang(options)
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
    """Run a gang to its end; whatever happens, nothing it started is left running.

    ``supervisor``: one that was started early (its ``forks`` must suit the options), closed at the
    end in any case; ``kept``: leases by GPU, which a start that moves leaves to the next one.

    Raises what placing raises, SetupError when somebody works on the folder, UsageError inside
    another launcher.
    """
    with listening() as requests, ExitStack() as devices, ExitStack() as stack:
        if supervisor is not None:
            stack.callback(supervisor.close)
        check_gang(options)
        settings = read_settings()
        folder = work.folder
        # On every node: one that begins alone would wait for the others.
        has_limits = wants_limits(work, options)
        if has_limits:
            refuse_to_begin(folder, options, requests, is_new=options.restart)
        here = as_wanted(folder, options)
        kept = {} if kept is None else kept
        has_moved = bool(kept)
        # One that moves keeps what it had where it is refused, which is no end.
        with nullcontext() if has_moved else told_in_queue(folder, options, audience.warn):
            placement, leases = _take(here, folder.name, settings, kept, audience.say)
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
        if ending.stopped_by == "SIGINT" and settings.slurm_job_id and folder.slurm.is_dir():
            # Seeing this file, the job's script cancels the job instead of starting it again.
            folder.slurm_cancelled(settings.slurm_job_id).touch()
        note_ending(ending, session, folder, audience)
        services.is_urgent = bool(ending.stopped_by) or ending.is_moving
        if ending.is_moving or (has_moved and ending.exit_code):  # it may go back
            kept |= lending.keep()
            devices.pop_all()
        devices.close()  # others may have them while trackers get the rest
        tell_ending(ending, services)
        return ending


def wants_limits(work: GangWork, options: GangOptions) -> bool:
    """Whether a start is to keep the limits of the run."""
    return bool(options.limits) and (options.restart or not _is_finished(work))


def note_ending(
    ending: GangEnding, session: Session, folder: RunFolder, audience: GangAudience
) -> None:
    """Write down in the run's journal how a start ended."""
    values = dataclasses.asdict(ending)
    fields = {k: v for k, v in values.items() if v and k not in ("word", "ends")}
    if ending.word.get("ending") == "restart" and not ending.stopped_by:
        fields["starts_again"] = True
    try:
        session.end(**{"exit_code": 0, **fields})
    except OSError as error:  # how it ended is known all the same
        audience.warn(str(explain_os_error(error, "write", folder.events)))


def tell_ending(ending: GangEnding, services: Services) -> None:
    """Send it to those whom ``--notify`` names, unless the run goes on at once."""
    path = services.folder.path
    if ending.stall:
        services.tell("stalled", f"{path}: {ending.stall}")
    if not ending.is_moving and ending.word.get("ending") != "restart":
        words = ending.report[0] if ending.report else f"exit code {ending.exit_code}"
        services.tell("ended", f"{path}: {words}", ending.exit_code)


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
        self.lending.touch()
        asked = self.services.session.asked() if self.can_move else []
        events = [event for ask in asked for event in self.lending.hear(ask)]
        wanted = [event.wanted for event in events if isinstance(event, Slots)]
        return bool(wanted) and _devices_of(wanted[-1]) != _devices_of(self.slots)


def _is_finished(work: GangWork) -> bool:
    """Whether it is a training that would only say that it is finished."""
    return work.kind != "run" and last_word(work.folder).get("ending") == "finished"


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
    run_name: str,
    settings: Settings,
    kept: Mapping[str, Lease],
    say: Callable[[str], None],
) -> tuple[Placement, list[Lease]]:
    return lease_in_turn(
        _request(options, discover(settings)),
        settings,
        force=options.force,
        run_name=run_name,
        kept=kept,
        wait=wait_of(options, say),
    )


def check_gang(options: GangOptions) -> None:
    """Refuse what needs no look at devices or folders; a dry run does as well."""
    here = read_topology()
    if here is not None:
        raise UsageError(
            f"This is rank {here.rank} of {here.world_size} of a gang that {here.launcher} has "
            "started: a gang inside every rank would make more ranks than there are devices.",
            hint="start muster outside the launcher, or unset RANK and WORLD_SIZE.",
        )
    check_services(options)
