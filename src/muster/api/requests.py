"""Wishes for a running sweep, left as files in its folder by other processes."""

from __future__ import annotations

import uuid

from muster.base.atomic_files import write_atomic
from muster.base.run_folder import RunFolder

_KINDS = ("cancel", "drain", "retry")


def leave_request(folder: RunFolder, what: str) -> None:
    """Ask the coordinator of ``folder`` for something; it looks twice a second."""
    assert what in _KINDS, what
    folder.requests.mkdir(exist_ok=True)
    write_atomic(folder.requests / f"{what}-{uuid.uuid4().hex}", what.encode())


def take_requests(folder: RunFolder) -> list[str]:
    """The wishes that are waiting, each once."""
    found = []
    for path in folder.requests.iterdir() if folder.requests.exists() else ():
        what = path.name.partition("-")[0]
        if what in _KINDS and not path.name.startswith("."):
            path.unlink(missing_ok=True)
            found.append(what)
    return found
