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
from muster.api.resume import go_to, stored_options, stored_workload
from muster.api.runs import Run, open_run
from muster.base.errors import UnknownNameError, UsageError
from muster.cli import output
from muster.cli.cluster_flags import ClusterFlags
from muster.cli.commands import map as map_command
from muster.cli.commands import sweep, train
from muster.cli.flags import (
    DeviceFlags,
    EarlierWorkFlags,
    FaultFlags,
    Positional,
    RunFlags,
    Switch,
    WorkerFlags,
    options_from,
)
from muster.cli.map_flags import pipeline_first
from muster.cli.parse import bundle, parse
from muster.cli.recipes import with_seeds_as_stored
from muster.cli.repeating import flag_name, without
from muster.cli.train_flags import task_first
from muster.farm.task import TaskState

_DEVICE_FLAGS = {
    "devices", "gpus", "gpu_ids", "num_gpus", "world_size", "max_gpus", "no_multi_gpu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _RetryFlags:
    cancelled: Switch = False
    """Also run the cancelled tasks."""


def main(argv: list[str]) -> int:
    run, extra = _run_in(argv)
    if run is not None and run.stored.kind != "sweep":
        return _resume_other(run, extra)
    return _go_on(
        argv, extra, "resume", "Continue a run where it stopped; failed tasks stay failed."
    )


def retry(argv: list[str]) -> int:
    run, extra = _run_in(argv)
    if run is not None and run.stored.kind != "sweep":
        raise UsageError(
            f"{run.path} is {run.stored.kind_name}: there are no failed tasks to run again.",
            hint=f"go on with it: muster resume {run.path}",
        )
    return _go_on(
        argv, extra, "retry", "Run the failed tasks of a run again, and whatever is left."
    )


def _run_in(argv: list[str]) -> tuple[Run | None, list[str]]:
    """The run that is named, and the other words: flags and their values may stand before it."""
    for index, word in enumerate(argv):
        if not word.startswith("-"):
            with suppress(UnknownNameError):
                return open_run(word), [*argv[:index], *argv[index + 1 :]]
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
        return _by_command_line(run, extra, map_command.main, pipeline_first)
    return _by_command_line(run, extra, train.main, task_first)


def _go_on(argv: list[str], extra: list[str], command: str, description: str) -> int:
    groups: dict[str, type] = {
        "device": DeviceFlags,
        "worker": WorkerFlags,
        "cluster": ClusterFlags,
        "fault": FaultFlags,
        "earlier": EarlierWorkFlags,
        "out": RunFlags,
    }
    if command == "retry":
        groups["again"] = _RetryFlags
    flags: Any = parse(bundle("GoOn", groups, {"run": Positional}), argv, command, description)
    run = open_run(flags.run)
    if flags.earlier.restart and (command == "retry" or not run.stored.argv):
        raise UsageError(
            f"--restart begins anew, and `muster {command}` goes on with {run.path}.",
            hint="give the command or the call again that began it, with --restart or "
            "restart=True.",
        )
    reopens: tuple[TaskState, ...] = ()
    if command == "retry":
        reopens = (TaskState.FAILED, *[TaskState.CANCELLED] * flags.again.cancelled)
        counts = run.counts()
        if not any(counts[state] for state in reopens):
            return _nothing_to_retry(run, counts)
    if run.stored.argv:
        main = functools.partial(sweep.main, reopens=reopens)
        return _by_command_line(run, extra, main, sweep.target_first)
    typed = options_from(
        flags.device, flags.worker, flags.fault, flags.out, flags.cluster, flags.earlier
    )
    options = _merged(stored_options(run), typed)
    go_to(run.stored)
    workload = dataclasses.replace(stored_workload(run), reopens=reopens)
    return sweep.run_and_sum_up(workload, options, (), flags.out)


def _nothing_to_retry(run: Run, counts: Mapping[TaskState, int]) -> int:
    output.say(f"{run.folder.name}: no task has failed, so there is nothing to run again")
    if counts[TaskState.CANCELLED]:
        output.say(f"  the cancelled ones: muster retry {run.path} --cancelled")
    if counts[TaskState.READY] + counts[TaskState.CLAIMED] or not sum(counts.values()):
        output.say(f"  what is left: muster resume {run.path}")
    return 0


def _by_command_line(
    run: Run,
    extra: list[str],
    command_main: Callable[[list[str]], int],
    target_first: Callable[[list[str]], list[str]],
) -> int:
    """The stored command line, with what is typed now on top of it.

    ``target_first`` puts the positional argument in front, where no flag takes it for its value.
    """
    stored = run.stored
    path = run.path.absolute()
    extra = [word for word in extra if word.replace("_", "-") != "--cancelled"]
    words = with_seeds_as_stored(stored.spec.get("config") or {}, list(stored.argv[2:]))
    command: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut:]
    typed = {flag_name(word) for word in extra if word.startswith("--")}
    dropped = typed | (_DEVICE_FLAGS if typed & _DEVICE_FLAGS else set()) | {"run_dir", "save_dir"}
    kept = without(target_first(words), dropped)
    go_to(stored)
    return command_main([*kept, *extra, "--run-dir", str(path), *command])


def _merged(stored: SweepOptions, typed: SweepOptions) -> SweepOptions:
    """What is typed now wins where it says something."""
    default = SweepOptions()
    changes = {
        field.name: getattr(typed, field.name)
        for field in dataclasses.fields(SweepOptions)
        if getattr(typed, field.name) != getattr(default, field.name)
    }
    changes.pop("run_dir", None)
    return dataclasses.replace(stored, **changes)
