"""Asking the process that works on a run for something, by a file in the run's folder.

A request names the session that it is for, which is one start of the run. So what was left for a
session that has ended does nothing to the next one. To cancel the run is a request without an
answer; every other is answered, by a file too, once what was asked for is on disk.
"""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from muster.base.atomic_files import write_atomic
from muster.base.errors import SetupError
from muster.base.shown_text import shell_word
from muster.run.folder import RunFolder

_LOOK_EVERY_S = 0.05
_POLL_EVERY_S = 0.4
#: How long the one who asks waits for an answer; a run at work takes up requests twice a second.
ANSWER_S = 50.0
_MOST_BYTES = 2**26


class Ask(NamedTuple):
    """What somebody asks of a session, which owes one answer to it."""

    what: Mapping[str, Any]
    answer: Callable[[Mapping[str, Any]], None]


class Mailbox:
    """A context for the holder of the run's lock: inside it requests find somebody."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._poll_due_s = self._ask_due_s = 0.0
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        self._folder.requests.mkdir(exist_ok=True)
        # What is there is for a session that has died. The name of this one comes last: requests
        # begin once it can be read, and none of them may be swept away with the old ones.
        self._remove_all()
        write_atomic(_session_file(self._folder), self._token.encode())
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._remove_all()

    def is_cancelled(self) -> bool:
        """Whether a request to cancel was there, which this takes. It seldom looks at the disk."""
        if time.monotonic() < self._poll_due_s:
            return False
        self._poll_due_s = time.monotonic() + _POLL_EVERY_S
        try:
            _request(self._folder, self._token).unlink()
        except OSError:
            return False
        return True

    def asked(self) -> list[Ask]:
        """What was asked since the last call. It seldom looks at the disk."""
        if time.monotonic() < self._ask_due_s:
            return []
        self._ask_due_s = time.monotonic() + _POLL_EVERY_S
        found = []
        try:
            paths = sorted(self._folder.requests.glob(f"ask-{self._token}-*"))
        except OSError:  # a shared folder that fails now and then; whoever asks waits
            return []
        for path in paths:
            if path.name in self._taken:
                continue
            # The file stays until whoever asked has read the answer. That it is gone tells him that
            # his request was heard and cannot be answered.
            self._taken.add(path.name)
            with suppress(OSError, ValueError, RecursionError):  # another's file: nobody waits
                what, is_ours = _read_note(path)
                # Another user of a shared folder may stop a run, and not choose what it runs.
                if isinstance(what, dict) and (is_ours or "add" not in what):
                    found.append(Ask(what, _answering(path)))
        return found

    def _remove_all(self) -> None:
        # The session's name goes first: whoever finds a request gone, and the name still there,
        # knows that the request was taken.
        _session_file(self._folder).unlink(missing_ok=True)
        for path in self._folder.requests.iterdir():
            if path.is_file():
                path.unlink(missing_ok=True)


def ask_to_cancel(
    folder: RunFolder, is_running: Callable[[], bool], *, timeout_s: float = 5.0
) -> bool:
    """Ask the session of ``folder`` to cancel the run.

    True when the session has heard it, or is slow and will hear it. False when ``is_running()``
    says that nobody is left to hear it.
    """
    token = None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = _current(folder)
        if now is not None and now != token:
            token = now
            _write_request(_request(folder, token), b"cancel")
        # It is gone: either the session took it, or it ended and swept the folder. In the second
        # case its name went first, so the name is read once more, after the request.
        elif now is not None and not _request(folder, now).exists() and _current(folder) == now:
            return True
        if not is_running():
            return False
        time.sleep(_LOOK_EVERY_S)
    return token is not None and _current(folder) == token


def ask(
    folder: RunFolder,
    what: Mapping[str, Any],
    is_running: Callable[[], bool],
    *,
    timeout_s: float = ANSWER_S,
) -> dict[str, Any] | None:
    """Ask the session of ``folder`` for something, and return its answer.

    None when ``is_running()`` says that nobody is left to answer. Raises SetupError where nothing
    can be asked or answered in this folder, and where the session has not answered in time: it may
    do so later.
    """
    token, path = None, None
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            now, alive = _current(folder), is_running()
            is_gone = path is not None and not path.exists()
            if path is not None and (answer := _read_answer(path)) is not None:
                return answer
            if is_gone and _current(folder) == token:
                raise SetupError(
                    f"The process that works on {folder.path} has received the request, but its "
                    "answer cannot be written there.",
                    hint=f"the disk may be full. See what has been done: "
                    f"muster status {shell_word(folder.path)}",
                )
            if not alive:
                return None
            if now is not None and now != token:  # the first, or one that began meanwhile
                token, path = now, folder.requests / f"ask-{now}-{uuid.uuid4().hex[:12]}"
                _write_request(path, json.dumps(what).encode())
            time.sleep(_LOOK_EVERY_S)
    finally:
        if path is not None:
            for left in (path, _answer_file(path)):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
    raise SetupError(
        f"The process that works on {folder.path} has not answered within {timeout_s:.0f} s.",
        hint="it may be busy, be setting up its ranks, run its tasks in its own process, or be "
        "stopped (Ctrl-Z), which muster status says; ask again.",
    )


def _read_note(path: Path) -> tuple[Any, bool]:
    """What it asks, and whether our own user or root has written it; a pipe or a link of somebody
    else's is not followed. Raises OSError and ValueError."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            raise ValueError(f"{path} is not a request")
        is_ours = not hasattr(os, "getuid") or about.st_uid in (0, os.getuid())
        return json.loads(file.read(_MOST_BYTES)), is_ours


def _answering(path: Path) -> Callable[[Mapping[str, Any]], None]:
    def answer(what: Mapping[str, Any]) -> None:
        try:
            if path.exists():  # otherwise nobody waits any more
                write_atomic(_answer_file(path), json.dumps(what).encode())
        except OSError:
            # On a full disk a file can still be removed, which says that this was heard.
            with suppress(OSError):
                path.unlink(missing_ok=True)

    return answer


def _write_request(path: Path, what: bytes) -> None:
    try:
        write_atomic(path, what)
    except OSError as error:
        raise SetupError(
            f"Cannot send a request to {path.parent.parent}: {error.strerror or error}.",
            hint=f"a request is a file in {path.parent}: you need the right to write there, and "
            "free space on that disk.",
        ) from None


def _answer_file(path: Path) -> Path:
    return path.with_name(path.name.replace("ask-", "answer-", 1))


def _read_answer(path: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(_answer_file(path).read_bytes())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _request(folder: RunFolder, token: str) -> Path:
    return folder.requests / f"cancel-{token}"


def _session_file(folder: RunFolder) -> Path:
    return folder.requests / "session"


def _current(folder: RunFolder) -> str | None:
    """The session that answers requests now; None where none does."""
    try:
        token = _session_file(folder).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return token if token.isalnum() else None
