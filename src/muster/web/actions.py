"""What the pages may change: by the commands that a user would type, each in its own process.

So an action does what the command does, with its locks and its requests, and this process writes
into no run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, SetupError, UsageError
from muster.base.settings import child_environment
from muster.farm.ledger.read import LedgerReader
from muster.web.folder import Folder


class _Command(NamedTuple):
    """``limit_s``: how long the answer waits. What cancels or gives back ends by itself; what tries
    again goes on for as long as the tasks do, and has ended by then where it is refused.
    """

    name: str
    flags: tuple[str, ...] = ()
    limit_s: float = 60.0


_COMMANDS = {
    "cancel": _Command("cancel"),
    "retry": _Command("retry", ("--quiet",), limit_s=5.0),
    "release": _Command("devices", ("--release", "1")),
}
_MOST_SAID = 4000


class Refused(SetupError):
    """The command was refused; its message is the command's own."""


def act(folder: Folder, asked: Mapping[str, Any]) -> dict[str, str]:
    """Do it, or begin it. ``task``: what is cancelled is this one alone.

    Raises UsageError for an unknown action or task, Refused where it cannot be.
    """
    name = asked.get("action")
    if not isinstance(name, str) or name not in _COMMANDS:
        raise UsageError(
            f"There is no action {str(name)[:40]!r}.", hint=f"known: {', '.join(_COMMANDS)}."
        )
    command = _COMMANDS[name]
    # -P: nothing is imported from the folder in which the dashboard was started.
    words = [
        sys.executable,
        "-P",
        "-m",
        "muster",
        command.name,
        str(folder.run.path.absolute()),
        *command.flags,
        *_task(folder, asked),
    ]
    # Files, not pipes: what it starts outlives the dashboard. A session of its own: Ctrl-C here is
    # not for it.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            start_new_session=True, env=child_environment({}),
        )  # fmt: skip
        try:
            code = process.wait(command.limit_s)
        except subprocess.TimeoutExpired:
            # Somebody has to collect it when it ends.
            threading.Thread(target=process.wait, daemon=True).start()
            return {"said": f"`muster {command.name}` has begun."}
        words_of = [_text(file) for file in (said, complained)]
    if code not in (EXIT_OK, EXIT_SOME_FAILED):
        text, _, hint = words_of[1].removeprefix("muster: ").partition("\nHint: ")
        raise Refused(
            text or f"`muster {command.name}` ended with exit code {code}.", hint=hint or None
        )
    return {"said": words_of[0] or f"`muster {command.name}` has ended."}


def _task(folder: Folder, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The task that is named, as words of the command: a number, whatever was sent."""
    if "task" not in asked:
        return ()
    run = folder.expect_tasks()
    with LedgerReader(folder.folder.ledger) as ledger:
        return "--task", str(run.task_number(ledger, str(asked["task"])))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_SAID).decode("utf-8", "replace").strip()
