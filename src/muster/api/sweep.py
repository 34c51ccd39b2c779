"""Runs a workload on this machine's devices: opens the folder, places workers, coordinates."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.api.chores import Chores
from muster.api.ledgers import open_ledger
from muster.api.options import SweepOptions
from muster.api.packing import PerGpuAuto
from muster.api.recipe import Recipe
from muster.api.runs import Run, refresh_export
from muster.api.stored import StoredRun, check_same_plan, read_stored, write_stored
from muster.api.workload import Workload, of_command, of_function, of_recipe, of_target_text
from muster.base.atomic_files import explain_os_error
from muster.base.clock import Clock, SystemClock
from muster.base.errors import PlanMismatchError, SetupError, UnknownNameError
from muster.base.journal import Journal
from muster.base.run_folder import RunFolder
from muster.base.settings import Settings, read_settings
from muster.devices.inventory import discover
from muster.devices.leases import place_and_lease
from muster.devices.placement import DeviceRequest, Placement, parse_devices, parse_gpu_ids
from muster.devices.samples import MemorySampler
from muster.farm.coordinator import Coordinator, Ending, Hooks, Plan
from muster.farm.decide import Policy
from muster.farm.executors.base import Assignment
from muster.farm.executors.table import EXECUTORS, make_executor
from muster.farm.identity import name_with_hash
from muster.farm.ledger.store import Ledger
from muster.farm.lifecycle import RetryPolicy
from muster.farm.model import SlotSpec, TaskState
from muster.farm.publish import publish_after_crash
from muster.farm.space import Space
from muster.farm.target import ref_of
from muster.farm.view import RunView

Show = Callable[[RunView], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything decided before anything is started: what ``--dry-run`` shows."""

    workload: Workload
    options: SweepOptions
    folder: RunFolder
    placement: Placement
    is_new: bool


def sweep(
    target: Callable[..., Any] | str | Sequence[str] | Recipe,
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    zipped: Mapping[str, Iterable[Any]] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    seed_offset: int = 0,
    config: Any = None,
    shell: bool = False,
    show: Show | None = None,
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
        config: a recipe's configuration; its defaults without one.
        shell: hand a command to ``sh -c``.
        show: called about ten times a second with the state of affairs.
        options: see ``SweepOptions`` (``devices="auto"``, ``retries=1``, ``run_dir=…``).

    Returns:
        The run; ``run.results()`` is the table. Calling again with the same arguments continues.

    Raises:
        UsageError: the call is wrong. TargetError: the target cannot be loaded or called.
        PlanMismatchError: the run folder holds another plan. SetupError: this machine or disk
        cannot do it. Failed tasks raise nothing: they are rows of the table.
    """
    unknown = set(options) - {field.name for field in dataclasses.fields(SweepOptions)}
    if unknown:
        known = [field.name for field in dataclasses.fields(SweepOptions)]
        raise UnknownNameError("option of sweep", min(unknown), known)
    if isinstance(options.get("run_dir"), str):
        options["run_dir"] = Path(options["run_dir"])
    space = Space.from_values(
        grid=grid, zipped=zipped, rows=rows, seeds=seeds, seed_offset=seed_offset
    )
    if isinstance(target, Recipe):
        workload = of_recipe(target, config if config is not None else target.config())
    elif callable(target):
        workload = of_function(ref_of(target), space)
    elif isinstance(target, str):
        workload = of_target_text(target, space)
    else:
        workload = of_command(list(target), space, shell=shell)
    return run_workload(workload, SweepOptions(**options), show=show)


def run_workload(
    workload: Workload,
    options: SweepOptions,
    *,
    show: Show | None = None,
    argv: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Run:
    """Run a workload to its end, or continue it; the engine behind ``sweep`` and the command."""
    clock = SystemClock()
    settings = read_settings()
    folder = choose_folder(workload, options)
    with ExitStack() as stack:
        try:
            return _run(workload, options, folder, settings, clock, stack, show, argv, say)
        except OSError as error:
            raise explain_os_error(error, "use the run folder", folder.path) from error


def _run(
    workload: Workload,
    options: SweepOptions,
    folder: RunFolder,
    settings: Settings,
    clock: Clock,
    stack: ExitStack,
    show: Show | None,
    argv: Sequence[str],
    say: Callable[[str], None] | None,
) -> Run:
    _check_executor(options.executor)
    folder.create()
    stack.enter_context(run_lock(folder))
    stored = open_plan(workload, options, folder, argv)
    placement, leases = place_and_lease(
        device_request(options),
        discover(settings),
        per_gpu=PerGpuAuto.CAP if options.per_gpu == "auto" else options.per_gpu,
        gpus_per_task=options.gpus_per_task,
        force=options.force,
        run_name=folder.name,
        settings=settings,
    )
    for lease in leases:
        stack.enter_context(lease)
    if say is not None:
        for line in placement_lines(placement, options):
            say(line)
    journal = Journal(folder.events, clock)
    stack.callback(journal.close)
    ledger = open_ledger(folder, stored.run_id, settings)
    stack.callback(ledger.close)
    numbers = _prepare_ledger(ledger, workload, options, folder)
    slots = slots_of(placement)
    targets = {numbers[spec.name]: spec for spec in workload.targets}
    assignment = Assignment(
        folder=folder,
        run_id=stored.run_id,
        targets=targets,
        held_mib=MemorySampler(settings).used_by,
    )
    plan = Plan(
        folder=folder,
        targets=targets,
        slots=slots,
        policy=policy_of(options),
        total=workload.total,
        feed=workload.feed(numbers),
        plan_id=workload.plan_id,
    )
    chores = Chores(folder, options, settings, slots, clock)
    stack.enter_context(chores)
    hooks = Hooks(
        show=show or (lambda view: None), wishes=chores.wishes, chores=chores.do, clock=clock
    )
    journal.write("start", tasks=workload.total, workers=[slot.label for slot in slots])
    coordinator = Coordinator(
        plan, ledger, make_executor(options.executor, assignment), journal, hooks
    )
    ending = coordinator.run()
    journal.write("end", **{state.name.lower(): n for state, n in ending.counts.items()})
    _finish(folder, ending, chores)
    return Run(folder.path, ending=ending)


def _finish(folder: RunFolder, ending: Ending, chores: Chores) -> None:
    chores.finish()
    refresh_export(folder)
    ended = sum(n for state, n in ending.counts.items() if state.is_final)
    if ending.unusable and ended < sum(ending.counts.values()):
        raise SetupError(
            f"No worker is left to run tasks on: {ending.unusable}",
            hint=f"see {folder.logs}; everything finished is saved, run the same command again.",
        )


def choose_folder(workload: Workload, options: SweepOptions) -> RunFolder:
    """``--run-dir``, or ``runs/<name>-<hash of what may not change>``."""
    if options.run_dir is not None:
        return RunFolder(options.run_dir)
    name = name_with_hash(options.name or workload.name, workload.digest)
    return RunFolder(Path("runs") / name)


def prepare(workload: Workload, options: SweepOptions) -> Prepared:
    """The first half of a run: what would be run, where, by whom. Changes nothing on disk."""
    from muster.devices.placement import place

    settings = read_settings()
    folder = choose_folder(workload, options)
    if folder.exists():
        check_same_plan(read_stored(folder), workload, options, has_results=True)
    placement = place(
        device_request(options),
        discover(settings),
        per_gpu=PerGpuAuto.CAP if options.per_gpu == "auto" else options.per_gpu,
        gpus_per_task=options.gpus_per_task,
        cpu_count=settings.cpu_count,
        force=options.force,
    )
    return Prepared(
        workload=workload,
        options=options,
        folder=folder,
        placement=placement,
        is_new=not folder.exists(),
    )


def device_request(options: SweepOptions) -> DeviceRequest:
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
    lines += [f"left alone {item.device}: {item.reason}" for item in placement.skipped]
    lines += list(placement.notes)
    return lines


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


def policy_of(options: SweepOptions) -> Policy:
    retry = RetryPolicy(retries=options.retries, exception_retries=options.retry_exceptions)
    return Policy(retry=retry, timeout_s=options.timeout_s, keep_going=options.keep_going)


def open_plan(
    workload: Workload, options: SweepOptions, folder: RunFolder, argv: Sequence[str]
) -> StoredRun:
    """Write ``run.json`` of a new run, or make sure that the one there means the same."""
    if not folder.exists():
        if folder.ledger.exists():
            raise PlanMismatchError(
                f"{folder.path} holds a ledger but no run.json, so what it belongs to is unknown.",
                hint="choose another --run-dir, or restore run.json from a copy.",
            )
        stored = _new_stored(workload, options, folder, argv)
        write_stored(folder, stored)
        return stored
    stored = read_stored(folder)
    with_results = folder.ledger.exists() and Run(folder.path).counts()[TaskState.DONE] > 0
    check_same_plan(stored, workload, options, has_results=with_results)
    renewed = dataclasses.replace(
        stored, spec=workload.spec, code=dict(workload.code), options=_options_record(options)
    )
    if renewed != stored:
        write_stored(folder, renewed)
    return renewed


def _new_stored(
    workload: Workload, options: SweepOptions, folder: RunFolder, argv: Sequence[str]
) -> StoredRun:
    return StoredRun(
        run_id=uuid.uuid4().hex,
        name=folder.name,
        created_s=time.time(),
        targets=tuple(dataclasses.asdict(spec) for spec in workload.targets),
        spec=workload.spec,
        fixed=workload.fixed,
        code=dict(workload.code),
        options=_options_record(options),
        argv=tuple(argv),
        cwd=str(Path.cwd()),
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """What ran this: enough to set it up again."""
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("muster-gpu", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _options_record(options: SweepOptions) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def _prepare_ledger(
    ledger: Ledger, workload: Workload, options: SweepOptions, folder: RunFolder
) -> dict[str, int]:
    ledger.begin()
    numbers = {spec.name: ledger.target_id(spec.name) for spec in workload.targets}
    for name, digest in workload.code.items():
        ledger.record_code(numbers[name], digest)
    ledger.recover()
    ledger.commit()
    publish_after_crash(folder, ledger.accepted)
    return numbers


def _check_executor(name: str) -> None:
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)


def run_lock(folder: RunFolder) -> Any:
    """Held while a coordinator works on the folder: two would be two writers."""
    from muster.api.lock import hold

    return hold(folder)
