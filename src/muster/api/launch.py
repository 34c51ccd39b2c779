"""Runs a workload to its end: the folder, the devices, the ledger, then the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from muster.api.earlier_work import move_aside
from muster.api.housekeeping import Housekeeping, Rehearsal
from muster.api.lending import Lending, as_wanted
from muster.api.options import SweepOptions
from muster.api.placing import placement_lines, slots_of, take_devices, would_take
from muster.api.plans import check_same_plan, choose_folder, renewal
from muster.api.runs import Run
from muster.api.search_records import gpus_per_worker
from muster.api.trackers.guard import tracking
from muster.api.trackers.tracker import check_installed
from muster.api.workload import Workload
from muster.base.clock import SystemClock
from muster.base.code import code_id
from muster.base.errors import SetupError, UsageError
from muster.base.settings import read_settings
from muster.base.signals import listening
from muster.devices.discovery import why_lost
from muster.devices.packing import MemorySampler
from muster.devices.placement import Placement
from muster.farm.coordinator import Coordinator, Ending, Hooks, Plan
from muster.farm.decisions import Policy
from muster.farm.executors.base import Assignment, PilotLeft
from muster.farm.executors.cluster import look_every_s
from muster.farm.executors.table import check_executor, make_executor
from muster.farm.executors.worker_process import interpreter, worker_python
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.store import Ledger
from muster.farm.leftover import dismiss, settle
from muster.farm.lifecycle import RetryPolicy
from muster.farm.metric_source import STDOUT
from muster.farm.task import SlotSpec, TargetSpec
from muster.farm.view import RunView
from muster.monitor.recorder import record_run
from muster.run.folder import RunFolder
from muster.run.record import own_id, plain_options, read_run
from muster.run.session import open_run

_LEAD_ON_FILES_S = 0.3

Show = Callable[[RunView], None]


def _show_nothing(view: RunView) -> None:
    return


def _say_nothing(line: str) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Who watches: ``show`` gets pictures while it runs, ``say`` lines about how it is run and
    ``warn`` lines about what may be wrong.

    ``argv`` is the command line that `muster resume` will repeat.
    """

    show: Show = _show_nothing
    say: Callable[[str], None] = _say_nothing
    warn: Callable[[str], None] = _say_nothing
    argv: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything decided before anything is started: what ``--dry-run`` shows."""

    workload: Workload
    options: SweepOptions
    folder: RunFolder
    placement: Placement
    is_new: bool


def prepare(workload: Workload, options: SweepOptions) -> Prepared:
    """The first half of a run: what would be run, where, by whom. It changes nothing on disk.

    Raises what ``muster.sweep`` raises before it starts anything.
    """
    _check_executor(workload, options)
    check_installed(options.log_to)
    folder = choose_folder(workload, options)
    is_new = options.restart or not folder.exists()
    if not is_new:
        check_same_plan(folder, read_run(folder), workload, options)
    return Prepared(
        workload=workload,
        options=options,
        folder=folder,
        placement=would_take(as_wanted(folder, options), read_settings()),
        is_new=is_new,
    )


def run_workload(workload: Workload, options: SweepOptions, audience: Audience) -> Run:
    """Run a workload, or continue it; the engine behind ``muster.sweep`` and the command.

    Raises what ``muster.sweep`` raises. Whatever happens, nothing it started is left running.
    """
    _check_executor(workload, options)
    check_installed(options.log_to)
    settings = read_settings()
    folder = choose_folder(workload, options)
    with listening() as requests, ExitStack() as devices, ExitStack() as stack:
        chosen = as_wanted(folder, options)
        placement, leases = take_devices(chosen, folder.name, settings)
        slots = slots_of(placement, chosen)
        lending = Lending(folder, options, settings, slots, leases)
        devices.callback(lending.close)
        if options.restart:
            move_aside(folder, workload.kind, audience.say)
        renew = renewal(workload, options, folder, audience.argv)
        session = stack.enter_context(open_run(folder, renew))
        lending.forget_other_choice()
        workload.begin(folder)
        for line in workload.warnings:
            audience.warn(line)
        for line in placement_lines(placement, options):
            audience.say(line)
        if own_id(folder).is_new_copy:
            audience.say(f"{folder.path} is a copy, or was moved: it goes on as a run of its own.")
        stack.enter_context(
            tracking(folder, options.log_to, audience.warn, is_urgent=lambda: bool(requests.reason))
        )
        ledger = open_ledger(folder, settings)
        stack.callback(ledger.close)
        uuids = {uuid for slot in placement.slots for uuid in slot.device_uuids}
        interval_s = options.monitor_interval_s
        stack.enter_context(record_run(folder, uuids, interval_s, settings, audience.warn))
        call = workload.rehearse
        rehearsal = None if call is None else Rehearsal(call, audience.warn)
        housekeeping = Housekeeping(
            folder, session, options, settings, slots, SystemClock(), requests, rehearsal, lending,
        )  # fmt: skip
        with housekeeping:
            ending = _coordinate(workload, options, ledger, housekeeping, audience)
        _check_balance(folder, ending)
        ending.stop_signal = requests.reason
        devices.close()  # others may have them while the table or the output is written
        workload.finish(folder, ending)
    _check_usable(folder, ending, options)
    if rehearsal is not None and rehearsal.error is not None:
        raise rehearsal.error
    return Run(folder.path, ending=ending)


def _check_executor(workload: Workload, options: SweepOptions) -> None:
    check_executor(options.executor)
    if options.python is not None:
        if options.executor != "local":
            raise UsageError(
                f"--python chooses the interpreter of workers on this machine, and has no effect "
                f"with --on {options.executor}.",
                hint="drop one of them; if the run was begun with --python, by typing its command "
                "again without it.",
            )
        if any(spec.kind == "command" for spec in workload.targets):
            raise UsageError(
                "--python chooses the interpreter of functions, and has no effect on a command.",
                hint=f"name it in the command: -- {interpreter(options.python)} train.py …",
            )
        worker_python(options.python)
    search = workload.search
    if search is not None and search.stopping.rule != "none" and options.executor == "inline":
        raise UsageError(
            "--stop has no effect with --on inline: no message is read while a task runs.",
            hint="drop one of them.",
        )
    if search is not None and search.budget.cost is not None and options.per_gpu == "auto":
        raise UsageError(
            "--max-cost needs to know how many workers share a GPU, and --per-gpu auto does not.",
            hint="write a number, such as --per-gpu 3, or limit the search with --search-time 2h.",
        )
    if options.executor == "inline" and any(
        spec.metrics_from.startswith(f"{STDOUT}:") for spec in workload.targets
    ):
        raise UsageError(
            "--metrics-from stdout:REGEX reads the log of a worker, and --on inline has none.",
            hint="drop one of them.",
        )


def _coordinate(
    workload: Workload,
    options: SweepOptions,
    ledger: Ledger,
    housekeeping: Housekeeping,
    audience: Audience,
) -> Ending:
    folder, clock = housekeeping.folder, housekeeping.clock
    numbers = _number_targets(ledger, workload)
    targets = {numbers[spec.name]: spec for spec in workload.targets}
    left, num_again = _settle(folder, ledger, workload, options, targets)
    num_again += _open_stopped(ledger, workload, numbers)
    if num_again and not workload.is_map:
        audience.say(f"{num_again:,} task{'s' if num_again > 1 else ''} will run again")
    assignment = Assignment(
        folder=folder,
        run_id=own_id(folder).text,
        targets=targets,
        held_mib=MemorySampler(housekeeping.settings).used_by,
        why_lost=partial(why_lost, housekeeping.settings),
        cluster=options.cluster,
        left=left,
        python=options.python,
    )
    plan = Plan(
        folder=folder,
        targets=targets,
        slots=housekeeping.slots,
        policy=policy_of(options, workload.retry, is_search=workload.drive is not None),
        total=0 if workload.drive else workload.total,
        feed=workload.feed(numbers),
        driver=None
        if workload.drive is None
        else workload.drive(folder, numbers, clock, _gpus_per_worker(options, housekeeping.slots)),
        plan_id=workload.plan_id,
        code=code_id(workload.code) or None,
        held={pilot.slot_id: pilot.worker for pilot in left if pilot.worker is not None},
    )
    hooks = Hooks(
        show=audience.show,
        requests=housekeeping.requests,
        housekeeping=housekeeping.do,
        clock=clock,
        asked=housekeeping.asked,
    )
    labels = [slot.label for slot in plan.slots]
    journal = housekeeping.session.begin(tasks=workload.total, workers=labels, code=plan.code)
    executor = make_executor(options.executor, assignment)
    ending = Coordinator(plan, ledger, executor, journal, hooks).run()
    housekeeping.session.end(**{state.name.lower(): n for state, n in ending.counts.items()})
    return ending


def _gpus_per_worker(options: SweepOptions, slots: Sequence[SlotSpec]) -> float:
    return gpus_per_worker(plain_options(options), has_gpus=any(slot.devices for slot in slots))


def policy_of(
    options: SweepOptions, retry: RetryPolicy | None = None, *, is_search: bool = False
) -> Policy:
    retry = retry or RetryPolicy(
        retries=options.retries, exception_retries=options.retry_exceptions
    )
    lead_s = Policy.lead_s
    if options.executor == "slurm":
        # Files on a shared folder take their time: more is kept ready in a worker.
        lead_s = max(_LEAD_ON_FILES_S, 2 * look_every_s(options.cluster.num_workers))
    policy = Policy(
        retry=retry, timeout_s=options.timeout_s, keep_going=options.keep_going, lead_s=lead_s
    )
    # A search chooses a task when a worker is free for it, with all that is known by then.
    return dataclasses.replace(policy, asks_ahead=False, max_lead=1) if is_search else policy


def _number_targets(ledger: Ledger, workload: Workload) -> dict[str, int]:
    """The number of each target in the ledger, by its name; the ledger notes their code too."""
    ledger.begin()
    numbers = {spec.name: ledger.target_id(spec.name) for spec in workload.targets}
    for number in numbers.values():
        ledger.record_code(number, code_id(workload.code))
    ledger.commit()
    return numbers


def _settle(
    folder: RunFolder,
    ledger: Ledger,
    workload: Workload,
    options: SweepOptions,
    targets: Mapping[int, TargetSpec],
) -> tuple[list[PilotLeft], int]:
    """Void what a dead coordinator had claimed, except what its pilots have done or still do.

    Returns those pilots, and how many tasks are tried again.
    """
    request = options.cluster if options.executor == "slurm" else None
    ledger.begin()
    left = settle(folder, ledger, request, targets)
    num_again = ledger.reopen(workload.reopens) if workload.reopens else 0
    ledger.commit()
    if request is None:
        dismiss(folder)
    return left, num_again


def _open_stopped(ledger: Ledger, workload: Workload, numbers: Mapping[str, int]) -> int:
    """Tasks that a search has ended early and that a grid names are done after all; how many."""
    stopped = {} if workload.drive is not None else ledger.stopped()
    if not stopped:
        return 0
    named = [stopped[task.key] for task in workload.feed(numbers) if task.key in stopped]
    ledger.begin()
    ledger.reopen_stopped(named)
    ledger.commit()
    return len(named)


def _check_balance(folder: RunFolder, ending: Ending) -> None:
    if ending.imbalance is not None:
        raise SetupError(
            f"The counts do not balance: {ending.imbalance}. Nothing was published; "
            f"{folder.path} is left as it is.",
            hint="the ledger has lost a part of the plan or of the results. Run the same command "
            "in another --run-dir, and please report it.",
        )


def _check_usable(folder: RunFolder, ending: Ending, options: SweepOptions) -> None:
    ended = sum(n for state, n in ending.counts.items() if state.is_final)
    if ending.unusable and ended < sum(ending.counts.values()):
        raise SetupError(
            f"No worker is left to run tasks: {ending.unusable}",
            hint=f"see {_where_to_look(folder, options)}; everything finished is saved, so run the "
            "same command again.",
        )


def _where_to_look(folder: RunFolder, options: SweepOptions) -> Path:
    """The logs of workers, or the output of the last job that failed before it had a worker."""
    outputs = folder.job_files.glob("*.out") if options.executor == "slurm" else ()
    told = [path for path in outputs if path.stat().st_size]
    return max(told, key=lambda path: path.stat().st_mtime, default=folder.logs)
