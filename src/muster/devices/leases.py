"""One lock file per GPU, so that two runs of one host do not take the same GPU.

Guaranteed: at most one live lease per GPU among all processes that use the same lease folder;
the lease ends with its process, also by kill -9, and a child that survives does not keep it.
Not guaranteed: anything against programs that do not take leases, across hosts, or between
containers that do not share the folder.

The lock is the kernel's (flock) on ``<uuid>.lock``. Who has it is said beside it, by a note of the
holder's own (see ``tickets``): that is for people and for the order in the queue, and decides
nothing about the lock. The folder is sticky like /tmp, so that nobody may remove or rename what is
another user's.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from muster.base.clock import iso_utc
from muster.base.errors import SetupError
from muster.base.processes import lineage
from muster.base.settings import Settings
from muster.devices.inventory import DeviceRequest, Inventory
from muster.devices.placement import Placement, place
from muster.devices.queue import Rules
from muster.devices.queue_rules import read_rules
from muster.devices.tickets import Note, Use, add_up, own_uid, read_notes, user_name

if TYPE_CHECKING:
    from filelock import FileLock

_TOUCH_EVERY_S = 20.0


@dataclass(frozen=True, kw_only=True)
class LeaseHeld:
    """Somebody else has the GPU. What they did not write down, or not yet, is None."""

    uuid: str
    pid: int | None = None
    user: str | None = None
    run: str | None = None
    since: str | None = None
    problem: str = ""  # why its lock says nothing

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.pid is None:
            return "leased by another muster run"
        since = f" since {self.since}" if self.since else ""
        return (
            f"leased by run {self.run or 'unknown'} of {self.user or 'unknown user'} "
            f"(pid {self.pid}){since}"
        )


class Lease:
    """A held lock on one GPU. Keep it for as long as the GPU is used; ``release`` is idempotent."""

    def __init__(
        self, uuid: str, lock: FileLock, claim: Note | None, record: dict[str, object],
        settings: Settings,
    ) -> None:  # fmt: skip
        self.uuid = uuid
        self._lock = lock
        self._claim = claim
        self._record = record
        self._settings = settings
        self._begun_s = self._touched_s = time.monotonic()
        self._file = _file_at(Path(lock.lock_file))
        self._is_ours = True

    def release(self) -> None:
        if not self._lock.is_locked:
            return
        if self._claim is not None:
            self._claim.remove()
        self._lock.release()
        half_life_s = Rules().half_life_s
        with suppress(SetupError):
            half_life_s = read_rules(self._settings).half_life_s
        used = Use(time.monotonic() - self._begun_s, 1.0)
        add_up(self._settings.lease_folder, half_life_s, used)

    def touch(self, left_s: float | None = None) -> str:
        """Say that it is still used, and for how much longer where that is known. Cheap.

        Returns, once, what the user should know: that the lock was removed and another run has it.
        """
        if time.monotonic() - self._touched_s < _TOUCH_EVERY_S:
            return ""
        self._touched_s = time.monotonic()
        told = self._keep_lock()
        if self._claim is not None:
            ends = {} if left_s is None else {"ends_s": time.time() + left_s}
            with suppress(OSError):
                self._claim.put({**self._record, **ends})
        return told

    def _keep_lock(self) -> str:
        """Keep the file young, so that whatever clears old files out of /tmp leaves it; take the
        lock anew where it was removed. Returns a warning where another run was faster."""
        path = Path(self._lock.lock_file)
        is_there = False
        with suppress(OSError):
            is_there = self._file is not None and _file_at(path) == self._file
        if is_there:
            with suppress(OSError):  # a disk that takes no times has not lost the lock
                os.utime(path, follow_symlinks=False)
            return ""
        had, self._is_ours = self._is_ours, False
        with suppress(OSError, SetupError):
            make_shared_folder(path.parent)
            if (lock := _locked(path)) is not None:
                self._lock.release()
                self._lock, self._file, self._is_ours = lock, _file_at(path), True
                return ""
        return (
            f"the lock {path} of this run was removed, and another run may use GPU {self.uuid} too"
            if had else ""
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(uuid: str, run_name: str, settings: Settings) -> Lease | LeaseHeld:
    """Take the GPU without waiting, or say who has it.

    A second lease in the same process is refused too: it would be a second use of the GPU. Raises
    SetupError where the lease folder cannot be used.
    """
    folder = settings.lease_folder
    path = folder / f"{uuid.replace('/', '_')}.lock"
    try:
        make_shared_folder(folder)
        if (lock := _locked(path)) is None:
            return held_by(uuid, settings) or LeaseHeld(uuid=uuid)
    except OSError as error:
        if (owner := _who_planted(path, error)) is not None:
            why = f"its lock {path} is {user_name(owner)}'s and cannot be opened"
            return LeaseHeld(uuid=uuid, problem=f"{why}: {error.strerror or error}")
        raise SetupError(
            f"Cannot lease GPU {uuid} in {folder}: {error.strerror or error}. "
            "Without a lease two runs could take the same GPU.",
            hint="make the folder writable for everybody (chmod 1777), or name another with "
            "MUSTER_LEASE_DIR, the same for all users of this host.",
        ) from None
    record: dict[str, object] = {
        "device": uuid,
        "pid": os.getpid(),
        "run": run_name,
        "since_s": time.time(),
    }
    claim = None
    with suppress(OSError):  # the lock counts: a full disk must not cost the GPU
        claim = Note(folder, "claim", record)
    return Lease(uuid, lock, claim, record, settings)


def _locked(path: Path) -> FileLock | None:
    """The lock, taken; None where somebody has it. Raises OSError where it cannot be opened."""
    from filelock import FileLock, Timeout  # where there is a GPU

    # It is not bound to a thread: another one than took the lease may give it back.
    lock = FileLock(path, mode=0o666, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _who_planted(path: Path, error: OSError) -> int | None:
    """The other user whose file in this place is why the lock cannot be opened; it costs this one
    GPU. None where the folder itself cannot be used."""
    try:
        about = path.lstat()
    except OSError:
        return None
    is_the_file = isinstance(error, PermissionError) or not stat.S_ISREG(about.st_mode)
    return about.st_uid if is_the_file and about.st_uid != own_uid() else None


def held_by(uuid: str, settings: Settings) -> LeaseHeld | None:
    """Who says that they hold the GPU, and lives; None where nobody does. It takes no lock, so it
    is for looking only."""
    return holders(settings).get(uuid)


def holders(settings: Settings) -> dict[str, LeaseHeld]:
    """The same for all GPUs, from one look at the folder."""
    found: dict[str, LeaseHeld] = {}
    for note in read_notes(settings.lease_folder):
        if note.kind == "claim" and note.is_alive:
            uuid, since_s = str(note.record.get("device")), note.number("since_s")
            held = LeaseHeld(
                uuid=uuid,
                pid=note.pid,
                user=user_name(note.uid),
                run=note.run,
                since=iso_utc(since_s) if since_s > 0 else None,
            )
            found.setdefault(uuid, held)
    return found


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
    not_these: Mapping[str, str] = MappingProxyType({}),
    most: int | None = None,
    refused: set[str] | None = None,
) -> tuple[Placement, list[Lease]]:
    """Place and lease, around the GPUs that other runs have leased.

    Two runs that each ask for two of four GPUs at the same moment both get two. With ``force``,
    and in a task of a sweep, which has leased them, a GPU leased by somebody else is used all the
    same, without a lease. ``kept``, leases by GPU that the caller has, become the placement's.
    ``not_these``: GPUs that are kept for others, each with the reason; ``most``: how many more the
    rules allow this user. ``refused`` gets those that somebody else turned out to have.
    Raises what ``place`` and ``acquire`` raise; only what was kept stays leased then.
    """
    leases = dict(kept)
    held = dict(not_these)
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
            new = [uuid for uuid in _uuids(placement) if uuid not in kept]
            if most is not None and len(new) > most and not force:
                held |= dict.fromkeys(new[most:], "the rules of this machine allow you no more")
                continue
            for uuid in _uuids(placement):
                if uuid in leases or uuid in held:
                    continue
                answer = acquire(uuid, run_name, settings)
                if isinstance(answer, LeaseHeld):
                    held[uuid] = str(answer)
                    if refused is not None:
                        refused.add(uuid)
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


def make_shared_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # mkdir obeys this user's umask, which would lock the other users out. Sticky: nobody may
    # remove the lock file of another user. Losing the race to create it means it is not ours.
    with suppress(PermissionError):
        folder.chmod(0o1777)
