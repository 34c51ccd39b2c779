"""Brings a ledger that lives on a local disk to the run folder on a network file system.

Guarantees
- What has been committed is in the run folder too before it is acknowledged or acted upon: as a
  line of the segment (with a checksum, synced), or in a snapshot. Lines are attempts, divisions
  of tasks, cancelled tasks, started workers, what tasks have logged, and what a search has chosen,
  was told and has decided, in the order in which they happened.
- A snapshot appears by rename; the segment it makes superfluous is removed afterwards.
- A commit is one numbered shipment, which counts only when all of its lines are there.

Not guaranteed: how workers ended, and results that came late, since the last snapshot.
"""

from __future__ import annotations

import base64
import os
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from muster.base.atomic_files import replacing, sync_folder
from muster.farm.ledger.connect import explained
from muster.farm.ledger.home import Mark, Shipment
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec

DONE, FAILED, TRIED, DIVIDED, WORKER = "done", "failed", "tried", "divided", "worker"
METRICS, SEARCH, STOPPED, REOPENED = "metrics", "search", "stopped", "reopened"
CANCELLED = "cancelled"
_SHIPMENT = "shipment"


class Ended(NamedTuple):
    """An attempt that has ended: ``kind`` is DONE, FAILED or TRIED.

    ``value`` and ``sha256`` are those of a result; ``tries`` those of a task that is tried again.
    """

    kind: str
    key: bytes
    record: AttemptRecord
    value: bytes | None = None
    sha256: str | None = None
    tries: int = 0


class Parted(NamedTuple):
    """A task that goes on with a smaller payload; ``given``: keys and payloads of new tasks."""

    key: bytes
    payload: bytes
    target_id: int
    given: tuple[tuple[bytes, bytes], ...]


class Started(NamedTuple):
    """A worker: what its attempts are exported with."""

    worker_id: int
    slot: SlotSpec
    host: str
    log: str
    code: str | None = None


class Noted(NamedTuple):
    """What an attempt of this task has logged at once."""

    key: bytes
    token: int
    serial: int
    body: bytes


class Recorded(NamedTuple):
    """A row of a search: ``key`` is that of its task, None for a decision.

    ``target`` and ``payload``: those of the task that a proposal has made.
    """

    kind: str
    key: bytes | None
    body: bytes
    target: str = ""
    payload: bytes = b""


class Halted(NamedTuple):
    """A task that was stopped; ``record``: its attempt, None where it only waited."""

    key: bytes
    token: int
    value: bytes
    has_files: bool
    record: AttemptRecord | None


class Reopened(NamedTuple):
    """A stopped task that goes on."""

    key: bytes


class Cancelled(NamedTuple):
    """A task that its user has cancelled; ``record``: its attempt, None where it only waited."""

    key: bytes
    record: AttemptRecord | None = None


Line = Ended | Parted | Started | Noted | Recorded | Halted | Reopened | Cancelled


class Shipper:
    """Writes ``ledger.sqlite`` (snapshots) and ``ledger.segment`` (what came after) at home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._segment = home.with_suffix(".segment")
        self._pending: list[bytes] = []

    def note(self, line: Line) -> None:
        """Keep a line that is shipped with the next commit."""
        self._pending.append(_encode(_write(line)))

    @property
    def has_lines(self) -> bool:
        return bool(self._pending)

    def ship(self, mark: Mark) -> None:
        """Append what was noted as the shipment that ``mark`` numbers, and sync it."""
        if not self._pending:
            return
        stamp = _encode([_SHIPMENT, mark.branch, mark.shipments, len(self._pending)])
        with explained(self._segment, "write"):
            is_new = not self._segment.exists()
            handle = os.open(self._segment, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                rest = memoryview(b"".join([stamp, *self._pending]))
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            if is_new:
                sync_folder(self._segment.parent)
        self._pending.clear()

    def forget(self) -> None:
        """Drop what was noted: the transaction was rolled back."""
        self._pending.clear()

    def snapshot(self, database: sqlite3.Connection) -> None:
        """Copy the whole ledger home with SQLite's backup API."""
        with (
            explained(self.home, "write"),
            replacing(self.home) as beside,
            closing(sqlite3.connect(beside)) as copy,
        ):
            database.backup(copy)
            # Readers open the copy where WAL's side files may not be possible.
            copy.execute("PRAGMA journal_mode = DELETE")
        with explained(self._segment, "remove"):
            self._segment.unlink(missing_ok=True)

    def has_segment(self) -> bool:
        return self._segment.exists()


def read_segment(home: Path) -> list[Shipment]:
    """The whole shipments that came after some snapshot of ``home``; a torn one ends them."""
    shipments: list[Shipment] = []
    stamp: tuple[str, int] = ("", 0)
    lines: list[Line] = []
    due = 0
    path = home.with_suffix(".segment")
    if not path.exists():
        return []
    with explained(path, "read"), path.open("rb") as file:
        for text in file:
            check, _, content = text.rstrip(b"\n").partition(b" ")
            if not text.endswith(b"\n") or check != b"%08x" % zlib.crc32(content):
                break
            line = orjson.loads(content)
            if line[0] == _SHIPMENT:
                _, branch, number, due = line
                stamp, lines = (branch, number), []
                continue
            lines.append(_read(line))
            if len(lines) >= due:
                shipments.append(Shipment(*stamp, tuple(lines)))
                stamp, lines, due = ("", 0), [], 0
    return shipments


def _encode(line: list[Any]) -> bytes:
    text = orjson.dumps(line)
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _write(line: Line) -> list[Any]:
    match line:
        case Ended(kind, key, record, value, sha, tries):
            fields = _fields(record)
            return [kind, key.hex(), record.worker_id, fields, (value or b"").decode(), sha, tries]
        case Parted(key, payload, target_id, given):
            parts = [[part.hex(), text.decode()] for part, text in given]
            return [DIVIDED, key.hex(), target_id, parts, payload.decode(), None]
        case Noted(key, token, serial, body):
            return [METRICS, key.hex(), token, serial, base64.b64encode(body).decode()]
        case Recorded(kind, of, body, target, payload):
            name = None if of is None else of.hex()
            return [SEARCH, kind, name, body.decode(), target, payload.decode()]
        case Halted(key, token, value, files, attempt):
            return [STOPPED, key.hex(), token, value.decode(), files, _own(attempt)]
        case Cancelled(key, attempt):
            return [CANCELLED, key.hex(), _own(attempt)]
        case Reopened(key):
            return [REOPENED, key.hex()]
        case Started(worker_id, slot, host, log, code):
            return [WORKER, worker_id, slot.slot_id, slot.label, slot.devices, host, log, code]


def _read(line: Sequence[Any]) -> Line:
    if line[0] == WORKER:
        _, worker_id, slot_id, label, devices, host, log, *code = line
        slot = SlotSpec(slot_id=slot_id, label=label, devices=tuple(devices))
        return Started(worker_id, slot, host, log, *code)
    if line[0] == METRICS:
        _, key, token, serial, text = line
        return Noted(bytes.fromhex(key), token, serial, base64.b64decode(text))
    if line[0] == SEARCH:
        _, kind, name, body, target, payload = line
        of = None if name is None else bytes.fromhex(name)
        return Recorded(kind, of, body.encode(), target, payload.encode())
    if line[0] == STOPPED:
        _, key, token, text, files, own = line
        value = text.encode()
        record = None if own is None else _record(own[0], own[1], value)
        return Halted(bytes.fromhex(key), token, value, files, record)
    if line[0] == REOPENED:
        return Reopened(bytes.fromhex(line[1]))
    if line[0] == CANCELLED:
        _, key, own = line
        return Cancelled(
            bytes.fromhex(key), None if own is None else _record(own[0], own[1], b"{}")
        )
    kind, key, worker_id, fields, text, sha, *tries = line
    if kind == DIVIDED:
        given = tuple((bytes.fromhex(name), payload.encode()) for name, payload in fields)
        return Parted(bytes.fromhex(key), text.encode(), worker_id, given)
    inline = None if sha else text.encode()
    record = _record(worker_id, fields, inline or b"{}")
    return Ended(kind, bytes.fromhex(key), record, inline, sha, *tries)


def _own(record: AttemptRecord | None) -> list[Any] | None:
    return None if record is None else [record.worker_id, _fields(record)]


def _fields(record: AttemptRecord) -> list[Any]:
    f = record.finished
    return [*f[:8], f.message, f.trace, f.signal, f.files]


def _record(worker_id: int, fields: Sequence[Any], value: bytes) -> AttemptRecord:
    task_id, token, outcome, started, seconds, start, end, peak, *words = fields
    message, trace, signal, files = words
    finished = Finished(
        task_id, token, Outcome(outcome), started, seconds, start, end, peak, value,
        message, trace, signal, False, files,
    )  # fmt: skip
    return AttemptRecord(task_id, token, worker_id, finished)
