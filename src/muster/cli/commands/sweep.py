"""``muster sweep``: parse, show, run, sum up."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from muster.api.launch import Audience, Prepared, prepare, run_workload
from muster.api.recipe import Recipe
from muster.api.start.options import SweepOptions
from muster.api.start.placing import placement_lines
from muster.api.sweeps.plans import choose_folder
from muster.api.sweeps.search_options import OF_ALL, SearchOptions
from muster.api.sweeps.workload import Workload, of_command, of_recipe, of_target_text
from muster.base.errors import UsageError, nearest
from muster.base.flags import Flag, wants_help
from muster.base.shown_text import shell_word
from muster.cli import output
from muster.cli.flags import ShownFlags, SpaceFlags, sweep_options
from muster.cli.options import Part, flag_name, flags_by_name, options_of
from muster.cli.output import summary_line
from muster.cli.parse import Parsed, UnknownFlag, parse_groups
from muster.cli.place_of_target import possible_targets, split_target
from muster.cli.recipes import RECIPES, TARGET, is_recipe, names_of, sweep_recipe, unknown, vet_new
from muster.cli.sweep_advice import no_numbers, refuse_parameter, refuse_program
from muster.cli.values import is_script, split_command
from muster.farm.space_texts import parse_seeds
from muster.farm.task import TaskState

if TYPE_CHECKING:
    from muster.api.runs import Run
    from muster.cli.commands.slurm import SlurmArray

_HELP = """Run TARGET once for every setting and seed, on every device, and record every result.

TARGET is file.py:function, package.module:function, a recipe ({recipes}), or, after --, a
command with {{name}} where a value belongs and {{dir}} for the task's folder. Settings come from
--grid, --zip, --list and --seeds. The same command again continues where it stopped.

What a function returns becomes columns of the table. A command writes a JSON object of numbers to
result.json in $MUSTER_TASK_DIR, and finds $MUSTER_SEED and $MUSTER_PARAMS (JSON) there as well.
Numbers over time: muster.log(step, loss=...) in Python, or lines of JSON in $MUSTER_METRICS; the
last of a command that writes no result.json become columns.

Examples:
  muster sweep train.py:run --grid lr=1e-3,1e-2 --seeds 10
  muster sweep train.py:run --grid lr=1e-3,1e-2 --grid width=64,128 --devices cpu:4
  muster sweep --grid lr=1e-3,1e-2 --seeds 3 -- python train.py --lr {{lr}} --out {{dir}}
  muster sweep train.py:run --space 'lr=log(1e-5,1e-1)' --maximize accuracy --trials 50
  muster sweep ssm --num-seeds 4 --student-dims 16 32 64
"""


@dataclass(frozen=True, kw_only=True)
class SharingFlags:
    """How a command is started, and several processes that share one sweep."""

    shell: bool = False
    """Hand the command to sh -c, so that pipes and globs work. Values are filled in unquoted."""
    metrics_from: Annotated[str, Flag(metavar="SOURCE")] = ""
    """Where a command that logs nothing has its numbers over time: stdout:REGEX with named groups,
    of which step is the step, or tensorboard:DIR with event files below the task's folder."""
    array: int | None = None
    """With --on slurm: submit an array of N elements, each a sweep of its own with its share of
    the tasks (one seed each where there are N seeds), and return at once. Later: muster collect."""
    part: Annotated[str | None, Flag(metavar="I/N")] = None
    """Run only every N-th task, from the I-th on; the first is 0."""


@dataclass(frozen=True, kw_only=True)
class TargetPlace:
    """What is run."""

    target: Annotated[str, Flag(is_positional=True)] = ""
    """file.py:function, package.module:function or a recipe; without it a command after --."""


_COMMON = {"sharing": SharingFlags, "options": SweepOptions, "shown": ShownFlags}
GROUPS = {
    "space": SpaceFlags, "search": SearchOptions, **_COMMON,
    "options": Part(of=SweepOptions, without=OF_ALL),
}  # fmt: skip
#: What the help shows first.
_FIRST = (
    "target", "grid", "zip", "list", "seeds", "space", "maximize", "minimize", "trials", "stop",
    "devices", "gpu_ids", "per_gpu", "gpus_per_task",
    "retries", "retry_exceptions", "timeout_s", "executor", "run_dir", "name", "shell",
    "restart", "keep_going", "dry_run", "quiet", "json",
)  # fmt: skip


def main(argv: list[str]) -> int:
    words, remarks = _without_sweep_file(argv)
    for line in remarks:
        output.remark(line)
    return start(flags_of_sweep(words), ("muster", "sweep", *words))


def start(parsed: Parsed, typed: Sequence[str], reopens: tuple[TaskState, ...] = ()) -> int:
    """Do what the flags say. ``typed``: the command line that goes into the record; ``reopens``:
    tasks in these states are run again, once the run has really started.
    """
    workload = dataclasses.replace(workload_of(parsed), reopens=reopens)
    options = sweep_options(parsed)
    if workload.recipe is not None:
        vet_new(workload.config, choose_folder(workload, options), options)
    if parsed.sharing.array is not None:
        from muster.cli.commands.slurm import array_of, send_array

        return send_array(array_of(workload, options, parsed, typed), parsed.shown)
    if parsed.sharing.part is not None:
        from muster.api.slurm.array import part_of

        workload = part_of(workload, parsed.sharing.part)
    return run_and_sum_up(workload, options, typed, parsed.shown)


def slurm_array(parsed: Parsed) -> SlurmArray:
    """What is sent to SLURM where the flags say so."""
    from muster.cli.commands.slurm import array_of

    if parsed.sharing.array is None:
        raise UsageError(
            "The workers of a sweep serve the command that submitted them: their script does "
            "nothing by itself.",
            hint="add --array N for a script that works without it, or see that of the workers "
            "with `muster sweep … --on slurm --dry-run`.",
        )
    return array_of(workload_of(parsed), sweep_options(parsed), parsed, parsed.argv())


def flags_of_sweep(argv: Sequence[str], more: Mapping[str, Any] = MappingProxyType({})) -> Parsed:
    """The flags alone; nothing of what they name is looked at. ``more``: groups of the command
    that this one is said to.
    """
    words, program = split_command(_without_sweep_file(argv)[0])
    typed = words
    target, words = split_target(typed, is_target, GROUPS.values, has_program=bool(program))
    recipe = sweep_recipe(target) if target and not program else None
    if recipe is not None:
        about = (recipe.config.__doc__ or "").strip()
        text = f"Recipe {target}: {about}\n\nExample:\n  muster sweep {target} --dry-run"
        groups = {**more, "recipe": _of_recipe(recipe.config), **_COMMON}
        return parse_groups(groups, words, f"sweep {target}", text, common=_FIRST)
    if program:
        if target:
            raise UsageError(
                f"Both a target ({target}) and a command after `--` are given.",
                hint="leave one of them out.",
            )
        line = [*words, "--", *program]
        return parse_groups(
            {**more, **GROUPS}, line, "sweep", _help(), common=_FIRST, takes_rest=True
        )
    if not target:
        _help_or_complain(words)
    refuse_program(target, typed, _num_values)
    if re.fullmatch(r"[\w-]+", target):  # before its flags, which would be called unknown
        raise unknown("recipe", target, Recipe)
    try:
        return parse_groups({**more, **GROUPS}, words, f"sweep {target}", _help(), common=_FIRST)
    except UnknownFlag as error:
        refuse_parameter(target, words, error)
        raise


def _num_values(flag: str) -> int | None:
    """How many values a flag of ours may have; None for one that is not ours."""
    name = flag_name(flag)
    options = [option for group in GROUPS.values() for option in options_of("", group)]
    known = flags_by_name(options)
    if name not in known:
        return 0 if name.removeprefix("no-") in known else None
    number = known[name].num_words(name)
    return sys.maxsize if number is None else number


def _without_sweep_file(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is typed, with the words that a W&B sweep file means, and sentences about them."""
    if not any(word.partition("=")[0] == "--from-wandb" for word in argv):
        return list(argv), []
    from muster.cli.wandb_file import without_sweep_file

    words, program = split_command(argv)
    target, _ = split_target(words, is_target, GROUPS.values, has_program=bool(program))
    return without_sweep_file(argv, has_target=bool(target))


def _of_recipe(config: type) -> Part:
    has_seeds = "tuple[int" in str(getattr(config, "__annotations__", {}).get("seeds", ""))
    # --seeds by the one rule of all sweeps: 3 are three of them, and 3 5 8 is 3,5,8.
    readers = {"seeds": lambda texts: parse_seeds(",".join(texts))} if has_seeds else {}
    return Part(of=config, readers=readers)


def workload_of(parsed: Parsed) -> Workload:
    if parsed.sharing.metrics_from and not parsed.program:
        raise UsageError(
            "--metrics-from is for a command; a function logs with ctx.log or muster.log."
        )
    if "recipe" in parsed.groups:
        recipe = sweep_recipe(parsed.target)
        assert recipe is not None
        return of_recipe(recipe, parsed.recipe)
    search: SearchOptions = parsed.search
    search.check_used()
    if search.is_search:
        return _searched(parsed, search)
    space = parsed.space.space()
    if parsed.program:
        sharing = parsed.sharing
        return of_command(
            list(parsed.program), space, shell=sharing.shell, metrics_from=sharing.metrics_from
        )
    return of_target_text(parsed.target, space)


def _searched(parsed: Parsed, search: SearchOptions) -> Workload:
    """The workload of a search, whose settings no other flag may give."""
    for name in ("grid", "zip", "list"):
        if getattr(parsed.space, name):
            raise UsageError(
                f"--{name} and a search are both given: a search chooses the settings.",
                hint=f"put what --{name} gives into --space, as choice(…), or drop one of them.",
            )
    if parsed.sharing.array is not None or parsed.sharing.part is not None:
        raise UsageError(
            "--array and --part divide a list of tasks; a search chooses its tasks as it goes.",
            hint="use --on slurm without --array: one search, with workers in jobs.",
        )
    from muster.api.sweeps.search import search_of_command, search_of_function

    found = parsed.space.space().seeds
    seeds = None if found is None else tuple(found)
    if parsed.program:
        return search_of_command(
            list(parsed.program),
            search,
            seeds,
            shell=parsed.sharing.shell,
            metrics_from=parsed.sharing.metrics_from,
        )
    return search_of_function(parsed.target, search, seeds)


def is_target(word: str) -> bool:
    return bool(TARGET.fullmatch(word)) or is_script(word) or is_recipe(word, Recipe)


def run_and_sum_up(
    workload: Workload, options: SweepOptions, argv: Sequence[str], shown: ShownFlags
) -> int:
    """Run with the right screen, then say what came of it; returns the exit code."""
    if shown.dry_run:
        _show_plan(prepare(workload, options), is_json=shown.json)
        return 0
    began = time.monotonic()
    if workload.recipe is not None:
        from muster.api.sweeps.housekeeping import rehearse_sweep

        call = partial(rehearse_sweep, workload.recipe, workload.config)
        workload = dataclasses.replace(workload, rehearse=call)
    output.show_events(are_shown=shown.log_level == "debug")
    with output.make_screen(shown.level) as screen:
        audience = Audience(show=screen.show, say=screen.line, warn=screen.warn, argv=tuple(argv))
        run = run_workload(workload, options, audience)
    seconds = time.monotonic() - began
    made: list[str] = []
    if workload.recipe is not None:
        from muster.api.report.make import make_report

        made = [str(path) for path in make_report(run, workload.recipe, workload.config)]
    if shown.json:
        output.say_json(outcome(run, seconds, made))
    elif not shown.quiet:
        _sum_up(run, seconds, made)
        if run.counts()[TaskState.DONE] and not (run.has_results() or run.has_metrics()):
            output.say(no_numbers(workload, run))
    return run.exit_code


def _help_or_complain(words: list[str]) -> NoReturn:
    if wants_help(words):
        parse_groups({"place": TargetPlace, **GROUPS}, words, "sweep", _help(), common=_FIRST)
    for word in possible_targets(words, GROUPS.values):  # behind a flag that only the recipe has
        if nearest(word, names_of(Recipe), cutoff=0.65):
            raise unknown("recipe", word, Recipe)
    raise UsageError(
        "There is nothing to run: no target and no command.",
        hint="write `muster sweep file.py:function …`, `muster sweep RECIPE …` or "
        "`muster sweep … -- COMMAND …`; `muster sweep --help` has examples.",
    )


def _help() -> str:
    return _HELP.format(recipes=", ".join(RECIPES))


def _show_plan(prepared: Prepared, *, is_json: bool) -> None:
    workload = prepared.workload
    tasks = workload.feed({spec.name: 0 for spec in workload.targets})
    sample = [task.payload.decode() for _, task in zip(range(3), tasks, strict=False)]
    script = _script(prepared)
    if is_json:
        output.say_json(
            {
                **({} if script is None else {"script": script}),
                "target": [spec.name for spec in workload.targets],
                "tasks": workload.total,
                "run_dir": str(prepared.folder.path),
                "is_new": prepared.is_new,
                "workers": [slot.label for slot in prepared.placement.slots],
                "first": sample,
                **({} if workload.search is None else {"search": workload.search.to_json()}),
                "warnings": list(workload.warnings),
            }
        )
        return
    output.say(f"target   {', '.join(spec.name for spec in workload.targets)}")
    if workload.search is not None:
        from muster.cli.search_wording import plan_lines

        for line in plan_lines(workload.search):
            output.say(line)
    else:
        output.say(f"tasks    {workload.total:,}, the first: {'; '.join(sample)}")
    for line in workload.warnings:
        output.say(f"note     {line}")
    word = "new" if prepared.is_new else "continued"
    output.say(f"folder   {prepared.folder.path} ({word})")
    for line in placement_lines(prepared.placement, prepared.options):
        output.say(f"devices  {line}")
    if script is not None:
        output.say(f"script   for sbatch:\n{script.rstrip()}")
    output.say("Nothing was started (--dry-run).")


def _script(prepared: Prepared) -> str | None:
    """What SLURM would be sent."""
    if prepared.options.executor != "slurm":
        return None
    from muster.api.slurm.array import sweep_script

    return sweep_script(prepared)


def outcome(run: Run, seconds: float, made: list[str]) -> dict[str, Any]:
    """What ``--json`` prints of a sweep."""
    status = run.status()
    return {
        "run": status.name,
        "path": status.path,
        "counts": dict(status.counts),
        "tried_again": status.num_retried,
        "seconds": round(seconds, 3),
        "exit_code": run.exit_code,
        "paused": run.ending.paused if run.ending else "",
        "results": str(run.folder.results_parquet),
        "made": made,
    }


def _sum_up(run: Run, seconds: float, made: list[str]) -> None:
    counts = run.status().counts
    output.say(summary_line(run.folder.name, counts, seconds))
    quoted = shell_word(run.path)
    ending = run.ending
    if counts["failed"]:
        for group in run.failures()[:3]:
            if group.num_failed:
                output.say(f"  {group.num_failed:,} × {group.message.splitlines()[0][:150]}")
        output.say(f"  see why: muster errors {quoted}   again: muster retry {quoted}")
    if counts["cancelled"]:
        output.say(f"  the cancelled ones after all: muster retry {quoted} --cancelled")
    if ending is not None and ending.paused:
        output.say(f"Paused: {ending.paused}")
        output.say(
            "  correct the cause, then: "
            f"muster retry {quoted}   or go on regardless with --keep-going"
        )
    elif ending is not None and ending.cancelled:
        output.say("Cancelled. The finished tasks are kept.")
    elif ending is not None and ending.interrupted:
        from muster.api.experiments.experiment import (
            resumed_as,  # which knows what all kinds of run are
        )

        again = f"muster resume {shell_word(resumed_as(run.path))}"
        output.say(f"Interrupted; everything finished is saved. Go on: {again}")
    from muster.api.sweeps.search_state import read_search

    if ending is not None and (search := read_search(run.folder)) is not None:
        from muster.cli.search_wording import state_lines

        for line in state_lines(search):
            output.say(f"  {line}")
        output.say(f"  the best, and how to run it again: muster best {shell_word(run.path)}")
    output.say(f"table: {run.folder.results_csv}")
    for path in made:
        output.say(f"made:  {path}")
