"""``muster map``: parse, show, run, sum up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.base.clock import human_duration
from muster.base.flags import wants_help
from muster.base.late_modules import imported_to_stay
from muster.base.shown_text import count, shell_word
from muster.cli import output
from muster.cli.map_flags import MapCommand, flags_of_map, read_map
from muster.cli.parse import Parsed
from muster.cli.recipes import vet_new

if TYPE_CHECKING:
    from muster.api.map import MapPreview
    from muster.api.maps.job import Mapped

_HELP = """Put every record of a data set through model stages, exactly once, on every device.

PIPELINE is a recipe ({recipes}) or file.py:name, where the name is a function of one record,
a class with process(batch), or a list of these; the fields of a class that is a dataclass are
flags as well. The same command again goes on where it stopped, to the row.

Examples:
  muster map clean.py:normalise --input raw.jsonl --output clean.jsonl
  muster map caption.py:Caption --input 'shards/*.parquet' --output captions.parquet --gpus 4
  muster map embed --model sentence-transformers/all-MiniLM-L6-v2 --input texts.csv \\
      --output vectors.parquet
  muster map reasoning --dataset gsm8k --model Qwen/Qwen2.5-1.5B-Instruct --output solved.jsonl
"""


def main(argv: list[str]) -> int:
    if not wants_help(argv):  # which needs a third less
        imported_to_stay("muster.api.map")
    return start(flags_of_map(argv, _HELP), ("muster", "map", *argv))


def start(flags: Parsed, typed: Sequence[str]) -> int:
    """Do what the flags say. ``typed``: the command line that goes into the record."""
    from muster.api.launch import Audience
    from muster.api.map import preview, run_map
    from muster.api.maps.job import folder_of

    parsed = read_map(flags)
    if parsed.job is None:
        return _inform(parsed)
    vet_new(parsed.config, folder_of(parsed.job, parsed.options), parsed.options)
    if parsed.shown.dry_run:
        _show_plan(parsed, preview(parsed.job, parsed.options))
        return 0
    run, job = parsed.shown, parsed.job
    if parsed.recipe is not None:
        from muster.api.maps.publish import finished_lines
        from muster.api.sweeps.housekeeping import rehearse_map

        is_jsonl = job.output.format == "jsonl"
        call = partial(rehearse_map, parsed.recipe, parsed.config, is_jsonl)
        job = dataclasses.replace(job, rehearse=lambda folder: call(finished_lines(folder)))
    output.show_events(are_shown=run.log_level == "debug")
    with output.make_screen(run.level) as screen:
        if parsed.recipe is not None:
            for line in parsed.recipe.remarks(parsed.config):
                screen.line(line)
        audience = Audience(show=screen.show, say=screen.line, warn=screen.warn, argv=tuple(typed))
        mapped = run_map(job, parsed.options, audience)
    summary, made = _report(parsed, mapped)
    if run.json:
        output.say_json(_outcome(mapped, summary, made))
    elif not run.quiet:
        _sum_up(parsed, mapped, summary, made)
    return mapped.exit_code


def _inform(parsed: MapCommand) -> int:
    assert parsed.recipe is not None
    rows = parsed.recipe.inform(parsed.config) or []
    if parsed.shown.json:
        output.say_json(rows)
        return 0
    if len(rows) == 1:
        for name, value in rows[0].items():
            output.say(f"{name:<14} {value}")
        return 0
    names = list(dict.fromkeys(name for row in rows for name in row))
    output.table(names, [[str(row.get(name, "")) for name in names] for row in rows])
    return 0


def _show_plan(parsed: MapCommand, plan: MapPreview) -> None:
    from muster.api.start.placing import placement_lines

    job, prepared = parsed.job, plan.prepared
    assert job is not None
    stages = [stage.name for stage in job.stages]
    if parsed.shown.json:
        output.say_json(
            {
                "stages": stages,
                "records": plan.num_rows,
                "chunks": prepared.workload.total,
                "columns": list(plan.columns),
                "output": str(job.output.path),
                "run_dir": str(plan.folder.path),
                "is_new": prepared.is_new,
                "workers": [slot.label for slot in prepared.placement.slots],
            }
        )
        return
    output.say(f"stages   {' -> '.join(stages)}")
    num_chunks = prepared.workload.total
    chunks = count(num_chunks, "chunk")
    output.say(f"records  {plan.num_rows:,} in {chunks}")
    if plan.left_out:
        output.say(f"left out {plan.left_out}")
    if plan.columns:
        output.say(f"columns  {', '.join(plan.columns)}")
    output.say(f"output   {job.output.path}")
    output.say(f"folder   {plan.folder.path} ({'new' if prepared.is_new else 'continued'})")
    for line in placement_lines(prepared.placement, parsed.options):
        output.say(f"devices  {line}")
    output.say("Nothing was started (--dry-run).")


def _report(parsed: MapCommand, mapped: Mapped) -> tuple[Mapping[str, Any], list[str]]:
    """A recipe's own numbers and figures, from the output that is written."""
    recipe = parsed.recipe
    if recipe is None or mapped.output is None:
        return {}, []
    from muster.api.report.map import MapMaker, recipe_of_output
    from muster.run.folder import RunFolder

    assert parsed.job is not None
    maker = MapMaker(recipe, parsed.config, parsed.job.output)
    summary, made = recipe_of_output(maker, RunFolder(mapped.path), output.complain)
    return summary, [*map(str, made)]


def _outcome(mapped: Mapped, summary: Mapping[str, Any], made: list[str]) -> dict[str, Any]:
    return {
        "path": str(mapped.path),
        "output": None if mapped.output is None else str(mapped.output),
        "errors": None if mapped.errors is None else str(mapped.errors),
        "records_in": mapped.num_in,
        "records_begun": mapped.num_begun,
        "records_out": mapped.num_out,
        "rejected": mapped.num_rejected,
        "dropped": mapped.num_dropped,
        "blank_lines": mapped.num_blank,
        "lost": mapped.num_lost,
        "causes": list(mapped.causes),
        "cost": mapped.cost,
        "total": mapped.num_total,
        "seconds": round(mapped.seconds, 3),
        "was_done": mapped.was_done,
        "numbers": dict(mapped.numbers),
        "summary": dict(summary),
        "made": made,
        "exit_code": mapped.exit_code,
    }


def _sum_up(
    parsed: MapCommand, mapped: Mapped, summary: Mapping[str, Any], made: list[str]
) -> None:
    if mapped.was_done:
        output.say(f"{mapped.output}: complete since an earlier run, nothing to do.")
    parts = [f"{count(mapped.num_in, 'record')} in", f"{mapped.num_out:,} out"]
    if mapped.num_dropped:
        parts.append(f"{mapped.num_dropped:,} dropped")
    if mapped.num_rejected:
        parts.append(f"{mapped.num_rejected:,} rejected")
    if mapped.num_blank:
        parts.append(count(mapped.num_blank, "blank line"))
    if mapped.num_begun:
        parts.append(f"{mapped.num_begun:,} more done in chunks that are not finished")
    took = "" if mapped.was_done else f", in {human_duration(mapped.seconds)}"
    output.say(f"{mapped.path.name}: {', '.join(parts)}{took}")
    for line in _pace_lines(mapped):
        output.say(line)
    if mapped.cost is not None:
        output.say(f"  {mapped.cost}")
    for name, value in summary.items():
        output.say(f"  {name:<22} {_shown(value)}")
    for note in mapped.notes:
        output.say(f"note:   {note}")
    if mapped.num_rejected and mapped.errors is not None:
        output.say(f"errors: {mapped.errors}")
    for cause in mapped.causes[:3]:
        output.say(f"  {cause}")
    if mapped.num_lost:
        output.say(
            f"{count(mapped.num_lost, 'record is', 'records are')} in chunks that failed: "
            f"muster errors {shell_word(mapped.path)}   the same command tries them again"
        )
    if mapped.is_interrupted:
        from muster.api.experiments.experiment import (
            resumed_as,  # which knows what all kinds of run are
        )

        again = f"muster resume {shell_word(resumed_as(mapped.path))}"
        output.say(f"Interrupted; everything finished is saved. Go on: {again}")
    if mapped.output is not None:
        output.say(f"output: {mapped.output}")
    for path in made:
        output.say(f"made:   {path}")


def _pace_lines(mapped: Mapped) -> list[str]:
    numbers = mapped.numbers
    if not mapped.seconds or not numbers.get("records"):
        return []
    parts = [f"{numbers['records'] / mapped.seconds:,.0f} records/s"]
    if numbers.get("tokens"):
        parts.append(f"{numbers['tokens'] / mapped.seconds:,.0f} tokens/s")
    worked = numbers.get("waited_s", 0.0) + numbers.get("busy_s", 0.0)
    if worked:
        parts.append(f"{100 * numbers.get('waited_s', 0.0) / worked:.0f} % waiting for input")
    return ["  " + " · ".join(parts)]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
