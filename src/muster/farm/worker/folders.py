"""The folders of a command: its attempt's own, and the one that all attempts of its task share.

Most commands leave both of them empty. To make and to remove them may cost more than all else that
is done for a command: on ext4 a quarter of a millisecond of a processor and more, and milliseconds
of waiting where the disk is mounted with ``discard``. So a worker keeps an empty folder, and
renames it to the place where the next command looks for its own. Decision 0051 says when that is
safe; the shared folder is made and removed, as another attempt on another host may have it open.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_NUM_KEPT = 1
#: What makes a folder another one than it was, beside what is in it: its mode and who owns it.
_Nature = tuple[int, int, int]


class Folders:
    """Makes the folders of commands, one command at a time, and removes those that stay empty."""

    def __init__(self, spare: Path | None = None) -> None:
        """``spare``: what the names of kept folders begin with; None: none is kept."""
        self._free = [] if spare is None else names_of_kept(spare)
        self._kept: list[tuple[str, _Nature]] = []
        self._in_use: dict[str, _Nature] = {}

    @property
    def are_kept(self) -> bool:
        """Whether this process keeps folders, so that it has to know what a command has left."""
        return bool(self._free or self._kept)

    def make(self, path: str) -> None:
        """Make the folder, or leave it as it is where it is there."""
        self._in_use.clear()  # one command at a time: what was not dropped is published
        if self._kept:
            name, nature = self._kept.pop()
            self._free.append(name)
            try:
                os.rename(f"{name}/", path)  # with the slash nothing but a folder is taken
            except OSError:  # something is in the folder, or it is on another disk
                pass
            else:
                self._in_use[path] = nature
                return
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        if self._free:
            self._in_use[path] = _nature_of(path)

    def drop(self, path: str, *, is_quiet: bool) -> bool:
        """Remove the folder where it is empty; returns whether it is gone. ``is_quiet``: no process
        is left that might have it open.
        """
        nature = self._in_use.pop(path, None)
        if is_quiet and nature and self._free and self._keep(path, nature):
            return True
        return removed_where_empty(path)

    def _keep(self, path: str, nature: _Nature) -> bool:
        try:
            # A link to an empty folder has the same nature at both times, and is no folder of ours.
            if os.listdir(path) or _nature_of(path) != nature or not stat.S_ISDIR(nature[0]):
                return False
            os.rename(path, self._free[-1])
        except OSError:  # it is gone, or the place for it is
            return False
        self._kept.append((self._free.pop(), nature))
        return True


def removed_where_empty(path: str) -> bool:
    """Whether the folder is gone."""
    try:
        os.rmdir(path)  # noqa: PTH106
    except OSError:
        return False
    return True


def names_of_kept(spare: Path) -> list[str]:
    """Where the folders are that a worker keeps."""
    return [f"{spare}.{number}" for number in range(_NUM_KEPT)]


def remove_kept(spare: Path) -> None:
    """Remove what a worker has kept that is gone."""
    for name in names_of_kept(spare):
        with suppress(OSError):
            os.rmdir(name)  # noqa: PTH106
    with suppress(OSError):
        spare.parent.rmdir()


def _nature_of(path: str) -> _Nature:
    status = os.lstat(path)
    return status.st_mode, status.st_uid, status.st_gid
