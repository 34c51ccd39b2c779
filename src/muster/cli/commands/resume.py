"""``muster resume`` and ``muster retry``: go on with a run without typing it again."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from muster.api.options import SweepOptions
from muster.api.plans import go_to, stored_options, stored_workload
from muster.api.runs import Run, open_first_stage, open_run
from muster.base.errors import UnknownNameError, UsageError
from muster.cli import output
from muster.cli.commands import map as map_command
from muster.cli.commands import sweep, train
from muster.cli.flags import ONE_TIME, ShownFlags, refuse_without_effect
from muster.cli.parse import Parsed, RunPlace, parse_groups
from muster.cli.recipes import with_seeds_as_stored
from muster.farm.task import TaskState


@dataclass(frozen=True, kw_only=True)
class _RetryFlags:
    """What is run again."""

    cancelled: bool = False
    """Also run the cancelled tasks."""


_RESUME = """Continue a run where it stopped; failed tasks stay failed.

The run goes on as it was begun; what is given here takes the place of what was said then. A map or
a training takes the flags of its own command.

Examples:
  muster resume runs/train-1a2b3c
  muster resume train-1a2b3c --gpus 4 --retries 2
"""
_RETRY = """Run the failed tasks of a run again, and whatever is left.

Examples:
  muster retry runs/train-1a2b3c
  muster retry train-1a2b3c --cancelled --timeout 2h
"""
#: What the help shows first.
_FIRST = (
    "run", "cancelled", "devices", "gpu_ids", "per_gpu", "retries", "retry_exceptions",
    "timeout_s", "keep_going", "executor", "allow_changed_code", "dry_run", "quiet", "json",
)  # fmt: skip


def main(argv: list[str]) -> int:
    run, extra = _run_in(argv)
    if run is not None and run.stored.kind != "sweep":
        return _resume_other(run, extra)
    return _go_on(argv, extra, "resume", _RESUME)


def retry(argv: list[str]) -> int:
    run, extra = _run_in(argv)
    if run is not None and run.stored.kind != "sweep":
        raise UsageError(
            f"{run.path} is {run.stored.kind_name}: there are no failed tasks to run again.",
            hint=f"go on with it: muster resume {run.path}",
        )
    return _go_on(argv, extra, "retry", _RETRY)


def _run_in(argv: list[str]) -> tuple[Run | None, list[str]]:
    """The run that is named, and the other words: flags and their values may stand before it."""
    for index, word in enumerate(argv):
        if not word.startswith("-"):
            with suppress(UnknownNameError):
                run = open_first_stage(word) or open_run(word)
                return run, [*argv[:index], *argv[index + 1 :]]
    return None, argv


def _resume_other(run: Run, extra: list[str]) -> int:
    """A map, a training or a program: the command that made it is given again."""
    stored = run.stored
    if not stored.argv:
        call = "muster.map" if stored.kind == "map" else "muster.fit"
        raise UsageError(
            f"{run.path} was made by a call of {call} in a program, not by a command.",
            hint=f"give the same call again with run_dir={str(run.path)!r}; it goes on from there.",
        )
    if stored.kind == "run":
        raise UsageError(
            f"{run.path} is {stored.kind_name}, which muster cannot go on with by itself.",
            hint="a program that saves its state goes on when it is started again in "
            f"{stored.cwd}: {shlex.join(stored.argv)}",
        )
    if stored.kind == "map":
        return _by_command_line(run, extra, map_command.main)
    return _by_command_line(run, extra, train.main)


def _go_on(argv: list[str], extra: list[str], command: str, description: str) -> int:
    groups: dict[str, Any] = {"place": RunPlace, "options": SweepOptions, "shown": ShownFlags}
    if command == "retry":
        groups["again"] = _RetryFlags
    parsed = parse_groups(groups, argv, command, description, common=_FIRST)
    refuse_without_effect(parsed, parsed.options.executor)
    run = open_run(parsed.place.run)
    if parsed.options.restart and (command == "retry" or not run.stored.argv):
        raise UsageError(
            f"--restart begins anew, and `muster {command}` goes on with {run.path}.",
            hint="give the command or the call again that began it, with --restart or "
            "restart=True.",
        )
    reopens: tuple[TaskState, ...] = ()
    if command == "retry":
        reopens = (TaskState.FAILED, *[TaskState.CANCELLED] * parsed.again.cancelled)
        counts = run.counts()
        if not any(counts[state] for state in reopens):
            return _nothing_to_retry(run, counts)
    if run.stored.argv:
        main = functools.partial(sweep.main, reopens=reopens)
        return _by_command_line(run, extra, main)
    go_to(run.stored)
    workload = dataclasses.replace(stored_workload(run), reopens=reopens)
    return sweep.run_and_sum_up(workload, _merged(run, parsed), (), parsed.shown)


def _nothing_to_retry(run: Run, counts: Mapping[TaskState, int]) -> int:
    output.say(f"{run.folder.name}: no task has failed, so there is nothing to run again")
    if counts[TaskState.CANCELLED]:
        output.say(f"  the cancelled ones: muster retry {run.path} --cancelled")
    if counts[TaskState.READY] + counts[TaskState.CLAIMED] or not sum(counts.values()):
        output.say(f"  what is left: muster resume {run.path}")
    return 0


def _by_command_line(run: Run, extra: list[str], command_main: Callable[[list[str]], int]) -> int:
    """The stored command line, with what is typed now on top of it."""
    from muster.cli.main import read_command

    stored = run.stored
    path = run.folder.whole.absolute()
    extra = [word for word in extra if word.replace("_", "-") != "--cancelled"]
    go_to(stored)
    argv = with_seeds_as_stored(stored.spec.get("config") or {}, list(stored.argv))
    before = read_command(argv)
    typed = parse_groups(before.groups, extra, before.command, "")
    gone = {*ONE_TIME, "run_dir", *(said.option.path[-1] for said in typed.said)}
    if gone & _DEVICES:
        gone |= _DEVICES
    merged = dataclasses.replace(before, said=(*before.but(gone), *typed.said))
    return command_main(merged.argv(run_dir=path)[2:])


_DEVICES = {"devices", "gpu_ids", "max_gpus"}


def _merged(run: Run, parsed: Parsed) -> SweepOptions:
    """The stored options, with what is typed now on top of them."""
    stored = stored_options(run)
    if _DEVICES & parsed.given("options").keys():
        stored = dataclasses.replace(stored, devices="auto", gpu_ids=None, max_gpus=None)
    merged: SweepOptions = parsed.make("options", of=stored, run_dir=stored.run_dir)
    return merged
