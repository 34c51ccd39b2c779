"""A user's code that a host keeps by its hash, so that a second start sends nothing."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
import time
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO

from muster.base.errors import SetupError
from muster.base.settings import variable
from muster.hosts.code import unpack_code

#: Code that no start has asked for in so many seconds goes.
_OLD_S = 30 * 86_400.0
#: What is half done goes after so many seconds.
_LEFT_S = 86_400.0
_SUM = ".sum"
_OTHER_PLACE = "name another folder with --setup 'export XDG_CACHE_HOME=…'"


class KeptCode:
    """Raises SetupError where nothing can be kept, or others could put theirs in its place."""

    def __init__(self) -> None:
        self.cache = Path(variable("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster"
        try:
            self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SetupError(
                f"{self.cache}, where code is kept for the next start, cannot be made "
                f"({error.strerror}): make its place writable, or {_OTHER_PLACE}"
            ) from None
        for folder in (self.cache.parent, self.cache):
            _refuse_foreign(folder)
        self.folder = closed(self.cache / "code")

    def lay_out(self, digest: str, into: Path) -> bool:
        """A copy of this code in the folder, if all of it is here: a program may write into its
        working folder, and the next one is to find it clean."""
        kept = self.folder / digest
        if not kept.is_dir():
            return False
        os.utime(kept)
        if not _is_whole(kept):
            with suppress(OSError):  # another start has removed it meanwhile
                _remove(kept)
            return False
        for root in (one for one in kept.iterdir() if one.is_dir()):
            shutil.copytree(root, into / root.name, dirs_exist_ok=True)
        return True

    def take(self, digest: str, packed: IO[bytes]) -> None:
        """Keep what is in this tar file, which has this hash."""
        kept = self.folder / digest
        beside = kept.with_name(f".{digest}-{secrets.token_hex(4)}")
        try:
            unpack_code(packed, beside)
            (beside / _SUM).write_text(_sum_of(beside))
            with suppress(OSError):  # another start has brought the same meanwhile
                beside.rename(kept)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for old in self.folder.iterdir():
            with suppress(OSError):
                limit_s = _LEFT_S if old.name.startswith(".") else _OLD_S
                if time.time() - old.lstat().st_mtime > limit_s:
                    _remove(old)


def _refuse_foreign(folder: Path) -> None:
    """SetupError where somebody else could put code of his own in the place of what lies there."""
    if sys.platform == "win32":
        return
    about = folder.stat()
    whose = ""
    if about.st_uid not in (0, os.getuid()):
        whose = f"belongs to user {about.st_uid}"
    elif about.st_mode & stat.S_ISVTX:  # as of /tmp: nobody can replace what is another's
        pass
    elif about.st_mode & stat.S_IWOTH:
        whose = "can be written by everybody"
    elif about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid):
        whose = f"can be written by the group {about.st_gid}"
    if whose:
        raise SetupError(
            f"{folder}, where code is kept for the next start, {whose}: others could put theirs in "
            f"its place; close it to them (chmod go-w {folder}), or {_OTHER_PLACE}"
        )


def _is_own_group(number: int) -> bool:
    """Whether a group is its user's alone, as many systems make one for each user."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def closed(folder: Path) -> Path:
    """A folder that is this user's and closed to others, made where there is none."""
    folder.mkdir(exist_ok=True, mode=0o700)
    if sys.platform != "win32":
        _refuse_foreign(folder)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise SetupError(f"{folder} is no folder of this user's own; remove it")
        folder.chmod(0o700)
    return folder


def _remove(path: Path) -> None:
    """What is half removed has a name that nobody takes for the whole."""
    hidden = path.with_name(f".gone-{secrets.token_hex(4)}")
    path.rename(hidden)
    if hidden.is_dir():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink()


def _is_whole(kept: Path) -> bool:
    try:
        return (kept / _SUM).read_text() == _sum_of(kept)
    except OSError:
        return False


def _sum_of(kept: Path) -> str:
    """A hash of the names and the contents of the code."""
    found = sha256()
    for path in sorted(path for path in kept.rglob("*") if path.is_file() and path.name != _SUM):
        found.update(f"{path.relative_to(kept)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            found.update(file_digest(file, "sha256").digest())
    return found.hexdigest()
