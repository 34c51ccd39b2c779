"""The classical form of a sweep on SLURM: an array whose elements need no coordinator.

Each element is a sweep of its own, with a part of the tasks, in a run folder of its own below the
run's. It starts from the record of the array (``muster resume RUN --element I``), and ``collect``
brings together what they have done.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from muster.api.launch import Prepared
from muster.api.runs import Run
from muster.api.start.earlier_work import move_aside, put_back
from muster.api.start.options import SweepOptions
from muster.api.sweeps.plans import choose_folder, renewal
from muster.api.sweeps.workload import Workload
from muster.api.trackers.tracker import check_installed
from muster.base.atomic_files import write_atomic
from muster.base.codec import read_as, write_json
from muster.base.errors import SetupError, UsageError
from muster.base.settings import read_settings
from muster.farm.collect import (
    Collected,
    collect_element,
    element_numbers,
    last_words,
)
from muster.farm.ledger.away import open_ledger
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Numbers
from muster.farm.table_writer import refresh_export
from muster.farm.task import NewTask, TaskState
from muster.run.folder import RunFolder
from muster.run.record import RunRecord
from muster.run.session import is_held, open_run
from muster.slurm.commands import RefusedError, elements_of, submit_array
from muster.slurm.request import with_defaults
from muster.slurm.script import array_script
from muster.slurm.states import JobStatus

#: As many as MaxArraySize of slurm.conf allows at most.
_MOST_ELEMENTS = 4_000_001


@dataclass(frozen=True, kw_only=True)
class Array:
    """The record of an array, ``elements/array.json``.

    ``seed_offset``: every element has one seed, which is this plus its number; None: each has a
    part of the tasks. ``share`` says the same for older records, which have no ``seed_offset``.
    ``argv`` was typed in the folder ``cwd`` to send the array.
    """

    elements: int
    share: str | None = None
    job_id: int | None = None
    seed_offset: int | None = None
    argv: tuple[str, ...] = ()
    cwd: str = ""


class ArrayPlan(NamedTuple):
    """``seed_offset``: see `Array`; ``of``: see `gang_script`."""

    folder: RunFolder
    num_elements: int
    seed_offset: int | None
    of: str = ""

    @property
    def share(self) -> str:
        if self.seed_offset is None:
            return f'--part "$SLURM_ARRAY_TASK_ID/{self.num_elements}"'
        return f'--seeds 1 --seed-offset "$(({self.seed_offset} + SLURM_ARRAY_TASK_ID))"'

    @property
    def line(self) -> str:
        """What each element runs, as a line of bash."""
        start = [sys.executable, "-m", "muster", "resume", str(self.folder.path), "--element"]
        of = f" --of-script {self.of}" if self.of else ""
        return f'{shlex.join(start)} "$SLURM_ARRAY_TASK_ID" --quiet{of}'


class ArrayProgress(NamedTuple):
    """``counts``: tasks by state in the elements' own records, collected or not."""

    num_elements: int
    num_begun: int
    num_running: int
    num_queued: int
    counts: dict[TaskState, int]


def part_of(workload: Workload, text: str) -> Workload:
    """Every N-th task from the I-th on, for ``--part I/N``; UsageError for any other text."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(f"--part {text} is not a part.", hint="write I/N, such as 0/8 or 7/8.")
    first, step = int(index), int(count)

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        return itertools.islice(workload.feed(numbers), first, None, step)

    return dataclasses.replace(
        workload,
        feed=feed,
        total=math.ceil(max(0, workload.total - first) / step),
        spec={**workload.spec, "part": text},
        fixed={**workload.fixed, "part": text},
        space=None,  # more of them would be cut into other parts
    )


def plan_array(
    workload: Workload, options: SweepOptions, count: int, seed_offset: int | None
) -> ArrayPlan:
    """What would be sent. ``seed_offset``: see `Array`.

    Raises UsageError for a ``count`` below 1, and where the run was begun with other parts.
    """
    if count < 1:
        raise UsageError(f"--array {count} is too small.", hint="write 1 or more.")
    check_installed(options.log_to)
    folder = RunFolder(choose_folder(workload, options).path.absolute())
    plan = ArrayPlan(folder, count, seed_offset)
    if not options.restart:
        _check_share(plan)
    return plan


def _check_share(plan: ArrayPlan) -> None:
    """Raise UsageError where the elements that are there have other parts than these would."""
    record = read_array(plan.folder)
    if record is None:
        return
    count = record.elements
    known = count == plan.num_elements if record.share is None else record.share == plan.share
    if not known:
        raise UsageError(
            f"{plan.folder.path} was begun as an array of {count} "
            f"element{'s' if count > 1 else ''}: with --array {plan.num_elements} each would have "
            "another part of the tasks.",
            hint=f"repeat it with --array {count} and the seeds it had, or choose another "
            "--run-dir.",
        )


def read_array(folder: RunFolder) -> Array | None:
    """The record; None for a run without elements."""
    if not folder.elements_json.exists():
        return None
    record = read_as(Array, folder.elements_json, "record of the array")
    if not 0 < record.elements <= _MOST_ELEMENTS:
        raise SetupError(
            f"The record of the array at {folder.elements_json} is damaged: it is of "
            f"{record.elements:,} elements, where SLURM has at most {_MOST_ELEMENTS:,}.",
            hint="restore it from a copy.",
        )
    return record


def _write_record(plan: ArrayPlan, argv: Sequence[str], job_id: int | None) -> None:
    record = Array(
        elements=plan.num_elements, share=plan.share, job_id=job_id, seed_offset=plan.seed_offset,
        argv=tuple(argv), cwd=str(Path.cwd()),
    )  # fmt: skip
    write_json(plan.folder.elements_json, record)


def script_of(plan: ArrayPlan, options: SweepOptions) -> str:
    """The text for sbatch; nothing is written or sent."""
    request = with_defaults(options.cluster.on_slurm(), read_settings())
    return array_script(request, plan.folder, range(plan.num_elements), plan.line)


def sweep_script(prepared: Prepared) -> str:
    """The script of a sweep's workers, exactly as sbatch would get it when the run begins."""
    asked = prepared.options.cluster
    slots = range(max(1, min(asked.num_workers, prepared.workload.total)))
    return array_script(with_defaults(asked.on_slurm(), read_settings()), prepared.folder, slots)


def send(plan: ArrayPlan, workload: Workload, options: SweepOptions, argv: Sequence[str]) -> int:
    """List all tasks in the run's ledger, and send the array; returns its id.

    If SLURM refuses it, the records stay as they were. Raises SetupError then, and where SLURM does
    not answer; PlanMismatchError for a run of another plan.
    """
    folder, text = plan.folder, script_of(plan, options)
    records = (folder.run_json, folder.elements_json)
    before = {path: path.read_bytes() if path.exists() else None for path in records}
    listed = None if options.restart or not folder.ledger.exists() else _listed(folder)
    aside = make_ready(plan, workload, options, argv)
    try:
        job_id = submit_array(text, folder)
    except RefusedError:
        if aside is not None:
            put_back(aside, folder)
        else:
            _take_back(folder, before, listed)
        raise
    _write_record(plan, argv, job_id)
    return job_id


def _listed(folder: RunFolder) -> tuple[int, str | None]:
    """The last task of the ledger, and of which plan all tasks are listed."""
    with _ledger_of(folder) as ledger:
        return ledger.last_task(), ledger.meta("enqueued")


@contextmanager
def _ledger_of(folder: RunFolder) -> Iterator[Ledger]:
    ledger = open_ledger(folder, read_settings())
    try:
        yield ledger
    finally:
        ledger.close()


def _take_back(
    folder: RunFolder,
    before: Mapping[Path, bytes | None],
    listed: tuple[int, str | None] | None,
) -> None:
    """Make the records and the list of tasks what they were; if there was no run, its ledger is
    removed.
    """
    for path, content in before.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, content)
    if before[folder.run_json] is None:
        for path in folder.path.glob(f"{folder.ledger.name}*"):
            path.unlink(missing_ok=True)
    elif listed is not None:
        last, plan_id = listed
        with _ledger_of(folder) as ledger:
            ledger.begin()
            ledger.drop_tasks_after(last)
            if plan_id is None:
                ledger.drop_meta("enqueued")
            else:
                ledger.set_meta("enqueued", plan_id)
            ledger.commit()


def make_ready(
    plan: ArrayPlan, workload: Workload, options: SweepOptions, argv: Sequence[str]
) -> Path | None:
    """List all tasks in the run's ledger, so that ``collect`` knows what belongs to the run.

    Returns where ``--restart`` keeps the run before it; None where there was none.
    """
    folder = plan.folder
    aside = move_aside(folder, "sweep") if options.restart else None
    if plan.seed_offset is None and folder.elements_json.exists():
        workload = dataclasses.replace(workload, space=None)

    def renew(before: RunRecord | None) -> RunRecord:
        _check_share(plan)  # under the lock: another may have sent an array just now
        return renewal(workload, options, folder, argv)(before)

    with open_run(folder, renew):
        with _ledger_of(folder) as ledger:
            ledger.begin()
            numbers = {spec.name: ledger.target_id(spec.name) for spec in workload.targets}
            ledger.add_tasks(workload.feed(numbers))
            ledger.set_meta("enqueued", workload.plan_id)
            ledger.commit()
        folder.elements.mkdir(exist_ok=True)
        folder.job_files.mkdir(parents=True, exist_ok=True)
        _write_record(plan, argv, None)
    return aside


def collect(path: Path) -> tuple[Run, Collected]:
    """Merge what the elements of a run have done into the run; repeat it as often as you like.

    Raises UsageError where the run has no elements.
    """
    folder = RunFolder(path)
    record = read_array(folder)
    if record is None:
        raise UsageError(
            f"{path} was not made with --array: there is nothing to collect.",
            hint="its results are in its own table: muster status, muster export.",
        )
    numbers = element_numbers(folder, record.elements)
    run, counts = Run(path), Collected()
    alive = {number for number, item in _found(folder) if item.is_alive}
    with open_run(folder), _ledger_of(folder) as ledger:
        for number in numbers:
            has_ended = collect_element(folder, ledger, number, counts)
            if number in alive or is_held(folder.element(number)):
                continue
            # One that did all it knew of may have been refused more: it says so itself.
            words = last_words(folder, number, only_ours=has_ended)
            if words is not None:
                counts.ended[number] = words
    refresh_export(folder)
    return run, counts


def _found(folder: RunFolder) -> list[tuple[int, JobStatus]]:
    """The elements that SLURM knows; none where it cannot be asked, as on a machine without it."""
    with suppress(SetupError):
        return [(number, item) for (_, number), item in elements_of(folder.array_name).items()]
    return []


def array_progress(folder: RunFolder, *, asks_slurm: bool) -> ArrayProgress | None:
    """How far the elements are; None for a run without elements.

    Without SLURM's answer, those at work are known by their locks, and none is known to be queued.
    """
    record = read_array(folder)
    if record is None:
        return None
    elements = {n: folder.element(n) for n in element_numbers(folder, record.elements)}
    begun = {n: element for n, element in elements.items() if element.ledger.exists()}
    counts = dict.fromkeys(TaskState, 0)
    for element in begun.values():
        for state, number in Run(element.path).counts().items():
            counts[state] += number
    if not counts[TaskState.STOPPED]:  # only a search has some, so zero is not shown
        del counts[TaskState.STOPPED]
    found = _found(folder) if asks_slurm else []
    # SLURM runs an element some seconds before that has a ledger: it has begun all the same.
    running = {n for n, element in begun.items() if is_held(element)}
    running |= {n for n, item in found if item.is_alive and not item.waits}
    num_queued = sum(item.waits for _, item in found)
    return ArrayProgress(
        len(elements), len(begun.keys() | running), len(running), num_queued, counts
    )
