"""What a gang shows: the lines of its ranks, remarks, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.api.gangs import GangAudience, GangEnding, GangPlan
from muster.base.errors import EXIT_REQUEUE
from muster.base.shown_text import count
from muster.cli import output
from muster.run.folder import RunFolder
from muster.run.state import has_saved


def gang_audience(
    argv: Sequence[str], *, all_ranks: bool, level: output.ShownLevel
) -> GangAudience:
    """Lines of ranks on standard output, ``[rank] line``; remarks on standard error."""
    output.show_events(are_shown=level == "debug")

    def hear(rank: int, line: str) -> None:
        if all_ranks or rank == 0:
            output.say(f"[{rank}] {line}")

    if level == "nothing":
        return GangAudience(argv=tuple(argv))
    if level == "warning":
        return GangAudience(warn=output.remark, argv=tuple(argv))
    return GangAudience(hear=hear, say=output.remark, warn=output.remark, argv=tuple(argv))


def show_gang_plan(plan: GangPlan, what: str, *, is_json: bool) -> None:
    """What ``--dry-run`` prints."""
    if is_json:
        output.say_json(
            {
                "program": what,
                "run_dir": str(plan.folder.path),
                "ranks": [slot.label for slot in plan.slots],
                "threads_per_rank": plan.threads_per_rank,
                "start": plan.start,
                "nodes": plan.options.num_nodes,
            }
        )
        return
    output.say(f"program  {what}")
    output.say(f"folder   {plan.folder.path}")
    output.say(f"start    {plan.start}")
    for line in plan.lines():
        output.say(f"devices  {line}")
    output.say("Nothing was started (--dry-run).")


def sum_up_gang(
    path: Path, ending: GangEnding, seconds: float, *, is_quiet: bool, is_json: bool
) -> int:
    """Say how it ended; returns the exit code."""
    if is_json:
        output.say_json(_outcome(path, ending, seconds))
        return ending.exit_code
    if ending.report:
        output.complain(ending.report[0])
        for line in ending.report[1:]:
            output.remark(line)
    if not is_quiet:
        output.remark(_last_line(path, ending, seconds))
    return ending.exit_code


def _outcome(path: Path, ending: GangEnding, seconds: float) -> dict[str, Any]:
    values = dataclasses.asdict(ending)
    return {"path": str(path), "seconds": round(seconds, 3), **values}


def _last_line(path: Path, ending: GangEnding, seconds: float) -> str:
    next_step = ""
    if ending.exit_code == 0:
        word = "done"
    elif ending.exit_code == EXIT_REQUEUE and has_saved(RunFolder(path)):
        word, next_step = "saved", "; start it again to go on"
    elif ending.exit_code == EXIT_REQUEUE:
        word = "stopped before its first save (the same command begins again)"
    elif ending.stopped_by:
        word = f"ended by {ending.stopped_by}"
    else:
        word = "failed"
    again = f", with {count(ending.restarts, 'restart')}" if ending.restarts else ""
    return f"{path}: {word} after {seconds:.1f} s{again}{next_step}"
