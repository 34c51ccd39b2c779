"""What a worker writes beside results: its log, everything that its tasks print, one file per slot,
with an offset per task; and the folders of a command, its attempt's own and the one that all
attempts of its task share.

Most commands leave both folders empty. To make and to remove them may cost more than all else that
is done for a command: on ext4 a quarter of a millisecond of a processor and more, and milliseconds
of waiting where the disk is mounted with ``discard``. So a worker keeps an empty folder, and
renames it to the place where the next command looks for its own. Decision 0051 says when that is
safe; the shared folder is made and removed, as another attempt on another host may have it open.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import logging


#: A task keeps this much of its output, from both ends, once the log is bounded.
TASK_CAP = 1 << 20
SMALL_TASK_CAP = 4 << 10
#: Above this size a log keeps only the ends of further tasks.
LOG_CAP = 64 << 20
_TAIL_FOR_TRACE = 4 << 10


class TaskLog:
    """Marks where in the log (file descriptor 1) the output of the running task begins."""

    def __init__(self, path: Path | None) -> None:
        """``path``: the file behind descriptor 1, or None in the coordinator's own process,

        where output goes to the user's screen and must not be measured or cut.
        """
        self.path = self._path = path
        self._streams = (sys.stdout, sys.stderr)
        # A task may close or redirect its output; the next one's goes into the log again.
        self._kept: tuple[int, ...] = tuple(map(os.dup, (0, 1, 2))) if path is not None else ()
        self.start = self.position()

    def position(self) -> int:
        """How large the log is. To go to its end costs a third of asking for its size, and it is
        only added to, so that nobody minds where one stands in it.
        """
        if self._path is None:
            return 0
        return os.lseek(self._kept[1], 0, os.SEEK_END)

    def begin(self) -> int:
        self.start = self.position()
        return self.start

    def end(self) -> int:
        """Flush, bound the task's share of the file, and return where its output ends."""
        self._restore()
        end = self.position()
        cap = TASK_CAP if end < LOG_CAP else SMALL_TASK_CAP
        if end - self.start > cap:
            end = self._cut_middle(end, cap)
        return end

    def say(self, line: str) -> None:
        """Write a line of Muster's own, whatever the task has done to its output."""
        self._restore()
        os.write(self._kept[1] if self._kept else 1, f"{line}\n".encode("utf-8", "replace"))

    def tail(self) -> str:
        """The end of what the task has printed, for a failure report."""
        if self._path is None:
            return ""
        end = self.position()
        size = min(_TAIL_FOR_TRACE, end - self.start)
        return self._read(end - size, size).decode("utf-8", "replace")

    def _restore(self) -> None:
        for number, kept in enumerate(self._kept):
            os.dup2(kept, number)  # in less time than it takes to see whether it is needed
        if not self._are_untouched():
            self._renew_streams()

    def _are_untouched(self) -> bool:
        """Whether the streams are still those of the last task; what they hold is written then."""
        out, err = self._streams
        if sys.stdout is not out or sys.stderr is not err:
            return False
        try:
            out.flush()
            err.flush()
        except Exception:  # closed, or of the task's own making
            return False
        return not (out.closed or err.closed)

    def _renew_streams(self) -> None:
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            with suppress(Exception):  # anything may stand there by now
                getattr(sys, name).flush()
            if getattr(stream, "closed", False):
                stream = _reopened(1 if name == "stdout" else 2)
            setattr(sys, name, stream)
        self._streams = (sys.stdout, sys.stderr)

    def _read(self, start: int, size: int) -> bytes:
        assert self._path is not None
        with self._path.open("rb") as log:
            log.seek(start)
            return log.read(size)

    def _cut_middle(self, end: int, cap: int) -> int:
        half = cap // 2
        tail = self._read(end - half, half)
        os.ftruncate(1, self.start + half)
        os.write(1, f"\n... {end - self.start - cap} bytes cut ...\n".encode())
        os.write(1, tail)
        return self.position()


class Place:
    """The working folder and the mask of new files, which tasks may change for themselves only."""

    def __init__(self) -> None:
        self._folder = os.getcwd()  # noqa: PTH109  (asked after each task: a Path costs too much)
        self._mask = os.umask(0o077)
        os.umask(self._mask)

    def restore(self) -> None:
        os.umask(self._mask)
        try:
            is_here = os.getcwd() == self._folder  # noqa: PTH109
        except OSError:  # the folder it is in was removed
            is_here = False
        if not is_here:
            os.chdir(self._folder)


def _reopened(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def task_logger(run: str, task: str, attempt: int) -> logging.Logger:
    """A logger whose lines carry run, task, attempt and process id."""
    import logging

    logger = logging.getLogger("muster.task")
    form = f"%(asctime)s %(levelname)s {run} {task} attempt={attempt} pid=%(process)d %(message)s"
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stdout))
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logger.handlers[0].setFormatter(logging.Formatter(form))
    return logger


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
