"""The runs that are looked at: found below the roots, named by a hash of their place."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING

from muster.api.runs import Run
from muster.base.errors import SetupError, UsageError
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    from muster.web.table import TaskTable


def id_of(path: Path) -> str:
    """The same for the same folder, however it is reached.

    >>> len(id_of(Path("/"))), id_of(Path("/.")) == id_of(Path("/"))
    (12, True)
    """
    return blake2b(os.fsencode(os.path.realpath(path)), digest_size=6).hexdigest()


_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW
#: To go through a folder, which needs no right to list it.
_THROUGH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY


class Folder:
    """A run folder with what is remembered of it from one request to the next."""

    def __init__(self, path: Path) -> None:
        self.id = id_of(path)
        self.folder = RunFolder(path)

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def run(self) -> Run:
        """Raises SetupError where it cannot be read, or is not there any more."""
        try:
            return Run(self.path)
        except UsageError:
            raise SetupError(
                f"{self.path} is not there any more.",
                hint="it was removed or moved; `muster list` shows the runs that there are.",
            ) from None
        except OSError as error:
            raise SetupError(f"Cannot read {self.path}: {error.strerror or error}.") from None

    def expect_tasks(self) -> Run:
        """Raises UsageError where there are ranks instead of tasks, or no ledger yet."""
        run = self.run
        run.expect_tasks()
        return run

    def changed_s(self) -> float:
        """Unix time: when something was last written down about it; 0.0 where that is unknown."""
        paths = (self.folder.run_json, self.folder.events, self.folder.ledger)
        found = [0.0]
        for path in paths:
            with suppress(OSError):
                found.append(path.stat().st_mtime)
        return max(found)

    @property
    def is_table_wanted(self) -> bool:
        """Whether somebody has looked at the tasks."""
        return "table" in self.__dict__

    @cached_property
    def table(self) -> TaskTable:
        from muster.web.table import TaskTable

        return TaskTable(self.folder)


class Folders:
    """All runs directly below the roots; a root may be a run itself."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._known: dict[str, Folder] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Folder]:
        """Those that are there now, the one that worked last first."""
        found = {id_of(path): path for root in self.roots for path in _runs_in(root)}
        with self._lock:  # a run has one Folder, whoever asks first
            self._known = known = {
                name: self._known.get(name) or Folder(path) for name, path in found.items()
            }
        return sorted(known.values(), key=Folder.changed_s, reverse=True)

    def find(self, name: str) -> Folder:
        """Raises UsageError where there is no such run."""
        if name not in self._known:
            self.all()
        if name not in self._known:
            raise UsageError(
                f"There is no run {name[:20]!r} here.",
                hint="it may have been removed; the first page shows the runs that there are.",
            )
        return self._known[name]


def opened(root: Path, name: str) -> IO[bytes]:
    """A file below ``root``, to be read. Raises OSError for what leads out of it, for a link
    anywhere below it, and for anything but a file, whatever takes its place at whatever moment:
    each folder is opened within the one before. Nobody waits for a pipe.
    """
    *inner, last = parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root / name))
    try:
        where = os.open(root, _THROUGH)
        try:
            for part in inner:
                found = os.open(part, _THROUGH | os.O_NOFOLLOW, dir_fd=where)
                os.close(where)
                where = found
            descriptor = os.open(last, _NO_LINK | os.O_NONBLOCK, dir_fd=where)
        finally:
            os.close(where)
    except OSError as error:
        error.filename = str(root / name)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(root / name))
    return os.fdopen(descriptor, "rb")


def _runs_in(root: Path) -> Iterator[Path]:
    if _is_run(root):
        yield root
        return
    with suppress(OSError):
        for path in root.iterdir():
            first_stage = RunFolder(path).stage(0)  # of a map that has only stages so far
            if _is_run(path):
                yield path
            elif _is_run(first_stage):
                yield first_stage


def _is_run(path: Path) -> bool:
    """Whether there is a run, even one that this user may not read."""
    try:
        return RunFolder(path).exists()
    except PermissionError:
        return True
    except OSError:
        return False
