"""One coordinator per run folder; whether there is one can be seen without disturbing it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from muster.base.atomic_files import explain_os_error
from muster.base.errors import SetupError
from muster.run.folder import RunFolder

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
            if _holder(folder) == str(os.getpid()):
                with suppress(OSError):
                    pid_file.unlink(missing_ok=True)


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
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request())
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    if sys.platform != "linux":
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
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request())
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
    lock = FileLock(folder.lock)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:
        return _is_alive_here(folder)
    lock.release()
    return False


def _request() -> bytes:
    """A request for a write lock on the whole file."""
    assert sys.platform == "linux"
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _busy(folder: RunFolder) -> SetupError:
    holder = _holder(folder)
    who = f"process {holder}" if holder else "another process"
    return SetupError(
        f"{folder.path} is being worked on by {who}.",
        hint=f"watch it with `muster status {folder.path}`, or end it with "
        f"`muster cancel {folder.path}`.",
    )


def _holder(folder: RunFolder) -> str:
    """The holder's process id, with its host if that is another one; "" where it is not known."""
    try:
        pid, _, host = folder.lock.with_suffix(".pid").read_text().partition(" ")
    except OSError:
        return ""
    elsewhere = f" on {host}" if host and host != socket.gethostname() else ""
    return f"{pid}{elsewhere}" if pid else ""


def _is_alive_here(folder: RunFolder) -> bool:
    pid, _, elsewhere = _holder(folder).partition(" ")
    if not pid.isdigit() or elsewhere:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
