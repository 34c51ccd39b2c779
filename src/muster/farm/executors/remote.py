"""For an executor that runs elsewhere: commands travel to it as frames, events come back as frames;
and files and log parts, for workers that do not see the run folder.

Whatever carries the frames (files on a shared folder, a Ray actor), both ends use this module. A
pilot at the other end holds a real executor, so that starting and ending workers exist once.

Places of files are relative to a root that both ends know, with ``/`` between their parts. A file
travels in pieces, so that no end ever holds a whole one, and appears at the other end by rename.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from muster.farm import canonical, wire
from muster.farm.events import (
    Divided,
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import TakesCommands
from muster.farm.task import Finished, Outcome, SlotSpec, Task

Frame = tuple[list[Any], bytes]

START, SEND, PASS, END, CLOSE = "start", "send", "pass", "end", "close"
RESULTS, DIED = "results", "died"


# ---------------------------------------------------------------- commands, to a pilot


def start_command(worker_id: int, slot: SlotSpec) -> bytes:
    return wire.pack([START, worker_id], orjson.dumps(dataclasses.asdict(slot)))


def send_command(worker_id: int, tasks: Sequence[Task], *, together: bool) -> bytes:
    """One frame that announces how many tasks follow, and a frame for each."""
    head = wire.pack([SEND, worker_id, together, len(tasks)])
    return head + b"".join(
        wire.pack([wire.TASK, t.task_id, t.key.hex(), t.target_id, t.group, t.token, t.tries,
                   t.batch_limit], t.payload)
        for t in tasks
    )  # fmt: skip


def pass_command(worker_id: int, tasks: Sequence[Task], *, together: bool) -> bytes:
    """One frame around the one that the worker gets, so that the pilot need not look at tasks. For
    pilots of the same Muster only; what lies in mailboxes may be read by another.
    """
    return wire.pack([PASS, worker_id, len(tasks)], wire.pack_tasks(tasks, together=together))


def share_command(worker_id: int, task_id: int, others: int) -> bytes:
    return wire.pack([wire.SHARE, worker_id, task_id, others])


def stop_task_command(worker_id: int, task_id: int, *, pauses: bool) -> bytes:
    return wire.pack([wire.STOP_TASK, worker_id, task_id, pauses])


def revoke_command(worker_id: int) -> bytes:
    return wire.pack([wire.REVOKE, worker_id])


def confirm_command(worker_id: int, serial: int) -> bytes:
    return wire.pack([wire.CONFIRMED, worker_id, serial])


def end_command(worker_id: int, *, kill: bool) -> bytes:
    return wire.pack([END, worker_id, kill])


def close_command() -> bytes:
    return wire.pack([CLOSE])


class CommandReader:
    """Applies frames to an executor; a SEND and its tasks may arrive in pieces."""

    def __init__(self, executor: TakesCommands) -> None:
        self._executor = executor
        self._head: list[Any] | None = None
        self._tasks: list[Task] = []
        self.is_closed = False

    def apply(self, frames: Iterable[Frame]) -> None:
        for header, body in frames:
            self._apply(header, body)

    def _apply(self, header: list[Any], body: bytes) -> None:
        match header[0]:
            case "start":
                record = orjson.loads(body)
                slot = SlotSpec(**{**record, "devices": tuple(record["devices"])})
                self._executor.start(header[1], slot)
            case "send":
                self._head, self._tasks = header, []
            case "task":
                self._take(header, body)
            case "share":
                self._executor.share(*header[1:])
            case "stop_task":
                self._executor.stop_task(header[1], header[2], pauses=header[3])
            case "revoke":
                self._executor.revoke(header[1])
            case wire.CONFIRMED:
                self._executor.confirm(header[1], header[2])
            case "end":
                self._executor.end(header[1], kill=header[2])
            case "close":
                self.is_closed = True

    def _take(self, header: list[Any], body: bytes) -> None:
        _, task_id, key, target_id, group, token, tries, batch_limit = header
        self._tasks.append(
            Task(task_id, bytes.fromhex(key), target_id, body, group, token, tries,
                 batch_limit=batch_limit)
        )  # fmt: skip
        assert self._head is not None
        _, worker_id, together, count = self._head
        if len(self._tasks) == count:
            self._executor.send(worker_id, self._tasks, together=together)
            self._head, self._tasks = None, []


# ---------------------------------------------------------------- events, from a pilot


def pack_event(
    event: Event, pack_finished: Callable[[Finished], bytes] = wire.pack_finished
) -> bytes:
    """The frames of an event that an executor reports. ``pack_finished``: may be
    `wire.pack_plain` for a reader of the same Muster.
    """
    match event:
        case WorkerReady(worker_id, pid):
            return wire.pack([wire.READY, worker_id, pid])
        case TargetBroken(worker_id, message, trace):
            body = orjson.dumps([wire.clean(message), wire.clean(trace)])
            return wire.pack([wire.BROKEN, worker_id], body)
        case Results(worker_id, finished):
            head = wire.pack([RESULTS, worker_id, len(finished)])
            return head + b"".join(map(pack_finished, finished))
        case Returned(worker_id, task_ids):
            return wire.pack([wire.RETURNED, worker_id], orjson.dumps(list(task_ids)))
        case Progress(worker_id, task_id, text, numbers):
            return wire.pack([wire.PROGRESS, worker_id, task_id, wire.clean(text), dict(numbers)])
        case Logged(worker_id, task_id, token, serial, points):
            return wire.pack([wire.METRICS, worker_id, task_id, token, serial], points)
        case Divided(worker_id, task_id, token, kept, given):
            body = canonical.encode([dict(kept), [dict(params) for params in given]])
            return wire.pack([wire.DIVIDED, worker_id, task_id, token], body)
        case WorkerDied():
            texts = {"reason", "trace", "stuck"}
            record = {k: wire.clean(v) if k in texts else v for k, v in event._asdict().items()}
            return wire.pack([DIED], orjson.dumps(record))
    raise TypeError(f"an executor does not report {type(event).__name__}")


class EventReader:
    """Frames back into events; Results and what belongs to them may arrive in pieces."""

    def __init__(self) -> None:
        self._worker_id = 0
        self._missing = 0
        self._finished: list[Finished] = []

    def read(self, frames: Iterable[Frame]) -> Iterator[Event]:
        for header, body in frames:
            if header[0] not in (wire.RESULT, wire.PLAIN):
                event = self._event(header, body)
                if event is not None:
                    yield event
                continue
            self._finished += wire.read_results(header, body)
            if len(self._finished) == self._missing:
                yield Results(self._worker_id, self._finished)

    def _event(self, header: list[Any], body: bytes) -> Event | None:
        match header[0]:
            case wire.READY:
                return WorkerReady(header[1], header[2])
            case wire.BROKEN:
                message, trace = orjson.loads(body)
                return TargetBroken(header[1], message, trace)
            case "results":
                _, self._worker_id, self._missing = header
                self._finished = []
                return None if self._missing else Results(self._worker_id, [])
            case wire.RETURNED:
                return Returned(header[1], orjson.loads(body))
            case wire.PROGRESS:
                return Progress(*header[1:])
            case wire.METRICS:
                _, worker_id, task_id, token, serial = header
                return Logged(worker_id, task_id, token, serial, body)
            case wire.DIVIDED:
                kept, given = canonical.decode(body)
                return Divided(header[1], header[2], header[3], kept, given)
            case "died":
                record = orjson.loads(body)
                if record["outcome"] is not None:
                    record["outcome"] = Outcome(record["outcome"])
                return WorkerDied(**record)
        raise ValueError(f"an event called {header[0]!r} is not known")


FILE, FOLDER, LINK, LOG = "file", "folder", "link", "log"
#: What one frame holds of a file.
PIECE_BYTES = 4 << 20
_SUFFIX = ".arriving"


def is_shipped(header: list[Any]) -> bool:
    """Whether a frame of this header is for an ``Unpacker``."""
    return header[0] in (FILE, FOLDER, LINK)


# ---------------------------------------------------------------- packing


def pack_file(path: Path, place: str) -> Iterator[bytes]:
    """The frames of one file as it is when the first is asked for; none if it is gone by then."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        position, piece = 0, file.read(PIECE_BYTES)
        while True:
            following = file.read(PIECE_BYTES)
            yield wire.pack([FILE, place, position, not following, mode], piece)
            if not following:
                return
            position, piece = position + len(piece), following


def pack_folder(folder: Path, place: str) -> Iterator[bytes]:
    """The frames of a folder and all that is in it; links stay links."""
    yield wire.pack([FOLDER, place])
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        inner = f"{place}/{wire.clean(entry.name)}"
        if entry.is_symlink():
            yield wire.pack([LINK, inner], wire.clean(str(Path(entry.path).readlink())).encode())
        elif entry.is_dir():
            yield from pack_folder(Path(entry.path), inner)
        elif entry.is_file():
            yield from pack_file(Path(entry.path), inner)


def pack_log(path: Path, start: int, stop: int, slot_id: int) -> Iterator[bytes]:
    """The bytes from ``start`` to ``stop`` of a worker's log."""
    with path.open("rb") as log:
        log.seek(start)
        while start < stop:
            piece = log.read(min(PIECE_BYTES, stop - start))
            if not piece:
                return
            yield wire.pack([LOG, slot_id, start], piece)
            start += len(piece)


# ---------------------------------------------------------------- unpacking


class Unpacker:
    """Writes shipped frames below ``root``; ``allowed``: the first parts of places it accepts."""

    def __init__(self, root: Path, allowed: Collection[str]) -> None:
        self._root = root
        self._allowed = allowed

    def take(self, header: list[Any], body: bytes) -> str | None:
        """Write a frame; the place of what is whole with it, None while more is to come.

        Raises ValueError for a place outside of ``root`` or of what is allowed.
        """
        path = self._path(header[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        match header[0]:
            case "folder":
                if self._is_link(path):  # sent earlier, when there was no folder
                    path.unlink()
                path.mkdir(exist_ok=True)
            case "link":
                if path.parent == self._root:
                    raise _stray(header[1])  # all that is allowed would lie behind it
                path.unlink(missing_ok=True)
                path.symlink_to(body.decode())
            case "file":
                _, _, position, is_last, mode = header
                arriving = path.with_name(path.name + _SUFFIX)
                how = os.O_WRONLY | os.O_NOFOLLOW | (0 if position else os.O_CREAT | os.O_TRUNC)
                with os.fdopen(os.open(arriving, how, 0o666), "wb") as file:
                    file.seek(position)
                    file.write(body)
                    if is_last:
                        file.flush()
                        os.fchmod(file.fileno(), mode & 0o777)
                        os.fsync(file.fileno())
                if not is_last:
                    return None
                os.replace(arriving, path)
        return str(header[1])

    def _path(self, place: str) -> Path:
        pure = PurePosixPath(place)
        is_inside = not pure.is_absolute() and ".." not in pure.parts
        if not (is_inside and pure.parts and pure.parts[0] in self._allowed):
            raise _stray(place)
        path = self._root.joinpath(*pure.parts)
        # Nothing is packed from behind a link, and one that was sent may lead anywhere.
        if any(
            self._is_link(self._root.joinpath(*pure.parts[:n])) for n in range(2, len(pure.parts))
        ):
            raise _stray(place)
        return path

    def _is_link(self, path: Path) -> bool:
        """Whether it is one that was sent: the folders of ``allowed`` are never."""
        return path.parent != self._root and path.is_symlink()


def _stray(place: str) -> ValueError:
    return ValueError(f"a worker sent a file for {place!r}, where none belongs")


def write_log(path: Path, position: int, body: bytes) -> None:
    """Put a part of a log where it belongs; what was there of an earlier part is replaced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, body, position)
    finally:
        os.close(descriptor)
