"""``muster add``: further tasks for a sweep, while it goes on elsewhere or after it has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.api.look.listing import find_run
from muster.api.runs import Run
from muster.api.start.options import SweepOptions
from muster.api.sweeps.adding import (
    Added,
    MissingTasks,
    add_tasks,
    check_may_grow,
    missing_tasks,
)
from muster.api.sweeps.plans import check_same_plan, go_to, workload_over
from muster.api.sweeps.workload import Workload
from muster.base.errors import SetupError, UsageError
from muster.base.flags import wants_help
from muster.base.shown_text import count, shell_word
from muster.cli import output
from muster.cli.commands import resume
from muster.cli.commands.sweep import workload_of
from muster.cli.flags import ShownFlags, SpaceFlags
from muster.cli.options import Part
from muster.cli.parse import Parsed, RunPlace, parse_groups
from muster.farm.ledger.queries import Addition
from muster.farm.ledger.read import LedgerReader
from muster.farm.space_texts import check_priority, read_list
from muster.run.session import holder, is_held


@dataclass(frozen=True, kw_only=True)
class _AddFlags:
    """When they run."""

    priority: int = 0
    """These begin before all that wait with a lower one, and after those with a higher one; the
    tasks that the sweep was begun with have 0."""


_HELP = """Add tasks to a sweep, while it goes on in another terminal or on another host, or after
it has ended.

What is given takes the place of what the sweep was begun with, parameter by parameter, and what is
not given stays: --seeds 10:20 means all of its settings with these seeds, --grid lr=1e-4 this
learning rate with all of its other values and seeds. Tasks that it has already are not run again.

Whoever works on the run takes the tasks up. Where nobody does, this command goes on with the run as
`muster resume` does, and takes its flags.

Examples:
  muster add runs/train-1a2b3c --seeds 10:20
  muster add runs/train-1a2b3c --grid lr=1e-4,1e-5 --priority 1
  muster add runs/train-1a2b3c --list more.csv --dry-run
"""
_FIRST = (
    "run", "grid", "zip", "list", "seeds", "priority", "devices", "gpu_ids", "allow_changed_code",
    "dry_run", "quiet", "json",
)  # fmt: skip
_GROUPS: dict[str, Any] = {
    "space": Part(of=SpaceFlags, without=("from_wandb",)),
    "adding": _AddFlags,
    "options": Part(of=SweepOptions, without=("run_dir", "name", "restart")),
    "shown": ShownFlags,
}
#: What is added is told by these groups of flags.
_WHAT = ("space",)


def main(argv: list[str]) -> int:
    run, words = run_in(argv)
    if run is None:
        place = {"place": RunPlace, **_GROUPS}
        run = find_run(parse_groups(place, argv, "add", _HELP, common=_FIRST).place.run)
    before, here = None, Path.cwd()
    if not wants_help(words):
        check_may_grow(run)
    run = Run(run.path.absolute())
    if run.stored.argv and not (run.stored.is_gang or run.stored.is_map):
        go_to(run.stored.cwd)
        before = resume.said_before(run.stored)
    typed = parse_groups(_GROUPS, words, "add", _HELP, common=_FIRST)
    what = _only(typed, *_WHAT)
    if not what.said:
        raise UsageError(
            "muster add needs to know which tasks to add.",
            hint="give --seeds, --grid, --zip or --list; `muster add --help` has examples.",
        )
    check_priority(typed.adding.priority)
    _refuse_options_of_a_resume(run, typed)
    if isinstance(path := what.given("space").get("list"), Path):  # of where it was typed
        what = what.saying(list=here / path)
    if before is not None:  # a list that was edited since would add what nobody asked for
        check_same_plan(run.folder, run.stored, workload_of(before), typed.options)
    workloads = _workloads(run, before, what)
    if typed.shown.dry_run:
        _show(run, missing_tasks(run, workloads), typed.shown)
        return 0
    added = add_tasks(
        run, workloads, said=what.words(), listed=_listed(what), priority=typed.adding.priority,
        may_change_code=typed.options.allow_changed_code,
    )  # fmt: skip
    if added.num_new and not added.is_at_work:
        return _go_on(run, added, _only(typed, "options", "shown"))
    _tell(run, added, typed.shown)
    return 0


def run_in(argv: list[str]) -> tuple[Run | None, list[str]]:
    """The run that is named, None where none is, and the other words."""
    return resume.run_in(argv, _GROUPS.values)


def _only(parsed: Parsed, *groups: str) -> Parsed:
    said = tuple(one for one in parsed.said if one.option.group in groups)
    return dataclasses.replace(parsed, said=said, made={})


def _refuse_options_of_a_resume(run: Run, typed: Parsed) -> None:
    others = [name for name in typed.given("options") if name != "allow_changed_code"]
    if others and is_held(run.folder):
        flag = next(o.name for o in typed.flags if o.group == "options" and o.path[-1] == others[0])
        raise UsageError(
            f"--{flag} has no effect: process {holder(run.folder)} works on {run.path}, with the "
            "options that it was started with.",
            hint=f"leave it out. Devices are changed with: muster devices {shell_word(run.path)}",
        )


def _workloads(run: Run, before: Parsed | None, what: Parsed) -> list[Workload]:
    """What is asked for, with all that the plan and earlier additions have of other parameters.

    An addition may be one to an addition: after a further learning rate, further seeds are meant
    for that one too. So each set of earlier additions makes a command, most of them the same.
    """
    if before is None:
        return [workload_over(run, what.space.space())]
    commands = [before]
    earlier = [
        (part, parse_groups(what.groups, part.said, what.command, "")) for part in _earlier(run)
    ]
    if "list" not in what.given("space"):
        _check_lists(run, earlier)
    for _, addition in earlier:
        commands += [_with(command, addition) for command in commands]
        commands = list({tuple(command.argv()): command for command in commands}.values())
    if "list" in what.given("space") and "priority_column" not in what.given("space"):
        _check_column(what, {command.space.priority_column for command in commands})
    grown = {tuple(one.argv()): one for one in (_with(command, what) for command in commands)}
    return [workload_of(command) for command in grown.values()]


def _earlier(run: Run) -> list[Addition]:
    if not run.folder.ledger.exists():
        return []
    with LedgerReader(run.folder.ledger) as ledger:
        return [part for part in ledger.added() if part.said]


def _check_lists(run: Run, earlier: Sequence[tuple[Addition, Parsed]]) -> None:
    """UsageError where a list of earlier additions is another one by now, which would add rows that
    nobody asked for. One that was added again counts as it was then.
    """
    known = {addition.space.list: part.listed for part, addition in earlier if part.listed}
    for _, addition in earlier:
        path = addition.space.list
        if path in known and known[path] != _listed(addition):
            raise UsageError(
                f"{path} has changed since its rows were added to {run.path}, so this command "
                "would also add the new rows.",
                hint="put it back as it was, or add them first: "
                f"muster add {shell_word(run.path)} --list {shell_word(path)}",
            )


def _check_column(what: Parsed, columns: Collection[str]) -> None:
    """UsageError where the column of the earlier lists cannot be that of this one as well."""
    path, named = what.space.list, [column for column in sorted(columns) if column]
    if not named:
        return
    flag, without = f"--priority-column {shell_word(named[0])}", "--priority-column ''"
    if len(columns) > 1:
        raise UsageError(
            f"Some lists of this run were given with {flag} and others without it, so it is not "
            f"known which holds for {path}.",
            hint=f"write {flag}, or {without} if every column is a parameter.",
        )
    if named[0] not in read_list(path, None).names:
        raise UsageError(
            f"{path} has no column {named[0]}, which holds the priorities in the list that this "
            f"run has ({flag}).",
            hint=f"add the column, or write {without}: then all of its rows have 0.",
        )


def _listed(what: Parsed) -> str:
    """The hash of the list that is named, "" where none is."""
    if "list" not in what.given("space"):
        return ""
    return read_list(what.space.list, None).content_hash


def _with(command: Parsed, what: Parsed) -> Parsed:
    """The command with what is said in place of what it says of the same parameters."""
    said = {(one.option.group, one.option.path): one for one in command.said}
    for one in (one for one in what.said if one.option.group in _WHAT):
        place = (one.option.group, one.option.path)
        if place in said and place in ((_WHAT[0], ("grid",)), (_WHAT[0], ("zip",))):
            names = {_name(text) for text in one.words}
            kept = tuple(text for text in said[place].words if _name(text) not in names)
            one = one._replace(words=kept + one.words, value=kept + one.words)
        said[place] = one
    return dataclasses.replace(command, said=tuple(said.values()), made={})


def _name(axis: str) -> str:
    return axis.partition("=")[0].strip()


def _go_on(run: Run, added: Added, typed: Parsed) -> int:
    """Do what is there to do, as `muster resume` does."""
    shown: ShownFlags = typed.shown
    if not (shown.quiet or shown.json):
        output.say(f"{run.folder.name}: {_numbers(added)}")
    words = typed.words(without=("json",))
    if shown.json and not shown.quiet:
        words.append("--quiet")
    try:
        code = resume.main([str(run.path), *words])
    except SetupError:
        if not is_held(run.folder):
            raise
        _tell(run, added._replace(is_at_work=True), shown)  # another command was faster
        return 0
    if shown.json:
        status = run.status()
        output.say_json({**_record(run, added), "counts": dict(status.counts), "exit_code": code})
    return code


def _tell(run: Run, added: Added, shown: ShownFlags) -> None:
    if shown.json:
        output.say_json(_record(run, added))
    elif not shown.quiet:
        them = "it" if added.num_new == 1 else "them"
        by = f"; process {holder(run.folder)} takes {them} up" if added.is_at_work else ""
        output.say(f"{run.folder.name}: {_numbers(added)}{by if added.num_new else ''}")
        if not (added.num_new or added.is_at_work) and run.status().counts["waiting"]:
            output.say(f"  what is left of them: muster resume {shell_word(run.path)}")


def _numbers(added: Added | MissingTasks) -> str:
    num_new = added.num_new if isinstance(added, Added) else len(added.new)
    if not num_new:
        return f"nothing to add, it has all {count(added.num_known, 'task')} already"
    known = f"; {added.num_known:,} it has already" if added.num_known else ""
    return f"{count(num_new, 'task')} added{known}"


def _record(run: Run, added: Added) -> dict[str, Any]:
    return {
        "run": run.folder.name,
        "path": str(run.path),
        "added": added.num_new,
        "known": added.num_known,
        "is_at_work": added.is_at_work,
    }


def _show(run: Run, found: MissingTasks, shown: ShownFlags) -> None:
    first = [task.payload.decode() for _, task in found.new[:3]]
    is_at_work = is_held(run.folder)
    if shown.json:
        added = Added(len(found.new), found.num_known, is_at_work)
        output.say_json({**_record(run, added), "first": first})
        return
    output.say(f"folder   {run.path}")
    if found.new:
        output.say(f"new      {count(len(found.new), 'task')}, the first: {'; '.join(first)}")
    output.say(f"there    {found.num_known:,} of these tasks are in the run already")
    who = f"process {holder(run.folder)}, which works on it" if is_at_work else "this command"
    output.say(f"done by  {who}")
    output.say("Nothing was added (--dry-run).")
