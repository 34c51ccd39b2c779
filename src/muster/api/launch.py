"""Runs a workload to its end: the folder, the devices, the ledger, then the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from muster.api.recipe import Recipe
from muster.api.start.options import SweepOptions, options_of_call
from muster.api.start.placing import (
    as_wanted,
    gpus_per_worker,
    hosts_kept_open,
    on_hosts,
    placement_lines,
    slots_of,
    take_devices,
    would_take,
)
from muster.api.sweeps.plans import (
    check_same_plan,
    choose_folder,
    is_done,
    other_sources,
    refuse_past_limits,
    renewal,
)
from muster.api.sweeps.search_options import SearchOptions
from muster.api.sweeps.workload import (
    Workload,
    check_executor_for,
    for_python,
    in_folder,
    of_command,
    of_function,
    of_recipe,
    of_target_text,
)
from muster.base.clock import SystemClock
from muster.base.errors import MusterError, SetupError, UsageError
from muster.base.settings import Settings, read_settings
from muster.base.signals import listening, stop_code
from muster.base.target import ref_of, refuse_while_imported
from muster.devices.placement import Placement
from muster.farm.executors.cluster import look_every_s
from muster.farm.space import Space
from muster.farm.task import SlotSpec
from muster.run.folder import RunFolder
from muster.run.record import plain_options, read_run

if TYPE_CHECKING:
    from muster.api.runs import Run
    from muster.api.start.services import Services
    from muster.farm.decisions import Policy, RetryPolicy
    from muster.farm.executors.head_start import HeadStart
    from muster.farm.plan import Ending
    from muster.farm.view import RunView
    from muster.farm.work import Work

#: Ray's calls take some milliseconds each way, and more where its nodes are busy.
_LEAD_ON_RAY_S = 0.15
_LEAD_ON_FILES_S = 0.3

Show = Callable[["RunView"], None]


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
    _check(workload, options)
    workload = for_python(workload, options.python)
    options = on_hosts(options)
    folder = choose_folder(workload, options)
    is_new = options.restart or not folder.exists()
    if not is_new:
        check_same_plan(folder, read_run(folder), workload, options)
    return Prepared(
        workload=workload,
        options=options,
        folder=folder,
        placement=would_take(as_wanted(folder, options), read_settings(), now=True),
        is_new=is_new,
    )


def run_workload(
    workload: Workload,
    options: SweepOptions,
    audience: Audience,
    head_start: HeadStart | None = None,
) -> Run:
    """Run a workload, or continue it; the engine behind ``muster.sweep`` and the command.
    ``head_start``: processes of its workers, as far as some were begun before.

    Raises what ``muster.sweep`` raises. Whatever happens, nothing it started is left running.
    """
    _check(workload, options)
    workload = for_python(workload, options.python)
    with hosts_kept_open(options):
        return _run(workload, options, audience, head_start)


def _run(
    workload: Workload, options: SweepOptions, audience: Audience, head_start: HeadStart | None
) -> Run:
    # Here, for a dry run and a wrong option need none of it: it takes as long as all of theirs.
    from muster.api.runs import Run
    from muster.api.start.code_watch import CodeWatch
    from muster.api.start.earlier_work import move_aside
    from muster.api.start.lending import Lending
    from muster.api.start.services import run_services, told_in_queue
    from muster.api.sweeps.housekeeping import Housekeeping, Rehearsal
    from muster.farm.table_writer import TableWriter
    from muster.farm.work import work_off
    from muster.run.session import check_open, open_run

    settings = read_settings()
    folder = choose_folder(workload, options)
    placed = options
    if options.cluster.hosts is not None:  # only then is the ledger read for it
        placed = on_hosts(options, is_needed=options.restart or not is_done(folder, workload))
        options = placed if placed.cluster.hosts is not None else options
    workload = in_folder(workload, folder)
    with listening() as requests, ExitStack() as devices, ExitStack() as stack:
        check_open(folder)
        refuse_past_limits(folder, workload, options, requests)
        chosen = as_wanted(folder, placed)
        with told_in_queue(folder, options, audience.warn):
            whole = RunFolder(folder.whole)  # whoever looks knows a stage by its map
            placement, leases = take_devices(chosen, whole.name, settings, audience.say, whole.path)
            slots = slots_of(placement, chosen)
            lending = Lending(folder, options, settings, slots, leases)
            devices.callback(lending.close)
            has_gpus = bool(lending.uuids())
            options.check_idle(has_gpus=has_gpus, records=options.monitor_interval_s > 0)
            if options.wait_s:  # the queue may have taken hours
                refuse_past_limits(folder, workload, options, requests)
        read_before = () if options.restart else other_sources(folder, workload)
        if options.restart:
            move_aside(folder, workload.kind, audience.say)
        renew = renewal(workload, options, folder, audience.argv)
        fresh_id = "" if head_start is None else head_start.run_id
        session = stack.enter_context(open_run(folder, renew, fresh_id=fresh_id))
        lending.forget_other_choice()
        workload.begin(folder)
        for line in (*workload.warnings, *read_before):
            audience.warn(line)
        for line in placement_lines(placement, options):
            audience.say(line)
        if session.folder_id.is_new_copy:
            audience.say(f"{folder.path} is a copy, or was moved: it goes on as a run of its own.")
        services = stack.enter_context(
            run_services(folder, options, session, requests, settings, lending.uuids, audience.warn)
        )
        call = workload.rehearse
        rehearsal = None if call is None else Rehearsal(call, audience.warn)
        watch = CodeWatch(workload.code, Path.cwd())
        table = stack.enter_context(closing(TableWriter(folder)))
        beside = Housekeeping(
            services, options, settings, lending, rehearsal, watch, audience.show,
            table if workload.finish is None else None,
        )  # fmt: skip
        say = _say_nothing if workload.is_map else audience.say
        work = _work(workload, options, folder, slots, settings, head_start)
        rate = _gpus_per_worker(options, slots)
        with services.limited(lambda: rate * beside.num_at_work()):
            ending = work_off(work, beside, session, say=say)
        _check_balance(folder, ending)
        ending.stop_signal = requests.reason
        devices.close()  # others may have them while the table or the output is written
        if workload.finish is None:
            table.write()
        else:
            workload.finish(folder, ending)
        run = Run(folder.path, ending=ending)
        problem = _unusable(folder, ending, options)
        if problem is None and rehearsal is not None:
            problem = rehearsal.error
        code = run.exit_code if problem is None else problem.exit_code
        session.over(code)
        _tell_of_end(services, run, ending, code)
    if problem is not None:
        raise problem
    return run


def _tell_of_end(services: Services, run: Run, ending: Ending, code: int) -> None:
    if run.folder.whole != run.path and run.folder.published_json.exists():
        if not ending.stop_signal:
            return  # the next stage of a map begins, also where some records have failed
        code = stop_code(ending.stop_signal)
    counts = ", ".join(f"{n:,} {state.name.lower()}" for state, n in ending.counts.items() if n)
    text = f"{run.folder.whole}: {counts or 'nothing to do'}; exit code {code}"
    services.tell(*(("paused", ending.paused) if ending.paused else ("ended", text)), code)


def _check(workload: Workload, options: SweepOptions) -> None:
    check_executor_for(workload, options)
    options.check_services()


def _work(
    workload: Workload,
    options: SweepOptions,
    folder: RunFolder,
    slots: tuple[SlotSpec, ...],
    settings: Settings,
    head_start: HeadStart | None,
) -> Work:
    from muster.farm.executors.table import make_executor
    from muster.farm.work import Work

    drive = workload.drive
    rate = _gpus_per_worker(options, slots)
    return Work(
        folder=folder,
        settings=settings,
        targets=workload.targets,
        code_id=workload.code_id,
        plan_id=workload.plan_id,
        total=workload.total,
        feed=workload.feed,
        is_distinct=workload.space is not None,
        drive=None if drive is None else lambda n: drive(folder, n, SystemClock(), rate),
        policy=policy_of(options, workload.retry, is_search=drive is not None),
        slots=slots,
        reopens=workload.reopens,
        make_executor=partial(make_executor, options.executor),
        has_pilots=options.executor == "slurm",
        cluster=options.cluster,
        python=options.python,
        head_start=head_start,
    )


def _gpus_per_worker(options: SweepOptions, slots: Sequence[SlotSpec]) -> float:
    return gpus_per_worker(plain_options(options), has_gpus=any(slot.devices for slot in slots))


def policy_of(
    options: SweepOptions, retry: RetryPolicy | None = None, *, is_search: bool = False
) -> Policy:
    from muster.farm.decisions import Policy, RetryPolicy  # here: a dry run decides nothing

    retry = retry or RetryPolicy(
        retries=options.retries, exception_retries=options.retry_exceptions
    )
    lead_s = Policy.lead_s
    if options.executor == "slurm":
        # Files on a shared folder take their time: more is kept ready in a worker.
        lead_s = max(_LEAD_ON_FILES_S, 2 * look_every_s(options.cluster.num_workers))
    if options.executor == "ray":
        lead_s = _LEAD_ON_RAY_S
    policy = Policy(
        retry=retry, timeout_s=options.timeout_s, keep_going=options.keep_going, lead_s=lead_s
    )
    # A search chooses a task when a worker is free for it, with all that is known by then.
    return dataclasses.replace(policy, asks_ahead=False, max_lead=1) if is_search else policy


def _check_balance(folder: RunFolder, ending: Ending) -> None:
    if ending.imbalance is not None:
        raise SetupError(
            f"The counts do not balance: {ending.imbalance}. Nothing was published; "
            f"{folder.path} is left as it is.",
            hint="the ledger has lost a part of the plan or of the results. Run the same command "
            "in another --run-dir, and please report it.",
        )


def _unusable(folder: RunFolder, ending: Ending, options: SweepOptions) -> MusterError | None:
    """Why nobody is left to do what is left; None where somebody is, or nothing is left."""
    ended = sum(n for state, n in ending.counts.items() if state.is_final)
    if ending.unusable and ended < sum(ending.counts.values()):
        took_too_much = options.memory_mib is not None and "(--memory)" in ending.unusable
        how = " with a higher --memory" if took_too_much else ""
        return SetupError(
            f"No worker is left to run tasks: {ending.unusable}",
            hint=f"see {_where_to_look(folder, options)}; everything finished is saved, so run the "
            f"same command again{how}.",
        )
    return None


def _where_to_look(folder: RunFolder, options: SweepOptions) -> Path:
    """The logs of workers, or the output of the last job that failed before it had a worker."""
    outputs = folder.job_files.glob("*.out") if options.executor == "slurm" else ()
    told = [path for path in outputs if path.stat().st_size]
    return max(told, key=lambda path: path.stat().st_mtime, default=folder.logs)


def sweep(
    target: Callable[..., Any] | str | Sequence[str] | Recipe,
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    zipped: Mapping[str, Iterable[Any]] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    seed_offset: int = 0,
    priority_column: str = "",
    config: Any = None,
    shell: bool = False,
    metrics_from: str = "",
    show: Show | None = None,
    try_: Mapping[str, Any] | Iterable[Mapping[str, Any]] = (),
    **options: Any,
) -> Run:
    """Run ``target`` once for every parameter set, on every device, and record every result.

    Args:
        target: a function, ``"file.py:function"``, ``"package.module:function"``, a list of
            command arguments with ``{name}`` places, or a recipe.
        grid: values per parameter; all combinations run.
        zipped: values per parameter that advance together; all lists equally long.
        rows: parameter sets one by one.
        seeds: a number of seeds from 0, or the seeds themselves; a task gets its ``seed``.
        seed_offset: added to every seed.
        priority_column: a name in ``rows`` that has priorities and is not a parameter: rows with
            higher numbers begin first, and a row without one has 0.
        config: a recipe's configuration; its defaults without one.
        shell: hand a command to ``sh -c``.
        metrics_from: where a command that logs nothing has its numbers over time:
            ``"stdout:REGEX"`` with named groups, or ``"tensorboard:DIR"`` below the task's folder.
        show: called about ten times a second with a picture of the run, a ``RunView``; without
            one, a notebook shows it below the cell.
        try_: first guesses of a search, as mappings, or one such.
        options: see ``SweepOptions`` (``devices="auto"``, ``retries=1``, ``run_dir=…``), and for a
            search ``SearchOptions``: ``space={"lr": muster.Space.log(1e-5, 1e-1)}``,
            ``maximize="accuracy"``, ``trials=100``, ``sampler``, ``stop``. ``seeds`` are then the
            replicates of each trial, and ``grid``, ``zipped`` and ``rows`` cannot be given.

    Returns:
        The run; ``run.results()`` is the table. Calling again with the same arguments continues.

    Raises:
        UsageError: the call is wrong. TargetError: the target cannot be loaded or called.
        PlanMismatchError: the run folder holds another plan. SetupError: this machine or disk
        cannot do it. Failed tasks raise nothing: they are rows of the table.
    """
    refuse_while_imported("muster.sweep")
    if metrics_from and (isinstance(target, str | Recipe) or callable(target)):
        raise UsageError("metrics_from is for a command; a function logs with ctx.log.")
    for name in ("maximize", "minimize", "constraint"):
        if isinstance(options.get(name), str):
            options[name] = (options[name],)
    tries = (try_,) if isinstance(try_, Mapping) else try_
    if guesses := [orjson.dumps(dict(guess)).decode() for guess in tries]:
        options["tries"] = tuple(guesses)
    made, search = options_of_call("sweep", options, SweepOptions, SearchOptions)
    search.check_used()
    made = search.limiting(made)
    space = Space.from_values(
        grid=grid, zipped=zipped, rows=rows, seeds=seeds, seed_offset=seed_offset,
        priority_column=priority_column,
    )  # fmt: skip
    if search.is_search:
        from muster.api.sweeps.search import search_of_command, search_of_function

        if grid or zipped or rows is not None or config is not None:
            raise UsageError(
                "A search chooses its settings: grid, zipped, rows and config have no place in it.",
                hint="put what they hold into space, as choice(...).",
            )
        replicates = None if space.seeds is None else tuple(space.seeds)
        if isinstance(target, Recipe):
            raise UsageError(
                f"{target.name} is a recipe, which has a plan of its own: it cannot be searched.",
                hint="search over the function that it calls.",
            )
        if callable(target) or isinstance(target, str):
            workload = search_of_function(target, search, replicates)
        else:
            workload = search_of_command(
                list(target), search, replicates, shell=shell, metrics_from=metrics_from
            )
    elif isinstance(target, Recipe):
        workload = of_recipe(target, config if config is not None else target.config())
    elif callable(target):
        workload = of_function(ref_of(target), space)
    elif isinstance(target, str):
        workload = of_target_text(target, space)
    else:
        workload = of_command(list(target), space, shell=shell, metrics_from=metrics_from)
    from muster.api.notebook import watched  # which knows an Audience from here

    with watched(show, "failures() of the run has the causes") as audience:
        return run_workload(workload, made, audience)
