"""``muster metrics`` shows what a run has logged over time; ``muster track`` sends it away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from muster.api.metrics import Summary, only, summary_of, write_points
from muster.api.runs import open_run
from muster.api.trackers.guard import track
from muster.api.trackers.tracker import read_trackers
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import RunPlace, parse

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


_TRACK_HELP = """Send a run's settings, metrics and results to trackers.

They get what they have not got: all of a run that was made without --log-to, or what was left when
a tracker was away. Nothing is sent twice.

Examples:
  muster track runs/train-1a2b3c --log-to wandb
  muster track train-1a2b3c --log-to mlflow,tensorboard
"""


@dataclass(frozen=True, kw_only=True)
class _Track(RunPlace):
    """Where it is sent."""

    log_to: Annotated[
        tuple[str, ...], Flag(metavar="wandb,mlflow,trackio,tensorboard", read=read_trackers)
    ] = ()
    """The trackers, with commas. Their own variables, such as WANDB_MODE or MLFLOW_TRACKING_URI,
    say where they are."""


def track_run(argv: list[str]) -> int:
    flags = parse(_Track, argv, "track", _TRACK_HELP)
    if not flags.log_to:
        raise UsageError("--log-to is missing.", hint="write --log-to wandb, mlflow, …")
    run = open_run(flags.run)
    left = track(run.folder, flags.log_to, output.complain)
    for name in flags.log_to:
        if name not in left:
            output.say(f"{name} has all of {run.folder.name}")
    return 1 if left else 0
