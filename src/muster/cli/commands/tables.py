"""``muster collect`` brings the results of an array together, ``muster export`` writes a table, and
``muster best`` shows the best trials of a search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from muster.api.array import collect
from muster.api.ranks import export_metrics
from muster.api.runs import Run, open_run
from muster.api.search_state import again, export_study, read_search
from muster.base.errors import EXIT_SOME_FAILED, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count
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
    run, found = collect(open_run(flags.run).path)
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
    run = open_run(flags.run)
    stored = run.stored
    if flags.to.suffix.lower() == ".db":
        output.say(f"{count(export_study(run.folder, flags.to), 'trial')} in {flags.to}")
        return 0
    if stored.is_map:
        raise UsageError(
            f"{run.path} is a map: its table is its output. {_output_of_map(run)}",
            hint=f"see how it stands: muster status {run.path}",
        )
    if stored.is_gang:
        num_rows = export_metrics(run.folder, stored, flags.to)
    else:
        num_rows = run.export(flags.to)
    output.say(f"{count(num_rows, 'row')} in {flags.to}")
    return 0


def _output_of_map(run: Run) -> str:
    try:
        place = json.loads(run.folder.published_json.read_bytes())["output"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return "It is not written yet."
    return f"It is at {place}."


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
    run = open_run(flags.run)
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
