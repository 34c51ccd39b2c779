"""One start of a run: its folder made, its lock held, its record written, requests to it heard.

Whatever runs is opened here. The order matters: the record is read and written under the lock, so
that two starts cannot both begin a run, and requests of others are heard only once the record says
what they are about. The lock goes last, so whoever finds a run free finds it whole.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.base import cells
from muster.base.atomic_files import explain_os_error, sweep_idle
from muster.base.clock import SystemClock
from muster.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_SOME_FAILED,
    MusterError,
    PlanMismatchError,
    SetupError,
)
from muster.base.journal import Journal
from muster.base.processes import is_stopped
from muster.base.shown_text import shell_word
from muster.base.signals import Interrupted
from muster.run.folder import RunFolder
from muster.run.record import FolderId, RunRecord, own_id, read_run, write_run
from muster.run.requests import Ask, Mailbox

if sys.platform == "linux":
    import fcntl

#: How long a start waits for those who only look, where looking takes the lock (not on Linux).
_LOOKERS_S = 0.2
_FLOCK = "@hhqqi0q"  # struct flock


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock; raises a SetupError that names the holder if somebody else has it.

    The lock belongs to the process and vanishes with it, also after kill -9.
    """
    with _locked(folder):
        pid_file = folder.lock.with_suffix(".pid")
        with suppress(OSError):  # only a name for others
            pid_file.write_text(f"{os.getpid()} {socket.gethostname()}")
        try:
            yield
        finally:
            # This folder may have been moved aside meanwhile, and the name may now be that of a new
            # run: then the file is another process's and stays.
            if holder(folder) == str(os.getpid()):
                with suppress(OSError):
                    pid_file.unlink(missing_ok=True)


def check_open(folder: RunFolder) -> None:
    """Raise what ``hold`` would raise at this moment, without taking anything: whoever waits hours
    for GPUs hears first that the run is at work, or somebody else's.
    """
    if is_held(folder):
        raise _busy(folder)
    place = folder.lock if folder.lock.exists() else folder.path
    as_who = os.access in os.supports_effective_ids
    if place.exists() and not os.access(place, os.W_OK, effective_ids=as_who):
        raise explain_os_error(PermissionError(errno.EACCES, "Permission denied"), "write", place)


def is_held(folder: RunFolder) -> bool:
    """Whether a coordinator works on this folder now. Asking never makes a start fail."""
    if not folder.lock.exists():
        return False
    if sys.platform != "linux":
        return _is_locked_elsewhere(folder)
    try:
        descriptor = os.open(folder.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:  # the lock cannot be read, so only what its holder wrote can tell
        return _is_alive_here(folder)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock_request())
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    if sys.platform != "linux":
        from filelock import FileLock, Timeout

        lock = FileLock(folder.lock)
        try:
            folder.lock.touch()
            before = os.stat(folder.lock)
            lock.acquire(timeout=_LOOKERS_S)
        except Timeout:
            raise _busy(folder) from None
        try:
            if not _has_the_name(before, folder):  # moved aside before our lock
                raise _busy(folder)
            yield
        finally:
            lock.release()
        return
    try:
        # The file is never truncated or removed, so that everybody locks the same one. But
        # ``--restart`` moves it aside with its folder, which is looked at below.
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise explain_os_error(error, "write", folder.lock) from error
    try:
        # Earlier versions of muster take the first kind of lock and see no other. The second kind
        # belongs to the open file as well, holds between the hosts of NFS, and can be asked about.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_request())
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise _busy(folder) from None
    except OSError as error:
        os.close(descriptor)
        raise explain_os_error(error, "lock", folder.lock) from error
    try:
        opened = os.fstat(descriptor)
        if not _has_the_name(opened, folder):  # moved aside between our open and our lock
            raise _busy(folder)
        yield
    finally:
        os.close(descriptor)


def _has_the_name(lock: os.stat_result, folder: RunFolder) -> bool:
    try:
        return os.path.samestat(lock, os.stat(folder.lock))
    except FileNotFoundError:
        return False


def _is_locked_elsewhere(folder: RunFolder) -> bool:
    """Whether the lock is taken. This system cannot be asked about locks, so it is tried."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.lock)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:
        return _is_alive_here(folder)
    lock.release()
    return False


def _lock_request() -> bytes:
    """A request for a write lock on the whole file."""
    assert sys.platform == "linux"
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _busy(folder: RunFolder) -> SetupError:
    known = holder(folder)
    who = f"process {known}" if known else "another process"
    return SetupError(
        f"{folder.path} is being worked on by {who}.",
        hint=f"watch it with `muster status {shell_word(folder.path)}`, or end it with "
        f"`muster cancel {shell_word(folder.path)}`.",
    )


def holder(folder: RunFolder) -> str:
    """The holder's process id, with its host if that is another one; "" where it is not known."""
    try:
        pid, _, host = folder.lock.with_suffix(".pid").read_text().partition(" ")
    except OSError:
        return ""
    elsewhere = f" on {host}" if host and host != socket.gethostname() else ""
    return f"{pid}{elsewhere}" if pid else ""


def stopped_process(folder: RunFolder) -> str:
    """The number of the process that works on the folder from here, if it is stopped (Ctrl-Z)."""
    pid, _, elsewhere = holder(folder).partition(" ")
    return pid if pid.isdigit() and not elsewhere and is_stopped(int(pid)) else ""


def _is_alive_here(folder: RunFolder) -> bool:
    pid, _, elsewhere = holder(folder).partition(" ")
    if not pid.isdigit() or elsewhere:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


#: Are told the folder of a run once its work begins here, which somebody may wait for.
on_begin: list[Callable[[RunFolder], None]] = []

#: Makes the record that a folder shall have of the one that it has (None: it has none); raises
#: where the run may not begin or go on.
Renew = Callable[[RunRecord | None], RunRecord]


class Session:
    """A start of a run that is under way. ``is_cancelled()``: whether somebody cancels the run."""

    def __init__(
        self, folder: RunFolder, node: int | None, mailbox: Mailbox | None, fresh_id: str = ""
    ) -> None:
        self._folder = folder
        self._fresh_id = fresh_id
        self._where = {} if node is None else {"node": node}
        self._mailbox = mailbox
        self._journal: Journal | None = None
        self._has_ended = self._is_over = False

    @cached_property
    def folder_id(self) -> FolderId:
        """The id of its very folder, drawn where this one has none yet."""
        return own_id(self._folder, self._fresh_id)

    def is_cancelled(self) -> bool:
        return self._mailbox is not None and self._mailbox.is_cancelled()

    def asked(self) -> list[Ask]:
        """What others have asked since the last call, each to be answered."""
        return [] if self._mailbox is None else self._mailbox.asked()

    def begin(self, **fields: Any) -> Journal:
        """Write down that the work begins; the journal is for what happens to it."""
        self._journal = Journal(self._folder.events, SystemClock())
        self._journal.write("start", **fields, **self._where)
        for tell in on_begin:
            tell(self._folder)
        return self._journal

    def end(self, **fields: Any) -> None:
        """Write down how it ended, where an exception does not say it."""
        assert self._journal is not None
        self._has_ended = True
        self._journal.write("end", **self._where, **fields)

    def note(self, event: str, **fields: Any) -> None:
        """Write down something that happens to the run; nothing before it has begun."""
        if self._journal is not None:
            self._journal.write(event, **self._where, **fields)

    def over(self, exit_code: int) -> None:
        """Write down what came of all of it, where that is known only after its end: when the
        table or the output is written."""
        assert self._journal is not None
        self._is_over = True
        with suppress(OSError):  # the caller knows it all the same
            self._journal.write("over", exit_code=exit_code, **self._where)

    def close(self, error: BaseException | None) -> None:
        """``error``: what ends the session, None where nothing does."""
        if self._journal is None:
            return
        if error is not None and not self._is_over:
            tell = self._journal.write
            with suppress(OSError):  # the error itself matters more
                why = {"error": str(error)} if isinstance(error, MusterError) else {}
                if isinstance(error, KeyboardInterrupt):
                    by = str(error) if isinstance(error, Interrupted) else "SIGINT"
                    why = {"stopped_by": by}
                word = "over" if self._has_ended else "end"
                tell(word, exit_code=_code_of(error), **why, **self._where)
        self._journal.close()


@contextmanager
def open_run(
    folder: RunFolder, renew: Renew | None = None, *, node: int | None = None, fresh_id: str = ""
) -> Iterator[Session]:
    """A context in which this process works on ``folder``, and nobody else does.

    ``node``: the number of this node in a gang. Nodes may share the folder, so only the first takes
    the lock, writes the record and hears requests. Leave ``renew`` out to change a run that does
    not go on: then no record is written, and no request is heard. ``fresh_id``: see `own_id`.

    Raises SetupError where somebody works on the folder or the disk fails, and what ``renew``
    raises.
    """
    try:
        if renew is not None:
            folder.create()
        with ExitStack() as stack:
            mailbox = None
            if not node:
                stack.enter_context(hold(folder))
                if renew is not None:
                    _renew(folder, renew)
                    mailbox = stack.enter_context(Mailbox(folder))
            session = Session(folder, node, mailbox, fresh_id)
            try:
                yield session
            except OSError as error:
                explained = _explained(error, folder)
                session.close(explained)
                raise explained from error
            except BaseException as error:
                session.close(error)
                raise
            session.close(None)
    except OSError as error:  # before it was begun
        raise explain_os_error(error, "use the run folder", folder.path) from error


def _explained(error: OSError, folder: RunFolder) -> SetupError:
    if error.errno == errno.ENOENT and not folder.path.exists():
        return SetupError(
            f"{folder.path} is gone: it was moved or removed while the run was at work.",
            hint="if it was moved, all that was finished moved with it; go on where it is now: "
            "muster resume NEW_PLACE",
        )
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if where and not Path(where).absolute().is_relative_to(folder.path.absolute()):
        return SetupError(  # such as a Python environment that was moved, with workers to start
            f"Cannot use {where}, which the run in {folder.path} needs: {error.strerror or error}.",
            hint="nothing finished is lost; put that right, and run the same command again to "
            "go on.",
        )
    return explain_os_error(error, "use the run folder", folder.path)


def _renew(folder: RunFolder, renew: Renew) -> None:
    before = read_run(folder) if folder.exists() else None
    if before is None and folder.ledger.exists():
        raise PlanMismatchError(
            f"{folder.path} holds a ledger but no run.json, so what it belongs to is unknown.",
            hint="choose another --run-dir, or restore run.json from a copy.",
        )
    record = renew(before)
    cells.place(folder.path)
    if record != before:
        write_run(folder, record)
    if before is not None:
        _sweep(folder, record)


def _sweep(folder: RunFolder, record: RunRecord) -> None:
    """Remove what killed starts have left beside their files. Ranks, other hosts and commands that
    take no lock may be writing some of them now.
    """
    with suppress(OSError):
        now_s = folder.lock.with_suffix(".pid").stat().st_mtime  # written with the lock
        sweep_idle(folder.path, now_s)
        if record.is_gang:  # a sweep may have a checkpoint for each task, and none beside it
            sweep_idle(folder.checkpoints, now_s)


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, MusterError) else EXIT_SOME_FAILED
