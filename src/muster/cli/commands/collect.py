"""``muster collect``: bring the results of an array's elements together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.api.array import collect
from muster.api.runs import open_run
from muster.base.errors import EXIT_SOME_FAILED
from muster.cli import output
from muster.cli.flags import Positional, Switch
from muster.cli.parse import bundle, parse

_HELP = """Merge what the elements of `muster sweep … --on slurm --array N` have done.

Call it while they run, and again when they have ended: what is there stays, what is new is added.

Example: muster collect runs/train-1a2b3c
"""
_MAX_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class _CollectFlags:
    """What is printed."""

    json: Switch = False
    """Print the outcome as JSON and nothing else."""


def main(argv: list[str]) -> int:
    flags: Any = parse(
        bundle("Collect", {"out": _CollectFlags}, {"run": Positional}), argv, "collect", _HELP
    )
    run, found = collect(open_run(flags.run).path)
    counts = run.status().counts
    is_whole = not found.missing and not counts["waiting"]
    exit_code = run.exit_code if is_whole else EXIT_SOME_FAILED
    if flags.out.json:
        output.say_json(
            {
                "counts": dict(counts),
                "new": found.num_new,
                "known": found.num_known,
                "missing_elements": found.missing,
                "results": str(run.folder.results_parquet),
                "exit_code": exit_code,
            }
        )
        return exit_code
    output.say(
        f"{run.folder.name}: {found.num_new:,} new results; {counts['done']:,} done, "
        f"{counts['failed']:,} failed, {counts['waiting']:,} not there yet"
    )
    if found.missing:
        named = ", ".join(map(str, found.missing[:_MAX_NAMED]))
        more = ", …" if len(found.missing) > _MAX_NAMED else ""
        output.say(f"{len(found.missing)} elements have not begun: {named}{more}")
    output.say(f"table: {run.folder.results_csv}")
    return exit_code
