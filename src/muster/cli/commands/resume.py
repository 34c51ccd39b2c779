"""``muster resume`` and ``muster retry``: go on with a run without typing it again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.api.options import SweepOptions
from muster.api.resume import go_to, stored_options, stored_workload
from muster.api.runs import Run, open_run
from muster.base.errors import UsageError
from muster.cli import output
from muster.cli.cluster_flags import ClusterFlags
from muster.cli.commands import map as map_command
from muster.cli.commands import sweep, train
from muster.cli.flags import (
    DeviceFlags,
    FaultFlags,
    Positional,
    RunFlags,
    Switch,
    WorkerFlags,
    options_from,
)
from muster.cli.parse import bundle, parse
from muster.cli.recipes import with_seeds_as_stored
from muster.cli.repeating import flag_name, without

_DEVICE_FLAGS = {
    "devices", "gpus", "gpu_ids", "num_gpus", "world_size", "max_gpus", "no_multi_gpu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _RetryFlags:
    cancelled: Switch = False
    """Also run the cancelled tasks."""


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        run = open_run(argv[0])
        if run.stored.kind in ("train", "agent"):
            return _by_command_line(run, argv[1:], train.main)
        if run.stored.kind == "map":
            return _by_command_line(run, argv[1:], map_command.main)
    return _go_on(argv, "resume", "Continue a run where it stopped; failed tasks stay failed.")


def retry(argv: list[str]) -> int:
    return _go_on(argv, "retry", "Run the failed tasks of a run again, and whatever is left.")


def _go_on(argv: list[str], command: str, description: str) -> int:
    groups: dict[str, type] = {
        "device": DeviceFlags,
        "worker": WorkerFlags,
        "cluster": ClusterFlags,
        "fault": FaultFlags,
        "out": RunFlags,
    }
    if command == "retry":
        groups["again"] = _RetryFlags
    flags: Any = parse(bundle("GoOn", groups, {"run": Positional}), argv, command, description)
    run = open_run(flags.run)
    if run.stored.kind == "map":
        raise UsageError(
            f"{run.path} is a map, which tries its failed chunks again by itself.",
            hint=f"go on with: muster resume {run.path}",
        )
    if run.stored.kind == "run":
        raise UsageError(
            f"{run.path} is not a sweep: `muster {command}` has no tasks to go on with.",
            hint=f"give the same command again: {shlex.join(run.stored.argv)}",
        )
    if command == "retry":
        count = run.reopen(cancelled=flags.again.cancelled)
        if not (flags.out.json or flags.out.quiet):
            output.remark(f"{count:,} tasks will run again")
    if run.stored.argv:
        return _by_command_line(
            run, argv[1:] if argv[0] == flags.run else _without(argv, flags.run)
        )
    typed = options_from(flags.device, flags.worker, flags.fault, flags.out, flags.cluster)
    options = _merged(stored_options(run), typed)
    go_to(run.stored)
    workload = stored_workload(run)
    return sweep.run_and_sum_up(workload, options, (), flags.out.quiet, flags.out.json)


def _by_command_line(
    run: Run, extra: list[str], command_main: Callable[[list[str]], int] = sweep.main
) -> int:
    """The stored command line, with what is typed now on top of it."""
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
    kept = without(words, dropped)
    go_to(stored)
    return command_main([*kept, *extra, "--run-dir", str(path), *command])


def _without(argv: list[str], word: str) -> list[str]:
    index = argv.index(word)
    return argv[:index] + argv[index + 1 :]


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
