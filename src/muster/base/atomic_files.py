"""Files that are either the old version or the new one, also after a power cut."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from muster.base.errors import SetupError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; sync and rename it over ``path`` on success.

    On an exception the temporary file is removed and ``path`` stays as it was.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync_file(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable; a no-op where folders cannot be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain_os_error(error: OSError, doing: str, path: Path) -> SetupError:
    """A SetupError that says what to do about a failed write."""
    hints = {
        errno.ENOSPC: "free space there or choose another place with --run-dir; "
        "nothing finished is lost, run the same command again to go on.",
        errno.EDQUOT: "your quota there is used up; free space or choose another --run-dir.",
        errno.EROFS: "that file system is read-only; choose another place with --run-dir.",
        errno.EACCES: "you may not write there; choose another place with --run-dir.",
        errno.EPERM: "you may not write there; choose another place with --run-dir.",
    }
    hint = hints.get(error.errno or 0, "choose another place with --run-dir.")
    return SetupError(f"Cannot {doing} {path}: {error.strerror or error}.", hint=hint)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
