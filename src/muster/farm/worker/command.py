"""A task that is a command: started without a shell, watched, its files and metrics collected."""

from __future__ import annotations

import functools
import json
import os
import signal as signals
import sys
from collections.abc import Callable, Mapping
from typing import Any

from muster.base.metric_log import METRICS_FILE
from muster.base.processes import reap_orphans
from muster.base.settings import CHECKPOINT_DIR, TASK_DIR, child_environment
from muster.farm import canonical
from muster.farm.metrics import TENSORBOARD, EventFiles, Printed, parse_source
from muster.farm.outcomes import signal_name
from muster.farm.results import check_result
from muster.farm.task import TargetSpec
from muster.farm.template import OWN_PROGRAM, fill, names_in
from muster.farm.worker.context import Context
from muster.farm.worker.files import Folders, TaskLog, removed_where_empty
from muster.farm.worker.gather import Follower
from muster.farm.worker.memory import can_watch, wait_for
from muster.run.folder import RESULT_FILE

#: Linux takes no longer string in an environment.
_MOST_ENVIRONMENT = 100_000
#: Ignored signals stay ignored across exec: a pipeline's writer would never end.
_IGNORED_BY_PYTHON = [
    getattr(signals, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signals, name)
]


class CommandFailed(Exception):
    """The command could not be started, or ended with another code than 0."""

    def __init__(self, message: str, signal: int | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.signal = signal
        self.code = code


def run_command(
    spec: TargetSpec, params: Mapping[str, Any], context: Context, log: TaskLog, folders: Folders
) -> bytes:
    """Run it to its end and return its encoded metrics.

    ``{name}`` in an argument becomes the parameter's value, ``{dir}`` the attempt's folder; the
    environment says the same. A command reports metrics by writing a JSON object to
    ``result.json`` in that folder, and logs numbers while it runs
    by appending lines of JSON to the file that ``MUSTER_METRICS`` names: without a ``result.json``
    the last of these under each name is a metric. So is, with and without, the last number under
    each name that ``metrics_from`` reads, unless ``result.json`` has one.
    """
    folder, saved = context.make_folders(folders)
    uses_folder = _uses_folder(spec.argv)
    values = {**params, "dir": folder} if uses_folder else params
    argv = [fill(part, values) for part in spec.argv]
    if spec.shell:
        argv = ["/bin/sh", "-c", argv[0]]
    elif argv[0] == OWN_PROGRAM:
        # Without -P a file of the user's named like a module of Python's would be taken for it.
        argv = [sys.executable, "-P", "-m", *argv]
    is_done, is_quiet, last = False, False, dict[str, float]()
    source: Printed | EventFiles | None = None
    try:
        follower = context.follower()
        if spec.metrics_from:
            source = _source(spec.metrics_from, context, log, last)
            follower.sources.append(source)
        with follower:
            environment = _environment(params, context)
            environment |= {TASK_DIR: folder, CHECKPOINT_DIR: saved, METRICS_FILE: follower.place}
            passes_on = not spec.shell and spec.argv[0] == OWN_PROGRAM
            tidy = reap_orphans if folders.are_kept else None
            code = _spawn_and_wait(argv, environment, context, follower, tidy, passes_on=passes_on)
            is_quiet = code == 0 and tidy is not None and not tidy()
        if code < 0:
            raise CommandFailed(f"{argv[0]} was ended by {signal_name(-code)}", -code)
        if code > 0:
            raise CommandFailed(f"{argv[0]} ended with exit code {code}", code=code)
        for tag in source.ambiguous if isinstance(source, EventFiles) else ():
            del last[tag]
        found = _read_metrics(folder, last, follower.last)
        is_done = True
        return found
    finally:
        has_saved = not removed_where_empty(saved)
        # Where it is done, what it saved is published in its folder.
        is_wanted = uses_folder or (is_done and has_saved)
        if not is_wanted and folders.drop(folder, is_quiet=is_quiet):
            context.has_no_files()


@functools.cache
def _uses_folder(argv: tuple[str, ...]) -> bool:
    return any("dir" in names_in(part) for part in argv)


def _source(
    text: str, context: Context, log: TaskLog, last: dict[str, float]
) -> Printed | EventFiles:
    """``last`` gets the last number under each name."""

    def add(step: int, numbers: Mapping[str, float]) -> None:
        context.log_mapping(step, numbers)
        last.update(numbers)

    source = parse_source(text)
    if source.kind == TENSORBOARD:
        return EventFiles(context.folder / source.place, add)
    assert log.path is not None, "--on inline, which has no log, is refused"
    return Printed(log.path, log.start, source.pattern, add)


def _spawn_and_wait(
    argv: list[str],
    environment: dict[str, str],
    context: Context,
    follower: Follower,
    tidy: Callable[[int], bool] | None,
    *,
    passes_on: bool,
) -> int:
    """Exit code, or minus the signal. The command stays in the worker's session and group.

    ``passes_on``: it tells its own processes by itself that they are to end. ``tidy`` is called now
    and then with the command's process.
    """
    looks = not (follower.sources or not can_watch())
    if not looks:
        # A look at sources may take long, and the command's memory is looked at meanwhile.
        follower.look_regularly()
    try:
        if sys.platform == "win32":
            import subprocess

            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, check=False, env=environment
            ).returncode
        # posix_spawn does not copy this process's page tables: 2-3 times subprocess's rate.
        pid = os.posix_spawnp(argv[0], argv, environment, setsigdef=_IGNORED_BY_PYTHON)
    except OSError as error:
        raise CommandFailed(f"cannot start {argv[0]!r}: {error.strerror}") from None
    except ValueError as error:  # a zero byte in an argument
        raise CommandFailed(f"cannot start {argv[0]!r}: {error}") from None
    context.runs(pid, passes_on=passes_on)

    def meanwhile() -> None:
        if looks:
            follower.look()
        if tidy is not None:
            tidy(pid)

    try:
        status, context.command_peak_mib = wait_for(pid, meanwhile, follower.look_regularly)
    finally:
        context.runs(None)
    return os.waitstatus_to_exitcode(status)


_ENVIRONMENT: dict[str, str] = {}


def _environment(params: Mapping[str, Any], context: Context) -> dict[str, str]:
    """The worker's environment, with the task in ``MUSTER_…`` for programs without arguments."""
    if not _ENVIRONMENT:
        _ENVIRONMENT.update(child_environment({}))
    values = {
        "MUSTER_RUN": context.run,
        "MUSTER_TASK": context.task,
        "MUSTER_ATTEMPT": str(context.attempt),
        "MUSTER_DEVICE": context.device,
    }
    if context.seed is not None:
        values["MUSTER_SEED"] = str(context.seed)
    text = json.dumps(dict(params))
    if len(text) < _MOST_ENVIRONMENT:
        values["MUSTER_PARAMS"] = text
    return {**_ENVIRONMENT, **values}


def _read_metrics(folder: str, read: Mapping[str, float], logged: Mapping[str, float]) -> bytes:
    try:
        with open(f"{folder}/{RESULT_FILE}", "rb") as file:  # noqa: PTH123
            text = file.read()
    except FileNotFoundError:
        return canonical.encode({**logged, **read}) if logged or read else b"{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandFailed(
            f"the command wrote {RESULT_FILE}, but it is not JSON: {error}"
        ) from None
    return canonical.encode({**read, **check_result(value)})
