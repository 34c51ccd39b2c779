"""Finished parts: whether they are all there, and their records and bytes, checked while read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from muster.base.errors import SetupError
from muster.pipeline.sinks.lines import MARK, MARK_IN_JSON, Carried, num_behind, read_line
from muster.pipeline.sources.columnar import Again
from muster.pipeline.sources.text import has_long_number

_BLOCK_BYTES = 1 << 18
#: What a look reads at once: what it leaves out of a large value is then not read at all.
_LOOK_BYTES = 1 << 13
BATCH_ROWS = 1024
_BATCH_VALUES = 1 << 15


class Part(NamedTuple):
    """The output of rows ``start`` to ``stop`` of shard ``order``: JSON lines in ``rows`` (and of
    rejected records in ``errors``; None where there are none), as the ledger knows them.
    """

    order: int
    start: int
    stop: int
    rows: Path
    num_rows: int
    num_bytes: int
    sha256: str
    errors: Path | None
    num_errors: int


def by_shard(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of each shard, in input order.

    SetupError names the first hole or overlap: shards are numbered from 0 without a gap, and the
    parts of a shard follow each other from row 0 on. How long the last one is, only the plan knows.
    """
    shards = [list(group) for _, group in groupby(parts, key=lambda part: part.order)]
    for order, shard in enumerate(shards):
        if shard[0].order > order:
            raise _no_whole(f"shard {order} has no part, the next is of shard {shard[0].order}")
        if shard[0].order < order:
            raise _no_whole(f"shard {shard[0].order} comes after shard {order - 1}")
        row = 0
        for part in shard:
            if part.start > row:
                raise _no_whole(f"rows {row} to {part.start} of shard {order} have no part")
            if part.start < row:
                raise _no_whole(
                    f"rows {part.start} to {min(row, part.stop)} of shard {order} are there twice"
                )
            row = part.stop
    return shards


def blocks(part: Part) -> Iterator[bytes]:
    """The bytes of a part. SetupError, at the end at the latest, when they are not those that the
    ledger knows.
    """
    check = _Check(part)
    with _opened(part) as file:
        while block := file.read(_BLOCK_BYTES):
            check.take(block, block.count(b"\n"))
            yield block
    check.end()


def records(part: Part) -> Iterator[dict[str, Any]]:
    """The records of a part. SetupError as in `blocks`."""
    check = _Check(part)
    with _opened(part) as file:
        for number, line in enumerate(file, start=1):
            check.take(line, 1)
            yield _record(part, line, number)
    check.end()


@contextmanager
def _opened(part: Part, buffering: int = _BLOCK_BYTES) -> Iterator[IO[bytes]]:
    try:
        with part.rows.open("rb", buffering=buffering) as file:
            yield file
    except FileNotFoundError:
        raise _damaged(part, part.rows, "it is missing") from None


class _Check:
    """Compares what has been read of a part with what the ledger knows of it."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._digest, self._size, self._lines = hashlib.sha256(), 0, 0

    def take(self, piece: bytes, num_lines: int) -> None:
        self._digest.update(piece)
        self._size += len(piece)
        self._lines += num_lines

    def end(self) -> None:
        part = self._part
        if self._size != part.num_bytes:
            why = f"it has {self._size:,} bytes where {part.num_bytes:,} were written"
            raise _damaged(part, part.rows, why)
        if self._digest.hexdigest() != part.sha256:
            raise _damaged(part, part.rows, "its sha256 is not the one that was noted")
        if self._lines != part.num_rows:
            why = f"it has {self._lines:,} lines where {part.num_rows:,} were written"
            raise _damaged(part, part.rows, why)


class Batch(NamedTuple):
    """Some records that follow each other in a part; ``line`` is that of the first, from 1.

    ``carried``: more columns of theirs as Arrow data, with a row per record.
    """

    part: Part
    line: int
    records: list[dict[str, Any]]
    carried: Carried | None = None


def batches(
    parts: Iterable[Part], again: Again | None = None, *, is_look: bool = False
) -> Iterator[Batch]:
    """All records, at most `BATCH_ROWS` at a time and fewer where records are large, but never
    fewer than have carried columns together. ``again`` reads what was left in the input.

    A look is for who reads all of it once more: it finds no damage that shows in checksums alone,
    and has other bytes in place of values that are bytes.
    """
    for part in parts:
        batch, num_values, wanted, line = Batch(part, 1, []), 0, 0, 0
        framed = _looked_at(part) if is_look else _framed(part)
        for line, (record, raw) in enumerate(framed, start=1):
            carried: Carried | None = None
            if raw is not None:
                record, carried = read_line(record, raw, again)
            if carried is not None:
                if batch.records:
                    yield batch
                batch, num_values = Batch(part, line, [], carried), 0
                wanted = carried.num_rows
            batch.records.append(record)
            num_values += _size_of(record)
            if wanted:
                is_full = len(batch.records) == wanted
            else:
                is_full = len(batch.records) == BATCH_ROWS or num_values >= _BATCH_VALUES
            if is_full:
                yield batch
                batch, num_values, wanted = Batch(part, line + 1, []), 0, 0
        if wanted:
            raise _damaged(part, part.rows, f"it ends at line {line}, within a group of rows")
        if batch.records:
            yield batch


def _framed(part: Part) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """The lines of a part, each with the bytes behind it; None of those that `read_line` would
    leave as they are. SetupError as in `blocks`.
    """
    check = _Check(part)
    with _opened(part) as file:
        for number, line in enumerate(file, start=1):
            check.take(line, 1)
            raw = b""
            if size := num_behind(line):
                raw = file.read(min(size, part.num_bytes))
                check.take(raw, 0)
            yield _record(part, line, number), raw if MARK_IN_JSON in line else None
    check.end()


def _looked_at(part: Part) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """As `_framed`, without checks, and of the bytes behind lines only the streams."""
    with _opened(part, _LOOK_BYTES) as file:
        for number, line in enumerate(file, start=1):
            record = _record(part, line, number)
            size, stream = min(num_behind(line), part.num_bytes), _size_of_stream(record)
            if size > stream:
                file.seek(size - stream, os.SEEK_CUR)
            raw = file.read(min(size, stream)) if size else b""
            yield record, raw if MARK_IN_JSON in line else None


def _size_of_stream(record: dict[str, Any]) -> int:
    held = record[MARK][0] if MARK in record else None
    return held.get("stream", 0) if isinstance(held, dict) else 0


def error_blocks(part: Part) -> Iterator[bytes]:
    """The bytes of the part's rejected records; SetupError when their number is another."""
    if part.errors is None:
        return
    lines = 0
    try:
        with part.errors.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                lines += block.count(b"\n")
                yield block
    except FileNotFoundError:
        raise _damaged(part, part.errors, "it is missing") from None
    if lines != part.num_errors:
        why = f"it has {lines:,} lines where {part.num_errors:,} were written"
        raise _damaged(part, part.errors, why)


def _size_of(record: dict[str, Any]) -> int:
    """About how many values a record holds, counting items of lists, characters and bytes."""
    return sum(
        1 + (len(value) if isinstance(value, list | dict) else len(value) >> 4)
        if isinstance(value, str | bytes | list | dict)
        else 1
        for value in record.values()
    )


def exact_json(text: bytes) -> Any:
    """What a text of JSON says, with integers of any size. ValueError for what is no JSON."""
    return json.loads(text) if has_long_number(text) else orjson.loads(text)


def _record(part: Part, line: bytes, number: int) -> dict[str, Any]:
    try:
        record = exact_json(line)
    except ValueError as error:
        raise _damaged(part, part.rows, f"line {number} is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _damaged(part, part.rows, f"line {number} is not a record but {line[:40]!r}")
    return record


def _damaged(part: Part, path: Path, why: str) -> SetupError:
    return SetupError(
        f"The part {path} (rows {part.start} to {part.stop} of shard {part.order}) is damaged: "
        f"{why}. No output was written.",
        hint="begin again with --restart; if it happens twice, look at that disk.",
    )


def _no_whole(what: str) -> SetupError:
    return SetupError(
        f"The finished parts do not make up the whole: {what}. No output was written.",
        hint="run the same command again; if this stays, begin again with --restart.",
    )
