"""Which file system holds a folder, and whether it lives on another host (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

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
