"""One lock file per GPU, so that two runs of one host do not take the same GPU.

Guaranteed: at most one live lease per GPU among all processes that use the same lease folder;
the lease ends with its process, also by kill -9, and a child that survives does not keep it.
Not guaranteed: anything against programs that do not take leases, across hosts, or between
containers that do not share the folder. What is written about the holder is for people: it is
neither atomic nor trusted.

The lock is the kernel's (flock) on ``<uuid>.lock``. The holder is described beside it, in
``<uuid>.json``, which is written in place: the folder is sticky like /tmp, so that nobody may
rename a file over one of another user.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from muster.base.clock import Clock, SystemClock, iso_utc
from muster.base.errors import SetupError
from muster.base.processes import lineage
from muster.base.settings import Settings
from muster.devices.device_request import DeviceRequest
from muster.devices.inventory import Inventory
from muster.devices.placement import Placement, place

_CLOCK = SystemClock()
#: Of a holder's text, which anybody may write, as much as is read.
_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class LeaseHeld:
    """Somebody else has the GPU. What they did not write down, or not yet, is None."""

    uuid: str
    pid: int | None = None
    user: str | None = None
    run: str | None = None
    since: str | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "leased by another muster run"
        since = f" since {self.since}" if self.since else ""
        return (
            f"leased by run {self.run or 'unknown'} of {self.user or 'unknown user'} "
            f"(pid {self.pid}){since}"
        )


class Lease:
    """A held lock on one GPU. Keep it for as long as the GPU is used; ``release`` is idempotent."""

    def __init__(self, uuid: str, lock: FileLock, sidecar: Path) -> None:
        self.uuid = uuid
        self._lock = lock
        self._sidecar = sidecar

    def release(self) -> None:
        if self._lock.is_locked:
            # Emptied while still locked: the next holder may have written by the time we are out.
            with suppress(OSError):
                _write_in_place(self._sidecar, b"")
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def acquire(
    uuid: str, run_name: str, settings: Settings, clock: Clock = _CLOCK
) -> Lease | LeaseHeld:
    """Take the GPU without waiting, or say who has it.

    A second lease in the same process is refused too: it would be a second use of the GPU. Raises
    SetupError where the lease folder cannot be used.
    """
    folder = settings.lease_folder
    name = uuid.replace("/", "_")
    sidecar = folder / f"{name}.json"
    try:
        _make_shared_folder(folder)
        # The lock is not bound to a thread: another one than took the lease may give it back.
        lock = FileLock(folder / f"{name}.lock", mode=0o666, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return _read_holder(uuid, sidecar)
    except OSError as error:
        raise SetupError(
            f"Cannot lease GPU {uuid} in {folder}: {error.strerror or error}. "
            "Without a lease two runs could take the same GPU.",
            hint="make the folder writable for everybody (chmod 1777), or name another with "
            "MUSTER_LEASE_DIR, the same for all users of this host.",
        ) from None
    record = {
        "pid": os.getpid(),
        "user": settings.user,
        "run": run_name,
        "since": iso_utc(clock.wall_s()),
    }
    # The lock counts and the text only explains it, so a full disk must not cost the GPU.
    with suppress(OSError):
        _write_in_place(sidecar, json.dumps(record).encode() + b"\n")
    return Lease(uuid, lock, sidecar)


def held_by(uuid: str, settings: Settings) -> LeaseHeld | None:
    """Who says that they hold the GPU, and lives; None where nobody does. It takes no lock, so it
    is for looking only."""
    import psutil

    held = _read_holder(uuid, settings.lease_folder / f"{uuid.replace('/', '_')}.json")
    return held if held.pid is not None and psutil.pid_exists(held.pid) else None


def place_and_lease(
    request: DeviceRequest,
    inventory: Inventory,
    *,
    per_gpu: int,
    gpus_per_task: int,
    force: bool,
    run_name: str,
    settings: Settings,
    kept: Mapping[str, Lease] = MappingProxyType({}),
) -> tuple[Placement, list[Lease]]:
    """Place and lease, around the GPUs that other runs have leased.

    Two runs that each ask for two of four GPUs at the same moment both get two. With ``force``,
    and in a task of a sweep, which has leased them, a GPU leased by somebody else is used all the
    same, without a lease. ``kept``, leases by GPU that the caller has, become the placement's.
    Raises what ``place`` and ``acquire`` raise; only what was kept stays leased then.
    """
    leases = dict(kept)
    held: dict[str, str] = {}
    with _released_on_error(leases, kept):
        while True:
            placement = place(
                request,
                inventory,
                per_gpu=per_gpu,
                gpus_per_task=gpus_per_task,
                cpu_count=settings.cpu_count,
                force=force or settings.is_task,
                leased=held,
                own_pids=lineage(),
            )
            for uuid in _uuids(placement):
                if uuid in leases or uuid in held:
                    continue
                answer = acquire(uuid, run_name, settings)
                if isinstance(answer, LeaseHeld):
                    held[uuid] = str(answer)
                    # Choose again at once: two runs that go on collecting could each end up with
                    # half of what either needs. Each round knows one more GPU, so they end.
                    break
                leases[uuid] = answer
            else:
                return placement, _only_needed(leases, placement)


@contextmanager
def _released_on_error(leases: dict[str, Lease], kept: Mapping[str, Lease]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for uuid in leases.keys() - kept.keys():
            leases[uuid].release()
        raise


def _only_needed(leases: dict[str, Lease], placement: Placement) -> list[Lease]:
    """The leases that the slots use; the others are given back."""
    needed = set(_uuids(placement))
    for uuid in leases.keys() - needed:
        leases[uuid].release()
    return [lease for uuid, lease in leases.items() if uuid in needed]


def _uuids(placement: Placement) -> list[str]:
    return list(dict.fromkeys(uuid for slot in placement.slots for uuid in slot.device_uuids))


def _make_shared_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # mkdir obeys this user's umask, which would lock the other users out. Sticky: nobody may
    # remove the lock file of another user. Losing the race to create it means it is not ours.
    with suppress(PermissionError):
        folder.chmod(0o1777)


def _write_in_place(path: Path, data: bytes) -> None:
    try:
        # No O_CREAT here: Linux refuses it in sticky folders for files of other users.
        handle = _open_regular(path, os.O_WRONLY)
    except FileNotFoundError:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if hasattr(os, "fchmod"):
            os.fchmod(handle, 0o666)
    with os.fdopen(handle, "wb") as file:
        file.truncate()
        file.write(data)


def _open_regular(path: Path, flags: int) -> int:
    """Open a file in a folder that everybody may write to; OSError for what is no regular file.

    A link would lead to another file, and a planted FIFO would make the opening wait for ever.
    """
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def _read_holder(uuid: str, sidecar: Path) -> LeaseHeld:
    """What the holder wrote; where the text is missing, torn or another's, all of it is unknown."""
    try:
        with os.fdopen(_open_regular(sidecar, os.O_RDONLY), "rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return LeaseHeld(uuid=uuid)
    if not isinstance(record, dict):
        return LeaseHeld(uuid=uuid)
    pid = record.get("pid")
    return LeaseHeld(
        uuid=uuid,
        pid=pid if isinstance(pid, int) else None,
        user=_text(record.get("user")),
        run=_text(record.get("run")),
        since=_text(record.get("since")),
    )


def _text(value: Any) -> str | None:
    """The text as a terminal may show it, since another user wrote it: one short printable line."""
    if not isinstance(value, str):
        return None
    return "".join(c if c.isprintable() else "?" for c in value)[:200]
