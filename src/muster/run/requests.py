"""Asking the process that works on a run to cancel it, by a file in the run's folder.

A request names the session that it is for, which is one start of the run. So what was left for a
session that has ended does nothing to the next one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from muster.base.atomic_files import write_atomic
from muster.run.folder import RunFolder

_LOOK_EVERY_S = 0.05
_POLL_EVERY_S = 0.4


class Mailbox:
    """A context for the holder of the run's lock: inside it requests find somebody."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._poll_due_s = 0.0

    def __enter__(self) -> Self:
        self._folder.requests.mkdir(exist_ok=True)
        self._remove_all()
        write_atomic(_session_file(self._folder), self._token.encode())
        return self

    def __exit__(self, *_: object) -> None:
        # The session's name goes first: whoever finds a request gone, and the name still there,
        # knows that the request was taken.
        with suppress(OSError):
            _session_file(self._folder).unlink(missing_ok=True)
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

    def _remove_all(self) -> None:
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
            write_atomic(_request(folder, token), b"cancel")
        elif now is not None and not _request(folder, now).exists() and _current(folder) == now:
            return True
        if not is_running():
            return False
        time.sleep(_LOOK_EVERY_S)
    return token is not None and _current(folder) == token


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
