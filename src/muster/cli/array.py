"""``muster sweep … --on slurm --array N``: one array, no coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.api.array import array_script, plan_array, submit_array
from muster.api.options import SweepOptions
from muster.api.workload import Workload
from muster.base.errors import EXIT_OK, UsageError
from muster.cli import output
from muster.cli.repeating import without

#: Of the array and not of its elements.
_OF_THE_ARRAY = {
    "on", "workers", "gpus_per_worker", "cpus_per_worker", "mem", "time", "partition", "account",
    "slurm_arg", "warn_before", "array", "run_dir", "name", "quiet", "json", "dry_run",
}  # fmt: skip


def send_array(
    workload: Workload,
    options: SweepOptions,
    flags: Any,
    words: Sequence[str],
    command: Sequence[str],
    argv: Sequence[str],
) -> int:
    """Show the script, or send it and say how to go on."""
    if options.executor != "slurm":
        raise UsageError("--array has no effect without --on slurm.", hint="add --on slurm.")
    if flags.portion.part is not None:
        raise UsageError("--array and --part contradict each other.", hint="give one of them.")
    if options.cluster.num_workers != 1:
        raise UsageError("--array and --workers contradict each other.", hint="give one of them.")
    count = flags.portion.array
    space = getattr(flags, "space", None)
    seed_offset: int | None = None
    dropped = set(_OF_THE_ARRAY)
    if space is not None and space.seeds == str(count):
        seed_offset = space.seed_offset
        dropped |= {"seeds", "seed_offset"}
    plan = plan_array(
        workload,
        options,
        count,
        without(words, dropped),
        command and ["--", *command],
        seed_offset,
    )
    if flags.run.dry_run:
        output.say(array_script(plan, options).rstrip())
        output.say("Nothing was sent (--dry-run).")
        return EXIT_OK
    job_id = submit_array(plan, workload, options, ["muster", "sweep", *argv])
    path = plan.folder.path
    if flags.run.json:
        output.say_json({"job_id": job_id, "path": str(path), "elements": count})
    elif not flags.run.quiet:
        output.say(f"job {job_id}: {count} elements, {workload.total:,} tasks, in {path}")
        output.say(f"Bring the results together: muster collect {path}")
    return EXIT_OK
