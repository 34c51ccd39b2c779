"""Notes in the lease folder: what the runs of all users of a machine say of themselves, that they
wait, what they hold, and what they have used.

Each note is a file of its own, which only its user can change, since the folder is sticky. The
kernel says whose it is (the owner of the file) and whether its process lives: the process keeps a
record lock, for which the file must be open for writing, so that nobody else can keep alive what
has died. What is written in it serves only the order in the queue and people; a run that lies
about itself gains no more than it could without muster, and takes no GPU from a lease.

===========  ===================================================================
``.ticket``  a run that waits; the time of change says when it looked last
``.claim``   a lease; that of a killed process counts up to its last change
``.used``    what a user has used, in GPU seconds; the user's own runs add it up
===========  ===================================================================
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from muster.base.atomic_files import write_all
from muster.base.shown_text import clean_text
from muster.devices.queue import Holding, Ticket, decayed_s, part_left

if sys.platform != "win32":
    import fcntl
    import pwd

Kind = Literal["ticket", "claim", "used"]

#: How much is read of a file, and how many files of one user: anybody may have written them.
_MOST_BYTES, _MOST_FILES = 8192, 256
_ENDINGS = (".ticket", ".claim", ".used", ".part")
#: A larger number in a note is not believed: in seconds this is 3,000 years.
_MOST = 1e11
#: A waiting run that has not looked for this long counts as stopped, and others go past it.
ASLEEP_S = 30.0
#: The notes of this process, by place: to open one of them and close it would give up its lock.
_ours: dict[Path, tuple[int, dict[str, Any]]] = {}


class Note:
    """A file about this process in the lease folder. Raises OSError where it cannot be written."""

    def __init__(self, folder: Path, kind: Kind, record: dict[str, Any]) -> None:
        self.path = folder / f"{time.time_ns():x}-{os.getpid()}-{os.urandom(3).hex()}.{kind}"
        self._handle = -1
        self.record: dict[str, Any] = {}
        self.put(record)

    def put(self, record: dict[str, Any]) -> None:
        """Say this instead: whoever looks finds the old text or the new one, and it locked."""
        part = self.path.with_suffix(".part")
        # Until it is locked nobody else may open it, or their lock for reading would prevent ours.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        before = _ours.get(self.path)
        try:
            write_all(handle, json.dumps(record).encode() + b"\n")
            if sys.platform != "win32":
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(handle, 0o644)
            # Before the rename: another thread of ours that finds the new file would open it, and
            # by closing it give up the lock, for record locks belong to the whole process.
            _ours[self.path] = (os.getpid(), dict(record))
            os.replace(part, self.path)
        except BaseException:
            if before is None:
                _ours.pop(self.path, None)
            else:
                _ours[self.path] = before
            os.close(handle)
            with suppress(OSError):
                part.unlink()
            raise
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = handle
        self.record = dict(record)

    def touch(self) -> None:
        """Say that the process is awake."""
        with suppress(OSError):
            os.utime(self._handle if os.utime in os.supports_fd else self.path)

    def remove(self) -> None:
        if _ours.get(self.path, (0, {}))[0] == os.getpid():  # a forked child has a copy of `_ours`
            with suppress(OSError):
                self.path.unlink()
        self.leave()

    def leave(self) -> None:
        """Leave the file as it is, without a process behind it."""
        _ours.pop(self.path, None)
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


@dataclass(frozen=True, kw_only=True)
class Found:
    """A note that somebody has written. ``is_alive``: its process has it locked."""

    path: Path
    kind: Kind
    uid: int
    changed_s: float
    is_alive: bool
    record: Mapping[str, Any]

    @property
    def run(self) -> str:
        """The name of the run as a terminal may show it."""
        text = self.record.get("run")
        return " ".join(clean_text(text[:200]).split()) if isinstance(text, str) else "unknown"

    @property
    def whose(self) -> str:
        """``run NAME of USER``, for messages."""
        return f"run {self.run} of {user_name(self.uid)}"

    @property
    def pid(self) -> int | None:
        pid = self.record.get("pid")
        return pid if isinstance(pid, int) else None

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.record.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return default
        return float(value) if abs(value) < _MOST else default

    def devices(self, name: str) -> tuple[str, ...]:
        found = self.record.get(name)
        listed = found if isinstance(found, list) else []
        return tuple(dict.fromkeys(one for one in listed if isinstance(one, str)))


class _Entry(NamedTuple):
    """A file of the folder that is a note by its name, or what a note has left."""

    name: str
    uid: int
    changed_s: float

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]


def _listed(folder: Path) -> list[_Entry]:
    """All files with the names of notes. No more than this is done for each of them: a user who
    plants a hundred thousand files makes others list them, and not read them.
    """
    found: list[_Entry] = []
    with suppress(OSError), os.scandir(folder) as entries:  # nobody has leased anything so far
        for entry in entries:
            name = entry.name
            if name.endswith(_ENDINGS) or ".used." in name or ".claim." in name:
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    found.append(_Entry(name, about.st_uid, about.st_mtime))
    return found


def read_notes(folder: Path) -> list[Found]:
    """All notes of the folder that are what they should be; tickets only of processes that live."""
    return _read_notes(folder, _listed(folder))


def _read_notes(folder: Path, listed: Iterable[_Entry]) -> list[Found]:
    """The oldest notes of each user and kind, and those of this process, however many there are."""
    by_owner = defaultdict[tuple[int, str], list[str]](list)
    for entry in listed:
        if (kind := entry.kind) in ("ticket", "claim", "used"):
            by_owner[entry.uid, kind].append(entry.name)
    names = {name for own in by_owner.values() for name in nsmallest(_MOST_FILES, own)}
    names |= {path.name for path in _ours if path.parent == folder}
    found: list[Found] = []
    for name in sorted(names):
        path = folder / name
        with suppress(OSError, ValueError, RecursionError):
            note = _read(path, path.suffix[1:])  # type: ignore[arg-type]
            if note is not None and (note.is_alive or note.kind != "ticket"):
                found.append(note)
    return found


def who_floods(folder: Path) -> dict[int, int]:
    """The users who have more files there than anybody reads, each with the number of them."""
    num_of = Counter(entry.uid for entry in _listed(folder))
    return {uid: number for uid, number in num_of.items() if number > 3 * _MOST_FILES}


def _read(path: Path, kind: Kind) -> Found | None:
    """The note; None for what is none, and for a file with a second link, by which somebody else
    could make it count twice, or after its end.
    """
    pid, record = _ours.get(path, (0, {}))
    if pid == os.getpid():
        return Found(
            path=path, kind=kind, uid=own_uid(), changed_s=time.time(), is_alive=True,
            record=record,
        )  # fmt: skip
    # A link would lead elsewhere, and to open a planted FIFO would wait for ever.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            return None
        text = json.loads(os.read(handle, _MOST_BYTES))
        return Found(
            path=path, kind=kind, uid=about.st_uid, changed_s=about.st_mtime,
            is_alive=_is_alive(handle, kind, about.st_mtime),
            record=text if isinstance(text, dict) else {},
        )  # fmt: skip
    finally:
        os.close(handle)


def _is_alive(handle: int, kind: Kind, changed_s: float) -> bool:
    """Whether its writer lives, whose lock for writing excludes ours for reading. Without locks a
    ticket counts while it is touched, as whoever waits does; another note counts always.
    """
    if sys.platform == "win32":
        return kind != "ticket" or time.time() - changed_s < ASLEEP_S
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    return False


def as_ticket(note: Found, now_s: float) -> Ticket | None:
    """What waits; None where that cannot be read."""
    least, most = int(note.number("least", 1)), int(note.number("most", 1))
    group, devices = int(note.number("group", 1)), note.devices("devices")
    if not (1 <= group <= least <= most and least <= len(devices)) or least % group:
        return None
    return Ticket(
        name=note.path.name,
        uid=note.uid,
        since_s=min(note.number("since_s", now_s), now_s),
        devices=devices,
        least=least,
        most=most,
        group=group,
        priority=int(note.number("priority")),
        not_now=frozenset(note.devices("not_now")),
        is_awake=now_s - note.changed_s < ASLEEP_S,
    )


def as_holding(note: Found, now_s: float) -> Holding:
    ends_s = note.number("ends_s", -1.0)
    return Holding(
        uid=note.uid,
        device=str(note.record.get("device")),
        since_s=min(note.number("since_s", now_s), now_s),
        ends_s=ends_s if ends_s > 0 else None,
    )


@dataclass(frozen=True)
class Use:
    """What leases have cost: GPU seconds and how many they were, both decayed until a time."""

    gpu_s: float
    leases: float


def use_of(note: Found, now_s: float, half_life_s: float) -> Use:
    """What a note of ended work still counts for: of a user's sum, or a killed process's lease."""
    if note.kind == "claim":
        begin_s, end_s = note.number("since_s", note.changed_s), note.changed_s
        if not note.number("since_s"):
            return Use(0.0, 0.0)
        left = part_left(end_s, now_s, half_life_s)
        return Use(decayed_s(begin_s, end_s, now_s, half_life_s), left)
    left = part_left(note.number("at_s", now_s), now_s, half_life_s)
    return Use(max(0.0, note.number("gpu_s")) * left, max(0.0, note.number("leases")) * left)


def add_up(folder: Path, half_life_s: float, ended: Use | None = None) -> None:
    """Put what this user's ended leases have cost into one file, and ``ended`` with them.

    Two processes may do so at once: what one has renamed the other no longer finds, so nothing
    counts twice. What cannot be written is forgotten: it matters only to the order in the queue.
    """
    now_s, total = time.time(), ended or Use(0.0, 0.0)
    mine: list[Path] = []
    listed = [entry for entry in _listed(folder) if entry.uid == own_uid()]
    for note in _read_notes(folder, listed):
        is_over = note.kind == "used" or (note.kind == "claim" and not note.is_alive)
        if note.uid != own_uid() or not is_over:
            continue
        taken = note.path.with_name(f"{note.path.name}.{os.urandom(3).hex()}")
        with suppress(OSError):
            note.path.rename(taken)
            mine.append(taken)
            use = use_of(note, now_s, half_life_s)
            total = Use(total.gpu_s + use.gpu_s, total.leases + use.leases)
    with suppress(OSError):
        if total.gpu_s > 0:
            record = {"gpu_s": total.gpu_s, "leases": total.leases, "at_s": now_s}
            Note(folder, "used", record).leave()
    for path in [*mine, *_litter(folder, listed, now_s)]:
        with suppress(OSError):
            path.unlink()


def _litter(folder: Path, listed: Iterable[_Entry], now_s: float) -> Iterator[Path]:
    """What processes of this user that were killed have left behind."""
    for entry in listed:
        if entry.kind in ("used", "claim") or now_s - entry.changed_s < ASLEEP_S:
            continue
        path = folder / entry.name
        with suppress(OSError, ValueError, RecursionError):
            note = _read(path, "ticket") if entry.kind == "ticket" else None
            if note is None or not note.is_alive:
                yield path


def own_uid() -> int:
    return 0 if sys.platform == "win32" else os.geteuid()


def user_name(uid: int) -> str:
    """What the system calls the user."""
    if sys.platform != "win32":
        with suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
    return str(uid)
