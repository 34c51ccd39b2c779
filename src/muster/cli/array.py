"""``muster sweep … --on slurm --array N``: one array, no coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from muster.api.array import ArrayPlan, make_ready, plan_array, script_of, send
from muster.api.options import SweepOptions
from muster.api.workload import Workload
from muster.base.errors import EXIT_OK, UsageError
from muster.cli import output
from muster.cli.flags import ONE_TIME
from muster.cli.parse import Parsed
from muster.farm.executors.cluster import ClusterRequest

#: Of the array and not of its elements.
_OF_THE_ARRAY = {
    *(field.name for field in fields(ClusterRequest)), *ONE_TIME,
    "executor", "array", "run_dir", "name",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmArray:
    """What would be sent."""

    plan: ArrayPlan
    workload: Workload
    options: SweepOptions
    argv: Sequence[str]

    def script(self) -> str:
        return script_of(self.plan, self.options)

    def make_ready(self) -> Path:
        """Make the run folder for a script that is sent by hand; where its output goes."""
        make_ready(self.plan, self.workload, self.options, ["muster", "sweep", *self.argv])
        return self.plan.folder.job_files


def array_of(
    workload: Workload, options: SweepOptions, parsed: Parsed, argv: Sequence[str]
) -> SlurmArray:
    """The array that these flags mean; UsageError where they contradict each other."""
    if options.executor != "slurm":
        raise UsageError("--array has no effect without --on slurm.", hint="add --on slurm.")
    if parsed.sharing.part is not None:
        raise UsageError("--array and --part contradict each other.", hint="give one of them.")
    if options.cluster.num_workers != 1:
        raise UsageError("--array and --workers contradict each other.", hint="give one of them.")
    count = parsed.sharing.array
    space = getattr(parsed, "space", None)
    seed_offset: int | None = None
    dropped = set(_OF_THE_ARRAY)
    if space is not None and space.seeds == str(count):
        seed_offset = space.seed_offset
        dropped |= {"seeds", "seed_offset"}
    words = [*([parsed.target] if parsed.target else []), *parsed.words(without=dropped)]
    command = ["--", *parsed.program] if parsed.program else []
    plan = plan_array(workload, options, count, words, command, seed_offset)
    return SlurmArray(plan=plan, workload=workload, options=options, argv=argv)


def send_array(array: SlurmArray, run: Any) -> int:
    """Show the script, or send it and say how to go on."""
    if run.dry_run:
        output.say(array.script().rstrip())
        output.say("Nothing was sent (--dry-run).")
        return EXIT_OK
    plan, workload = array.plan, array.workload
    job_id = send(plan, workload, array.options, ["muster", "sweep", *array.argv])
    path, count = plan.folder.path, plan.num_elements
    if run.json:
        output.say_json({"job_id": job_id, "path": str(path), "elements": count})
    elif not run.quiet:
        output.say(f"job {job_id}: {count} elements, {workload.total:,} tasks, in {path}")
        output.say(f"Bring the results together: muster collect {path}")
    return EXIT_OK
