"""One coordinator per run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from muster.base.errors import SetupError
from muster.base.run_folder import RunFolder


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock; SetupError naming the holder when somebody else has it.

    The lock belongs to the process and vanishes with it, also after kill -9.
    """
    lock = FileLock(folder.lock)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise SetupError(
            f"{folder.path} is being worked on by process {_holder(folder)}.",
            hint=f"watch it with `muster status {folder.path}`, or end it with "
            f"`muster cancel {folder.path}`.",
        ) from None
    try:
        pid_file = folder.lock.with_suffix(".pid")
        pid_file.write_text(str(os.getpid()))
        yield
        pid_file.unlink(missing_ok=True)
    finally:
        lock.release()


def is_held(folder: RunFolder) -> bool:
    """Whether a coordinator works on this folder now."""
    if not folder.lock.exists():
        return False
    lock = FileLock(folder.lock)
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError):
        return True
    lock.release()
    return False


def _holder(folder: RunFolder) -> str:
    try:
        return folder.lock.with_suffix(".pid").read_text() or "unknown"
    except OSError:
        return "unknown"
