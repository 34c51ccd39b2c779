"""The runs that are looked at: found below the roots, named by a hash of their place."""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, TypeVar

from muster.api.runs import Run
from muster.base.errors import SetupError, UsageError
from muster.run.folder import EXPERIMENT_FILE, RunFolder, id_of
from muster.run.session import is_held

if TYPE_CHECKING:
    from muster.web.table import TaskTable


_T = TypeVar("_T")
#: The bytes of a run are counted at most so often.
_SIZE_S = 30.0
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW
#: To go through a folder, which needs no right to list it.
_THROUGH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY


#: When a file was changed, and its size.
Stamp = tuple[int, int]


def stamp_of(path: Path) -> Stamp | None:
    """None for a file that is missing or empty: SQLite's log comes and goes with whoever looks."""
    with suppress(OSError):
        found = path.stat()
        if found.st_size:
            return found.st_mtime_ns, found.st_size
    return None


def stamps_of(paths: Iterable[Path]) -> tuple[Stamp, ...]:
    return tuple(stamp for path in paths if (stamp := stamp_of(path)) is not None)


class Folder:
    """A run folder with what is remembered of it from one request to the next."""

    def __init__(self, path: Path) -> None:
        self.id = id_of(path)
        self.folder = RunFolder(path)
        self._known: dict[str, tuple[object, float, Any]] = {}
        self._making = threading.RLock()
        self._size: tuple[float, float, float, int | None] = (-1.0, -math.inf, 0.0, None)
        self._waits_for_size = False

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
        stamp = stamp_of(self.folder.ledger)
        return max(self.folder.last_at_work_s, 0.0 if stamp is None else stamp[0] / 1e9)

    def remembered(
        self, name: str, stamp: object, make: Callable[[], _T], every_s: float = 0.0
    ) -> _T:
        """What ``make`` made, made anew where ``stamp`` is another one by now; of a run that goes
        on, at most every ``every_s``: of one that has ended nobody may ask again. What takes long
        is made once, however many ask.
        """
        with self._making:
            known, made_s, value = self._known.get(name, (None, -math.inf, None))
            is_fresh = 0 <= time.monotonic() - made_s < every_s
            if name not in self._known or (
                known != stamp and not (is_fresh and is_held(self.folder))
            ):
                value = make()
                self._known[name] = stamp, time.monotonic(), value
            found: _T = value
            return found

    def size(self) -> int | None:
        """Bytes in the folder, as they were counted last; None until they were. They are counted
        beside whoever asks, one run after the other, and again when something has changed: a run
        may have a million files.
        """
        stamp = self.changed_s()
        counted, when, pause, num_bytes = self._size
        if counted != stamp and time.monotonic() - when >= pause and not self._waits_for_size:
            self._waits_for_size = True
            _counter().put(self)
        return num_bytes

    def count(self) -> None:
        """Count the bytes in the folder now, see `size`."""
        begin_s, stamp, total = time.monotonic(), self.changed_s(), 0
        try:
            for place, _, names in os.walk(self.path):
                for name in names:
                    with suppress(OSError):
                        total += os.lstat(f"{place}/{name}").st_size
            now_s = time.monotonic()
            self._size = stamp, now_s, max(_SIZE_S, 100 * (now_s - begin_s)), total
        finally:
            self._waits_for_size = False

    def stamp(self) -> tuple[object, ...]:
        """Another one whenever something was written down about its tasks or its starts."""
        run = self.folder
        files = (*run.ledger_files, run.run_json, run.events, run.published_json)
        return is_held(run), *stamps_of(files)

    @property
    def is_table_wanted(self) -> bool:
        """Whether somebody has looked at the tasks."""
        return "table" in self.__dict__

    @cached_property
    def table(self) -> TaskTable:
        from muster.web.table import TaskTable

        return TaskTable(self.folder)


@cache
def _counter() -> SimpleQueue[Folder]:
    """Where the folders wait whose bytes are to be counted."""
    waiting: SimpleQueue[Folder] = SimpleQueue()

    def count_all() -> None:
        while True:
            with suppress(OSError):
                waiting.get().count()

    threading.Thread(target=count_all, daemon=True).start()
    return waiting


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
    if RunFolder(root).exists():
        yield root
        return
    with suppress(OSError):
        for path in root.iterdir():
            first_stage = RunFolder(path).stage(0)  # of a map that has only stages so far
            if RunFolder(path).exists():
                yield path
            elif (path / EXPERIMENT_FILE).is_file():  # each of its phases is a run
                yield from (one for one in path.iterdir() if RunFolder(one).exists())
            elif RunFolder(first_stage).exists():
                yield first_stage
