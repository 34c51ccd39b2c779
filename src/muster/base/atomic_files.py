"""Files that are either the old version or the new one, also after a power cut; and which file
system holds them.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from muster.base.errors import SetupError

_ELSEWHERE = (
    "start a new run elsewhere with --run-dir; to go on with this one, copy its folder there"
)
_AGAIN = "nothing finished is lost, run the same command again to go on."


class Refusal(NamedTuple):
    """Why a disk takes nothing more: ``what`` is so at a place, ``hint`` is what to do, and
    ``reason`` says it shortly where the system's words do not.
    """

    what: str
    hint: str
    reason: str = ""


#: What makes a disk take more; nothing does where the file system is read-only.
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit (ulimit -f)",
}
_OR_ANEW = "or start a new run elsewhere with --run-dir"
#: For whoever meets one of them, and for whoever asks later what may have ended a run.
DISK_REFUSALS = {
    errno.ENOSPC: Refusal("The disk of {} is full", f"{_REMEDIES[errno.ENOSPC]}, {_OR_ANEW}"),
    errno.EDQUOT: Refusal(
        "Your quota on the disk of {} is used up",
        f"{_REMEDIES[errno.EDQUOT]}, {_OR_ANEW}",
        "your quota there is used up; ",
    ),
    errno.EFBIG: Refusal(
        "A file in {} may not grow any more",
        f"{_REMEDIES[errno.EFBIG]}, {_OR_ANEW}",
        "files there may not become as large; ",
    ),
    errno.EROFS: Refusal(
        "The file system of {} is read-only", _ELSEWHERE, "that file system is read-only; "
    ),
}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; sync and rename it over ``path`` on success.

    On an exception the temporary file is removed and ``path`` stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    # The kernel takes this process's mask off the mode; asking for the mask would mean to change
    # it, and another thread's file would be made with none.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        _sync_file(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


#: What follows the name of a file, or of a folder, in the name under which it is written.
_BESIDE = re.compile(r"[0-9a-f]{8}(\.tmp|(-old)?\.folder)")


def sweep(path: Path) -> None:
    """Remove what a killed `replacing` of ``path``, or of a folder, has left: it may be as large as
    the file. For the only writer of ``path``: another one's is taken for left.
    """
    start = f".{path.name}."
    for left in list(path.parent.iterdir()) if path.parent.is_dir() else ():
        if not left.name.startswith(start) or not _BESIDE.fullmatch(left.name[len(start) :]):
            continue  # of another file, or the user's
        if left.suffix == ".folder":
            import shutil  # here: every command imports this module, and hardly any has a folder

            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


#: The same of any file.
_LEFT = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def sweep_idle(folder: Path, now_s: float, idle_s: float = 3600.0) -> None:
    """Remove what killed `replacing`s of any files in ``folder`` have left.

    Some of them may belong to a writer that lives, here or on another host. So only those go that
    nobody has written to for ``idle_s`` seconds, at ``now_s`` by the clock of their file system.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not _LEFT.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(OSError):  # another's, or gone meanwhile
                if now_s - entry.stat(follow_symlinks=False).st_mtime > idle_s:
                    Path(entry).unlink()


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of it: the system may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


#: What a call of writev takes on Linux and macOS.
_MOST_PIECES = 1024


def write_pieces(handle: int, pieces: Sequence[bytes]) -> None:
    """Write all of them one after the other, many in a call to the system."""
    for begin in range(0, len(pieces), _MOST_PIECES):
        some = pieces[begin : begin + _MOST_PIECES]
        written = os.writev(handle, some)
        for piece in some:  # it may have taken less, as with `write_all`
            if written < len(piece):
                write_all(handle, memoryview(piece)[written:])
            written = max(0, written - len(piece))


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable; a no-op where folders cannot be opened."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make everything below ``folder`` durable, before it is renamed to where it is looked for."""
    for name, _, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(name, file)
            if stat.S_ISREG(path.lstat().st_mode):
                with suppress(PermissionError):
                    _sync_file(path, os.O_RDONLY)
        sync_folder(Path(name))


def disk_error(error: BaseException | None) -> OSError | None:
    """The refusal of a full or read-only disk that ``error`` is, or that is behind it.

    torch wraps what happens while it saves, once by the chain of causes and once in ``failures``.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, OSError) and found.errno in DISK_REFUSALS:
            return found
        waiting += [found.__cause__, found.__context__]
        failures = getattr(found, "failures", None)  # rank → exception and traceback
        if isinstance(failures, dict):
            waiting += [pair[0] for pair in failures.values() if isinstance(pair, tuple)]
    return None


def refusal_of(path: Path, num_bytes: int) -> Refusal | None:
    """Why the file ``path`` would not get so many bytes more; None where it would, as far as one
    can tell. It is tried in a file without a name beside it, which is gone at once.
    """
    import tempfile  # here, as below: it is asked only where something has failed

    try:
        if _largest_file() - (path.stat().st_size if path.is_file() else 0) < num_bytes:
            return DISK_REFUSALS[errno.EFBIG]
        folder = path if path.is_dir() else path.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.write(bytes(num_bytes))
    except OSError as error:
        return DISK_REFUSALS.get(error.errno or 0)
    return None


def _largest_file() -> float:
    if sys.platform == "win32":
        return math.inf
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def explain_os_error(
    error: OSError, doing: str, path: Path, *, other: str | None = None
) -> SetupError:
    """A SetupError that says what to do about a failed write.

    ``other``: how another place is chosen where ``path`` is no part of a run.
    """
    refusal = DISK_REFUSALS.get(error.errno or 0)
    is_forbidden = error.errno in (errno.EACCES, errno.EPERM)
    reason = refusal.reason if refusal else "you may not write there; " if is_forbidden else ""
    if other is not None:
        remedy = _REMEDIES.get(error.errno or 0)
        hint = f"{remedy}, or {other}." if remedy else f"{other}."
    elif refusal is not None:
        hint = refusal.hint + ("." if error.errno == errno.EROFS else f"; {_AGAIN}")
    else:
        hint = f"{_ELSEWHERE}." if is_forbidden else "choose another place with --run-dir."
    return SetupError(f"Cannot {doing} {path}: {error.strerror or error}.", hint=reason + hint)


def _sync_file(path: Path, flags: int = os.O_RDWR) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_REMOTE = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph",
    "glusterfs", "orangefs", "pvfs2", "afs", "9p", "wekafs", "panfs", "acfs", "ocfs2", "gfs2",
    "davfs", "sshfs", "s3fs", "fuse",
})  # fmt: skip


def is_remote(kind: str | None) -> bool:
    """Network and FUSE file systems; an unknown kind counts as local.

    >>> is_remote("nfs4"), is_remote("fuse.sshfs"), is_remote("ext4"), is_remote(None)
    (True, True, False, False)
    """
    return kind is not None and (kind in _REMOTE or kind.startswith("fuse."))


def file_system_of(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds ``path``; None where that is not known.

    ``mounts``: the text of Linux's ``mountinfo``, by default that of this process. The longest
    mount point above the path wins, and of equal ones the last mounted.

    >>> mounts = "1 0 0:1 / / rw - ext4 a rw\\n2 1 0:2 / /data rw - nfs b rw"
    >>> file_system_of(Path("/data/x"), mounts)
    'nfs'
    """
    best, found = -1, None
    for line in (_mounts() if mounts is None else mounts).splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or not types:
            continue
        # Blanks and the like are written as octal numbers.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), types[0]
    return found


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
