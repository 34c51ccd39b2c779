"""Where the ledger lives: SQLite's locks do not hold on network file systems."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.base.errors import LedgerError
from muster.base.settings import Settings
from muster.run.folder import RunFolder

_REMOTE = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "afs",
        "9p",
        "wekafs",
        "panfs",
        "acfs",
        "ocfs2",
        "gfs2",
        "davfs",
        "sshfs",
        "s3fs",
    ]
)


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """``path`` is where the coordinator works; ``is_away`` when that is not the run folder."""

    path: Path
    is_away: bool = False
    reason: str = ""


def choose_place(folder: RunFolder, folder_id: str, settings: Settings) -> LedgerPlace:
    """The run folder itself, or a folder on a local disk when the run folder's disk is remote.

    That one is made, for this user alone. ``folder_id``: of the run folder and none of its copies.
    Raises LedgerError when no local disk can be found, or when the folder is somebody else's.
    """
    if settings.ledger_folder is not None:
        path = _private(settings.ledger_folder, settings) / folder_id / "ledger.sqlite"
        return LedgerPlace(path=path, is_away=True, reason="MUSTER_LEDGER_DIR is set")
    kind = file_system_of(folder.path.absolute(), _mounts())
    if not is_remote(kind):
        return LedgerPlace(path=folder.ledger)
    for candidate in (settings.state_folder, Path("/var/tmp")):
        if not is_remote(file_system_of(candidate, _mounts())):
            path = _private(candidate, settings) / folder_id / "ledger.sqlite"
            reason = f"{folder.path} is on a network file system ({kind})"
            return LedgerPlace(path=path, is_away=True, reason=reason)
    raise LedgerError(
        f"{folder.path} is on a network file system ({kind}) and so are {settings.state_folder} "
        "and /var/tmp; the ledger needs a local disk.",
        hint="name a folder on one with MUSTER_LEDGER_DIR.",
    )


def _private(base: Path, settings: Settings) -> Path:
    """A folder below ``base``, which may be shared, that is this user's and nobody else's."""
    if not hasattr(os, "getuid"):
        return base / f"muster-{settings.user}"
    path = base / f"muster-{os.getuid()}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()  # not through a link that somebody has planted
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise LedgerError(
                f"The ledger needs a folder of your own, and {path} is not yours (user id "
                f"{found.st_uid}).",
                hint="name another place on a local disk with MUSTER_LEDGER_DIR, and tell your "
                "administrator.",
            )
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise LedgerError(
            f"The ledger needs a folder on a local disk, and {path} cannot be made: "
            f"{error.strerror}.",
            hint="name another place with MUSTER_LEDGER_DIR.",
        ) from error
    return path


def is_remote(kind: str) -> bool:
    """Network and FUSE file systems; an unknown kind counts as local.

    >>> is_remote("nfs4"), is_remote("fuse.sshfs"), is_remote("ext4"), is_remote("")
    (True, True, False, False)
    """
    return kind in _REMOTE or kind == "fuse" or kind.startswith("fuse.")


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds ``path``, from the text of ``mountinfo``.

    The longest mount point above the path wins, and of equal ones the last mounted.

    >>> mounts = "1 0 0:1 / / rw - ext4 a rw\\n2 1 0:2 / /data rw - nfs b rw"
    >>> file_system_of(Path("/data/x"), mounts)
    'nfs'
    """
    best, found = -1, ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or not types:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), types[0]
    return found


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""
