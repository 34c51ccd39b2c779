"""The classical form of a sweep on SLURM: an array whose elements need no coordinator.

Each element is a ``muster sweep`` of its own, with a part of the tasks, in a run folder of its own
below the run's; ``collect`` brings them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from muster.api.ledgers import open_ledger
from muster.api.lock import hold
from muster.api.options import SweepOptions
from muster.api.plans import choose_folder, open_plan
from muster.api.runs import Run, refresh_export
from muster.api.workload import Numbers, Workload
from muster.base.errors import UsageError
from muster.base.records import read_json, write_json
from muster.base.run_folder import RunFolder
from muster.base.settings import read_settings
from muster.farm.collect import Collected, collect_element
from muster.farm.executors.slurm import script, submit
from muster.farm.ledger.store import NewTask

_ELEMENT = "$SLURM_ARRAY_TASK_ID"


class ArrayPlan(NamedTuple):
    """``line``: what every element runs, as a line of bash."""

    folder: RunFolder
    num_elements: int
    line: str


def part_of(workload: Workload, text: str) -> Workload:
    """Every N-th task from the I-th on, for ``--part I/N``; UsageError for what is no part."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(f"--part {text} is no part.", hint="write I/N, such as 0/8 … 7/8.")
    first, step = int(index), int(count)

    def feed(numbers: Numbers) -> Iterator[NewTask]:
        return itertools.islice(workload.feed(numbers), first, None, step)

    return dataclasses.replace(
        workload,
        feed=feed,
        total=math.ceil(max(0, workload.total - first) / step),
        spec={**workload.spec, "part": text},
        fixed={**workload.fixed, "part": text},
    )


def plan_array(
    workload: Workload, options: SweepOptions, count: int, words: Sequence[str],
    command: Sequence[str], seed_offset: int | None,
) -> ArrayPlan:  # fmt: skip
    """What would be sent.

    ``words``: the sweep's own flags and target, without those of the array; ``command``: what
    follows ``--``. ``seed_offset``: one seed for each element from here on; None: a part of the
    tasks for each.
    """
    if count < 1:
        raise UsageError(f"--array {count} is too small.", hint="write 1 or more.")
    folder = RunFolder(choose_folder(workload, options).path.absolute())
    if seed_offset is None:
        share = f'--part "{_ELEMENT}/{count}"'
    else:
        share = f'--seeds 1 --seed-offset "$(({seed_offset} + SLURM_ARRAY_TASK_ID))"'
    place = f'--run-dir {shlex.quote(str(folder.elements))}/"{_ELEMENT}"'
    start = shlex.join([sys.executable, "-m", "muster", "sweep", *words, "--quiet"])
    line = " ".join([start, share, place, *([shlex.join(command)] if command else [])])
    return ArrayPlan(folder, count, line)


def array_script(plan: ArrayPlan, options: SweepOptions) -> str:
    """The text for sbatch; nothing is written or sent."""
    return script(options.cluster, plan.folder, range(plan.num_elements), plan.line)


def submit_array(
    plan: ArrayPlan, workload: Workload, options: SweepOptions, argv: Sequence[str]
) -> int:
    """List all tasks in the run's ledger, and send the array; its id."""
    make_ready(plan, workload, options, argv)
    job_id = submit(options.cluster, plan.folder, range(plan.num_elements), plan.line)
    write_json(plan.folder.elements_json, {"elements": plan.num_elements, "job_id": job_id})
    return job_id


def make_ready(
    plan: ArrayPlan, workload: Workload, options: SweepOptions, argv: Sequence[str]
) -> None:
    """List all tasks in the run's ledger, so that ``collect`` knows what belongs to the run."""
    folder = plan.folder
    folder.create()
    with hold(folder):
        stored = open_plan(workload, options, folder, argv)
        ledger = open_ledger(folder, stored.run_id, read_settings())
        try:
            ledger.begin()
            numbers = {spec.name: ledger.target_id(spec.name) for spec in workload.targets}
            ledger.add_tasks(workload.feed(numbers))
            ledger.set_meta("enqueued", workload.plan_id)
            ledger.commit()
        finally:
            ledger.close()
        folder.elements.mkdir(exist_ok=True)
        folder.job_files.mkdir(parents=True, exist_ok=True)
        write_json(folder.elements_json, {"elements": plan.num_elements, "job_id": None})


def collect(path: Path) -> tuple[Run, Collected]:
    """Merge what the elements of a run have done into the run; repeat it as often as you like.

    Raises UsageError where the run has no elements.
    """
    folder = RunFolder(path)
    if not folder.elements_json.exists():
        raise UsageError(
            f"{path} was not made with --array: there is nothing to collect.",
            hint="its results are in its own table: muster status, muster export.",
        )
    count = int(read_json(folder.elements_json, "record of the array")["elements"])
    run, counts = Run(path), Collected()
    with hold(folder):
        ledger = open_ledger(folder, run.stored.run_id, read_settings())
        try:
            for number in range(count):
                collect_element(folder, ledger, number, counts)
        finally:
            ledger.close()
    refresh_export(folder)
    return run, counts
