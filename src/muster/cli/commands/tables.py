"""``muster collect`` brings the results of an array together, ``export`` writes a table, ``best``
shows the best trials of a search, ``metrics`` what a run has logged over time, and ``track`` sends
it away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from muster.api.look.listing import find_run
from muster.api.look.ranks import export_metrics
from muster.api.runs import Run
from muster.api.slurm.array import collect
from muster.api.sweeps.search_state import again, export_study, read_search
from muster.api.trackers.guard import track
from muster.api.trackers.metrics import Summary, only, summary_of, write_points
from muster.api.trackers.tracker import read_trackers
from muster.base.codec import read_object
from muster.base.errors import EXIT_SOME_FAILED, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count, shell_word
from muster.cli import output
from muster.cli.flags import JsonFlags, LookFlags
from muster.cli.parse import RunPlace, parse
from muster.cli.search_wording import goal_of, schedule_lines, setting_text, value_lines
from muster.farm.collect import LastWords

_COLLECT = """Merge what the elements of `muster sweep … --on slurm --array N` have done.

Call it while they run, and again when they have ended: what is there stays, what is new is added.

Example:
  muster collect runs/train-1a2b3c
"""
_EXPORT = """Write the table of a run to a file: a row per task, or per recorded step of a training.

Examples:
  muster export runs/train-1a2b3c --to table.parquet
  muster export runs/search --to optuna.db && optuna-dashboard sqlite:///optuna.db
"""
_MAX_NAMED, _MAX_REASONS = 20, 5


@dataclass(frozen=True, kw_only=True)
class _Export(RunPlace):
    """Which run, and where its table goes."""

    to: Annotated[Path, Flag(metavar="FILE")]
    """A .csv, .parquet or .jsonl file; of a search also a .db file, an Optuna study."""


def collect_array(argv: list[str]) -> int:
    flags = parse(LookFlags, argv, "collect", _COLLECT)
    run = find_run(flags.run)
    _ = run.stored  # which says so where it may not be read
    run, found = collect(run.path)
    counts = run.status().counts
    # What an element said does not matter once all results are there.
    ended = found.ended if counts["waiting"] else {}
    is_whole = not found.missing and not counts["waiting"]
    exit_code = run.exit_code if is_whole else EXIT_SOME_FAILED
    if flags.json:
        output.say_json(
            {
                "counts": dict(counts),
                "new": found.num_new,
                "known": found.num_known,
                "missing_elements": found.missing,
                "ended_elements": {number: words.text for number, words in ended.items()},
                "results": str(run.folder.results_parquet),
                "exit_code": exit_code,
            }
        )
        return exit_code
    output.say(
        f"{run.folder.name}: {count(found.num_new, 'new result')}; "
        f"{counts['done']:,} done, "
        f"{counts['failed']:,} failed, {counts['waiting']:,} not there yet"
    )
    missing = [number for number in found.missing if number not in ended]
    if missing:
        named = _named(missing)
        output.say(f"{count(len(missing), 'element has', 'elements have')} not begun: {named}")
    for line in _ending_lines(ended):
        output.say(line)
    output.say(f"table: {run.folder.results_csv}")
    return exit_code


def _named(numbers: Sequence[int]) -> str:
    more = ", …" if len(numbers) > _MAX_NAMED else ""
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + more


def _ending_lines(ended: Mapping[int, LastWords]) -> list[str]:
    """A line for each reason, with the elements that gave it and the output of one of them."""
    by_reason: dict[str, list[int]] = {}
    for number, words in ended.items():
        # Which element it was in is no other reason.
        reason = words.text.replace(f"/elements/{number}", "/elements/N")
        by_reason.setdefault(reason, []).append(number)
    lines = []
    for reason, numbers in list(by_reason.items())[:_MAX_REASONS]:
        who = f"{len(numbers)} elements ({_named(numbers)})"
        who = who if len(numbers) > 1 else f"element {numbers[0]}"
        lines.append(f"{who} ended with: {reason} (all of it: {ended[numbers[0]].path})")
    return lines


def export(argv: list[str]) -> int:
    flags = parse(_Export, argv, "export", _EXPORT)
    run = find_run(flags.run)
    stored = run.stored
    if flags.to.suffix.lower() == ".db":
        output.say(f"{count(export_study(run.folder, flags.to), 'trial')} in {flags.to}")
        return 0
    if stored.is_map:
        raise UsageError(
            f"{run.path} is a map: its table is its output. {_output_of_map(run)}",
            hint=f"see how it stands: muster status {shell_word(run.path)}",
        )
    if stored.is_gang:
        num_rows = export_metrics(run.folder, stored, flags.to)
    else:
        num_rows = run.export(flags.to)
    output.say(f"{count(num_rows, 'row')} in {flags.to}")
    return 0


def _output_of_map(run: Run) -> str:
    place = read_object(run.folder.published_json).get("output")
    return "It is not written yet." if place is None else f"It is at {place}."


_HELP = """Show the best trials of a search, also while it runs.

Examples:
  muster best runs/run-1a2b3c
  muster best runs/run-1a2b3c -n 5
"""


@dataclass(frozen=True, kw_only=True)
class _Best(RunPlace, JsonFlags):
    """Which run, and how many of its trials."""

    number: Annotated[int | None, Flag(aliases=("n",), metavar="N")] = None
    """How many trials are shown, the best first. Without it one, or with several objectives all
    that no other beats."""


def best(argv: list[str]) -> int:
    words = ["--number" if word == "-n" else word for word in argv]
    flags = parse(_Best, words, "best", _HELP)
    if flags.number is not None and flags.number < 1:
        raise UsageError(f"--number {flags.number} is too small.", hint="write 1 or more.")
    run = find_run(flags.run)
    state = None if run.stored.is_gang else read_search(run.folder)
    if state is None:
        raise UsageError(
            f"{run.path} is not a search, so it has no best trial.",
            hint="a search is begun with `muster sweep … --space … --maximize METRIC`.",
        )
    spec = state.spec
    found = state.unbeaten() if flags.number is None else state.search.best(flags.number)
    target = run.stored.targets[0]
    if flags.json:
        names = [goal.name for goal in spec.objectives]
        output.say_json([
            {
                "trial": one.trial, "params": dict(one.params), "state": one.state,
                "values": dict(zip(names, one.values, strict=True)),
                "spread": dict(zip(names, one.spread, strict=True)),
                "seeds": one.seeds, "step": one.step,
                "command": None if schedule else again(target, spec, one.params),
                "schedule": [
                    {"trial": part.number, "until": until, "params": dict(part.params)}
                    for until, part in schedule or ()
                ],
            }
            for one in found
            for schedule in [state.schedule(one.trial)]
        ])  # fmt: skip
        return 0
    if not found:
        output.say(f"{run.folder.name}: no trial has a value yet ({goal_of(spec)})")
    for place, one in enumerate(found, 1):
        values = ", ".join(value_lines(spec, one))
        state_word = "" if one.state == "done" else f"  ({one.state}, at step {one.step or 0:g})"
        output.say(f"{place}. trial {one.trial}: {values}{state_word}")
        if schedule := state.schedule(one.trial):
            output.say("   its settings changed on the way, so no one command runs it again:")
            for line in schedule_lines(schedule):
                output.say(f"     {line}")
            continue
        output.say(f"   {setting_text(one.params)}")
        output.say(f"   again: {again(target, spec, one.params)}")
    return 0


_MOST_ROWS = 60
_METRICS = """Show what a run has logged over time: last value and extremes, by task and metric.

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


def metrics(argv: list[str]) -> int:
    flags = parse(_Metrics, argv, "metrics", _METRICS)
    run = find_run(flags.run)
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
            f"write all with `muster metrics {shell_word(path)} --to metrics.parquet`"
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
    run = find_run(flags.run)
    left = track(run.folder, flags.log_to, output.complain)
    for name in flags.log_to:
        if name not in left:
            output.say(f"{name} has all of {run.folder.name}")
    return 1 if left else 0
