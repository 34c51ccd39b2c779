"""Brings a ledger that lives on a local disk to the run folder on a network file system.

Guarantees
- What has been committed is in the run folder too before it is acknowledged or acted upon: as a
  line of the segment (with a checksum, synced), or in a snapshot. Lines are results, failures and
  divisions of tasks, in the order in which they happened.
- A snapshot appears by rename; the segment it makes superfluous is removed afterwards.

Not guaranteed: the list of workers since the last snapshot.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from muster.base.atomic_files import replacing
from muster.farm.ledger.connect import explained
from muster.farm.model import AttemptRecord, Finished, Outcome

DONE, FAILED, DIVIDED = "done", "failed", "divided"


class Ended(NamedTuple):
    """An attempt that ended its task: ``kind`` is DONE or FAILED."""

    kind: str
    key: bytes
    record: AttemptRecord
    value: bytes | None
    sha256: str | None


class Parted(NamedTuple):
    """A task that goes on with a smaller payload; ``given``: keys and payloads of new tasks."""

    key: bytes
    payload: bytes
    target_id: int
    given: tuple[tuple[bytes, bytes], ...]


class Shipper:
    """Writes ``ledger.sqlite`` (snapshots) and ``ledger.segment`` (what came after) at home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._segment = home.with_suffix(".segment")
        self._pending: list[bytes] = []

    def note(
        self, kind: str, key: bytes, record: AttemptRecord, value: bytes | None, sha: str | None
    ) -> None:
        f = record.finished
        fields = [*f[:8], f.message, f.trace, f.signal, f.files]
        self._add([kind, key.hex(), record.worker_id, fields, (value or b"").decode(), sha])

    def note_division(self, parted: Parted) -> None:
        """Without it the result of the smaller task would pass for that of the whole one."""
        given = [[key.hex(), payload.decode()] for key, payload in parted.given]
        key, payload, target_id, _ = parted
        self._add([DIVIDED, key.hex(), target_id, given, payload.decode(), None])

    def _add(self, line: list[Any]) -> None:
        text = orjson.dumps(line)
        self._pending.append(b"%08x %s\n" % (zlib.crc32(text), text))

    def ship(self) -> None:
        """Append what was noted since, and wait until it is on the file system."""
        if not self._pending:
            return
        with explained(self._segment, "write"):
            handle = os.open(self._segment, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, b"".join(self._pending))
                os.fsync(handle)
            finally:
                os.close(handle)
        self._pending.clear()

    def forget(self) -> None:
        """The transaction was rolled back."""
        self._pending.clear()

    def snapshot(self, database: sqlite3.Connection) -> None:
        """Copy the whole ledger home with SQLite's backup API."""
        with explained(self.home, "write"), replacing(self.home) as beside:
            copy = sqlite3.connect(beside)
            database.backup(copy)
            # Readers open the copy where WAL's side files may not be possible.
            copy.execute("PRAGMA journal_mode = DELETE")
            copy.close()
        self._segment.unlink(missing_ok=True)

    def lines(self) -> Iterator[Ended | Parted]:
        """What was shipped after the last snapshot; stops at the first torn line."""
        if not self._segment.exists():
            return
        with self._segment.open("rb") as file:
            for line in file:
                check, _, text = line.rstrip(b"\n").partition(b" ")
                if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(text):
                    return
                yield _read(orjson.loads(text))


def _read(line: Sequence[Any]) -> Ended | Parted:
    kind, key, worker_id, fields, text, sha = line
    if kind == DIVIDED:
        given = tuple((bytes.fromhex(name), payload.encode()) for name, payload in fields)
        return Parted(bytes.fromhex(key), text.encode(), worker_id, given)
    task_id, token, outcome, started, seconds, start, end, peak, *words = fields
    message, trace, signal, files = words
    value = None if sha else text.encode()
    finished = Finished(
        task_id,
        token,
        Outcome(outcome),
        started,
        seconds,
        start,
        end,
        peak,
        value or b"{}",
        message,
        trace,
        signal,
        False,
        files,
    )
    record = AttemptRecord(task_id, token, worker_id, finished)
    return Ended(kind, bytes.fromhex(key), record, value, sha)
