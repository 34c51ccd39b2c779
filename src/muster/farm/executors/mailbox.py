"""Frames between two hosts as files on a folder that both see, such as NFS.

Each file has one writer, which only appends, and is complete up to its last whole frame: a reader
takes what is whole and finds the torn rest completed the next time it looks, or never, when its
writer was killed. So nobody appends to a file that another process has written: a pilot has an
outbox of its own, and every coordinator an inbox of its own to each pilot. No locks are relied
upon, and clocks of two hosts are never compared: a heartbeat is a number that changes.

Guaranteed: frames arrive whole, once, in order. An outbox is on the server before ``flush``
returns, so results survive the death of the pilot's host.

Not guaranteed: that a reader sees a frame at once; NFS may hide it for as long as it caches
attributes (seconds). Files are opened by path at every look, which makes NFS ask its server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from muster.base.atomic_files import write_atomic
from muster.farm import wire
from muster.farm.executors.remote import Frame
from muster.farm.task import Outcome
from muster.run.folder import RunFolder

#: What a pilot says of itself, besides the events of its worker.
HELLO, LEAVING, BYE = "hello", "leaving", "bye"

#: The frames that end an outbox.
_GOODBYES = tuple(wire.pack([BYE, why]) for why in ("closed", *Outcome))

_CHUNK = 1 << 22
_OUTBOX = "outbox"


class Writer:
    """Gathers frames and appends them together."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """``durable``: what is flushed survives the end of this host, at the price of a sync."""
        self.path = path
        self._durable = durable
        self._waiting = bytearray()
        self._arrived: int | None = None  # how much of the file is sure

    def add(self, frames: bytes) -> None:
        self._waiting += frames

    def flush(self) -> bool:
        """Append what waits; returns whether there was anything. Raises OSError where that fails.

        Bytes are kept until they have certainly arrived: a server that is full says so only when
        the file is synced or closed, and what was written is lost then. The next try writes the
        same bytes to the same place, so it does no harm if they were read meanwhile.
        """
        if not self._waiting:
            return False
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            if self._arrived is None:
                self._arrived = os.fstat(handle).st_size
            os.lseek(handle, self._arrived, os.SEEK_SET)
            rest = bytes(self._waiting)
            while rest:
                rest = rest[os.write(handle, rest) :]
            if self._durable:
                os.fsync(handle)
        finally:
            os.close(handle)  # NFS hands everything to its server here
        self._arrived += len(self._waiting)
        self._waiting.clear()
        return True


class Reader:
    """What another process appends to ``path``, from ``offset`` on; it may not be there yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset  # everything before it has been returned

    def receive(self) -> list[Frame]:
        """The whole frames that are new."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        frames: list[Frame] = []
        try:
            buffer, position = bytearray(), self.offset
            while data := os.pread(handle, _CHUNK, position):
                buffer += data
                position += len(data)
                frames += wire.unpack(buffer)
            self.offset = position - len(buffer)
        finally:
            os.close(handle)
        return frames


class PilotBox(NamedTuple):
    """The files of one pilot: of one job, and of one of its starts when it is requeued."""

    slot_id: int
    job_id: int
    restart: int
    folder: Path

    @property
    def age(self) -> tuple[int, int]:
        """A later pilot of the same slot compares as greater."""
        return self.job_id, self.restart

    @property
    def outbox(self) -> Path:
        return self.folder / _OUTBOX

    @property
    def is_over(self) -> bool:
        """Its pilot has said goodbye; one that was killed has not."""
        try:
            with self.outbox.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - max(map(len, _GOODBYES))))
                return file.read().endswith(_GOODBYES)
        except FileNotFoundError:
            return False

    def inbox(self, session: int) -> Path:
        return self.folder / f"inbox-{session}"

    def inboxes(self) -> list[tuple[int, Path]]:
        """The inboxes that exist, each with the session that writes it."""
        paths = self.folder.glob("inbox-*")
        return sorted((int(path.name.removeprefix("inbox-")), path) for path in paths)


def pilot_box(folder: RunFolder, slot_id: int, job_id: int, restart: int) -> PilotBox:
    path = folder.pilots_of(slot_id) / f"{job_id}.{restart}"
    return PilotBox(slot_id, job_id, restart, path)


def boxes_of(folder: RunFolder, slot_id: int) -> list[PilotBox]:
    """The pilots that this slot has had and that have said something, the oldest first."""
    found = []
    try:
        names = os.listdir(folder.pilots_of(slot_id))
    except FileNotFoundError:
        return []
    for name in names:
        job, _, restart = name.partition(".")
        if job.isdigit() and restart.isdigit():
            box = pilot_box(folder, slot_id, int(job), int(restart))
            if box.outbox.exists():
                found.append(box)
    return sorted(found, key=lambda box: box.age)


def why_leaving(box: PilotBox) -> Outcome | None:
    """Why its pilot has begun to leave; None when it has not said so. Reads its whole outbox."""
    for header, _ in Reader(box.outbox).receive():
        if header[0] == LEAVING:
            return Outcome(header[1])
    return None


def all_boxes(folder: RunFolder) -> Iterator[PilotBox]:
    if folder.pilots.exists():
        slots = (int(name) for name in os.listdir(folder.pilots) if name.isdigit())
        for slot_id in sorted(slots):
            yield from boxes_of(folder, slot_id)


def has_assigned(folder: RunFolder, needs: Mapping[str, Any]) -> bool:
    """Whether the pilots of this run were last asked for with these needs."""
    try:
        stored = orjson.loads(folder.pilot_assignment.read_bytes())
    except (OSError, ValueError):
        return False
    plain = orjson.loads(orjson.dumps(needs))
    return isinstance(stored, dict) and all(
        stored.get(name) == value for name, value in plain.items()
    )


class Heartbeat(NamedTuple):
    """The coordinator's: session number, a counter that it raises, and whether it is closing."""

    session: int = 0
    number: int = 0
    is_closed: bool = False


def read_heartbeat(folder: RunFolder) -> Heartbeat:
    """The heartbeat that was written last; one of session 0 when there has been none."""
    try:
        session, number, closed = folder.pilot_heartbeat.read_text().split()
        return Heartbeat(int(session), int(number), closed == "closed")
    except (FileNotFoundError, ValueError):
        return Heartbeat()


def write_heartbeat(folder: RunFolder, heartbeat: Heartbeat) -> None:
    state = "closed" if heartbeat.is_closed else "open"
    text = f"{heartbeat.session} {heartbeat.number} {state}\n"
    write_atomic(folder.pilot_heartbeat, text.encode())
