"""A task that is a command: started without a shell, watched, its files and metrics collected."""

from __future__ import annotations

import json
import os
import signal as signals
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.settings import child_environment
from muster.farm import codec
from muster.farm.failures import signal_name
from muster.farm.model import TargetSpec
from muster.farm.template import fill, names_in
from muster.farm.worker.context import Context

RESULT_FILE = "result.json"
#: Ignored signals stay ignored across exec: a pipeline's writer would never end.
_IGNORED_BY_PYTHON = [
    getattr(signals, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signals, name)
]


class CommandFailed(Exception):
    """The command could not be started, or ended with another code than 0."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


def run_command(spec: TargetSpec, params: Mapping[str, Any], context: Context) -> bytes:
    """Run it to its end and return its encoded metrics.

    ``{name}`` in an argument becomes the parameter's value, ``{dir}`` the attempt's folder. A
    command reports metrics by writing a JSON object to ``{dir}/result.json``.
    """
    values = dict(params)
    uses_folder = any("dir" in names_in(part) for part in spec.argv)
    if uses_folder:
        values["dir"] = str(context.folder)
    argv = [fill(part, values) for part in spec.argv]
    if spec.shell:
        argv = ["/bin/sh", "-c", argv[0]]
    code = _spawn_and_wait(argv)
    if code < 0:
        raise CommandFailed(f"{argv[0]} was ended by {signal_name(-code)}", -code)
    if code > 0:
        raise CommandFailed(f"{argv[0]} ended with exit code {code}")
    return _read_metrics(context.folder / RESULT_FILE) if uses_folder else b"{}"


def _spawn_and_wait(argv: list[str]) -> int:
    """Exit code, or minus the signal. The command stays in the worker's session and group."""
    try:
        if sys.platform == "win32":
            return subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode
        # posix_spawn does not copy this process's page tables: 2-3 times subprocess's rate.
        pid = os.posix_spawnp(argv[0], argv, _environment(), setsigdef=_IGNORED_BY_PYTHON)
    except (FileNotFoundError, PermissionError, OSError) as error:
        raise CommandFailed(f"cannot start {argv[0]!r}: {error.strerror}") from None
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


_ENVIRONMENT: dict[str, str] = {}


def _environment() -> dict[str, str]:
    if not _ENVIRONMENT:
        _ENVIRONMENT.update(child_environment({}))
    return _ENVIRONMENT


def _read_metrics(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return b"{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandFailed(f"the command wrote {path.name}, but it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CommandFailed(f"{path.name} holds a {type(value).__name__}; write a JSON object")
    return codec.encode(codec.check_result(value))
