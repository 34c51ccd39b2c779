"""``muster metrics``: the numbers that a run has logged over time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from muster.api.metrics import Summary, only, summary_of, write_points
from muster.api.runs import open_run
from muster.base.flags import Flag
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse

_MOST_ROWS = 60
_HELP = """Show what a run has logged over time: last value and extremes, by task and metric.

Tasks log with ctx.log or muster.log; trainings and agents do so by themselves.

Examples:
  muster metrics runs/train-1a2b3c --name loss
  muster metrics runs/train-1a2b3c --task 3 --to curves.parquet
"""


@dataclass(frozen=True, kw_only=True)
class _Metrics(LookFlags):
    """Which run, and which of its numbers."""

    task: Annotated[str | None, Flag(metavar="KEY|N")] = None
    """Only this task: its number or the start of its key."""

    name: Annotated[str | None, Flag(metavar="NAME")] = None
    """Only the metric of this name."""

    to: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Write all points to a .parquet, .csv or .jsonl file, a row for each."""


def main(argv: list[str]) -> int:
    flags = parse(_Metrics, argv, "metrics", _HELP)
    run = open_run(flags.run)
    found = only(run.series(flags.task), flags.name)
    if flags.to is not None:
        num_rows = write_points(found, flags.to)
        if flags.json:
            output.say_json({"rows": num_rows, "made": [str(flags.to)]})
        else:
            output.say(f"{count(num_rows, 'row')} in {flags.to}")
        return 0
    summaries = [summary_of(series) for series in found]
    if flags.json:
        output.say_json([summary._asdict() for summary in summaries])
    elif not summaries:
        output.say("Nothing was logged. A task logs with ctx.log(step, loss=…) or muster.log.")
    else:
        _show(summaries, str(run.path))
    return 0


def _show(summaries: list[Summary], path: str) -> None:
    has_tasks = any(summary.task for summary in summaries)
    shown = summaries[:_MOST_ROWS]
    headers = ["metric", "points", "last step", "last", "min (step)", "max (step)"]
    rows = [[s.name, f"{s.num_points:,}", f"{s.last_step:,}", f"{s.last:.6g}",
             f"{s.smallest:.6g} ({s.smallest_at:,})", f"{s.largest:.6g} ({s.largest_at:,})"]
            for s in shown]  # fmt: skip
    if has_tasks:
        headers = ["task", *headers]
        rows = [[s.label, *row] for s, row in zip(shown, rows, strict=True)]
    output.table(headers, rows)
    if len(summaries) > len(shown):
        output.remark(
            f"{count(len(summaries) - len(shown), 'row')} more: choose with --task or --name, or "
            f"write all with `muster metrics {path} --to metrics.parquet`"
        )
