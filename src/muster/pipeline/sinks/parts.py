"""Finished parts: their lines, whether they are all there, and their bytes, checked while read.

A part holds JSON lines. Where input and output have types, the first line of a group of rows has a
field `MARK` with an Arrow stream in it: the columns that are as they were read, for this line and
the next ones. The lines themselves hold what the stages made, in which values that JSON does not
know are objects with that same field, so that they come back as what they were.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple
from zoneinfo import ZoneInfo

import orjson

from muster.base.errors import SetupError

_BLOCK_BYTES = 1 << 20
BATCH_ROWS = 1024
_BATCH_VALUES = 1 << 18
#: Begins with a character that no column's name has.
MARK = "\x01muster"
MARK_IN_JSON = orjson.dumps(MARK)


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


class Carried(NamedTuple):
    """``batch`` has a row per record; ``names``: the columns of the records, in their order."""

    batch: Any
    names: list[str]


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
    return _checked(part, lambda file: iter(lambda: file.read(_BLOCK_BYTES), b""))


def records(part: Part) -> Iterator[dict[str, Any]]:
    """The records of a part. SetupError as in `blocks`."""
    for number, line in enumerate(_checked(part, iter), start=1):
        yield _record(part, line, number)


def _checked(part: Part, pieces: Callable[[IO[bytes]], Iterator[bytes]]) -> Iterator[bytes]:
    digest, size, lines = hashlib.sha256(), 0, 0
    try:
        with part.rows.open("rb", buffering=_BLOCK_BYTES) as file:
            for piece in pieces(file):
                digest.update(piece)
                size += len(piece)
                lines += piece.count(b"\n")
                yield piece
    except FileNotFoundError:
        raise _damaged(part, part.rows, "it is missing") from None
    if size != part.num_bytes:
        why = f"it has {size:,} bytes where {part.num_bytes:,} were written"
        raise _damaged(part, part.rows, why)
    if digest.hexdigest() != part.sha256:
        raise _damaged(part, part.rows, "its sha256 is not the one that was noted")
    if lines != part.num_rows:
        why = f"it has {lines:,} lines where {part.num_rows:,} were written"
        raise _damaged(part, part.rows, why)


class Batch(NamedTuple):
    """Some records that follow each other in a part; ``line`` is that of the first, from 1.

    ``carried``: more columns of theirs as Arrow data, with a row per record.
    """

    part: Part
    line: int
    records: list[dict[str, Any]]
    carried: Carried | None = None


def batches(parts: Iterable[Part]) -> Iterator[Batch]:
    """All records, at most `BATCH_ROWS` at a time and fewer where records are large, but never
    fewer than have carried columns together.
    """
    for part in parts:
        batch, num_values, wanted, line = Batch(part, 1, []), 0, 0, 0
        for line, text in enumerate(_checked(part, iter), start=1):
            record = _record(part, text, line)
            carried: Carried | None = None
            if MARK_IN_JSON in text:
                record, carried = read_line(record)
            if carried is not None:
                if batch.records:
                    yield batch
                batch, num_values = Batch(part, line, [], carried), 0
                wanted = carried.batch.num_rows
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
    """About how many values a record holds, counting items of lists and characters of texts."""
    return sum(
        1 + (len(value) >> 4 if type(value) is str else len(value))
        if isinstance(value, str | list | dict)
        else 1
        for value in record.values()
    )


def _record(part: Part, line: bytes, number: int) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
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


# ------------------------------------------------------------------ values in lines


def with_header(head: bytes, line: bytes) -> bytes:
    return b"{" + head + (b"}\n" if line == b"{}\n" else b"," + line[1:])


def read_line(record: dict[str, Any]) -> tuple[dict[str, Any], Carried | None]:
    """A parsed line that has `MARK` somewhere, as what was written."""
    import pyarrow as pa

    carried = None
    if MARK in record:
        text, names = record.pop(MARK)
        with pa.ipc.open_stream(base64.b64decode(text)) as stream:
            carried = Carried(stream.read_next_batch(), names)
    return {name: _plain(value) for name, value in record.items()}, carried


# ---------------------------------------------------------------------- values JSON does not know


def marked(value: Any) -> Any:
    """For orjson: a value that it does not know, as an object that `read_line` turns back."""
    if _is_no_time(value):
        return None
    for kind, name, encode, _ in _KINDS:
        if isinstance(value, kind):
            return {MARK: name, "value": encode(value)}
    return as_plain(value)


def as_plain(value: Any) -> Any:
    """For orjson: a value that it does not know, in the form that JSON and CSV have for it.

    Bytes are base64 text, decimals texts with all their digits, durations seconds, and tensors and
    arrays lists.
    """
    if _is_no_time(value):
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    to_list = getattr(value, "tolist", None)  # of numpy and of torch
    if callable(to_list) and hasattr(value, "dtype"):
        return to_list()
    raise TypeError(f"JSON has no {type(value).__name__}: make it a text or a number in the stage")


def _is_no_time(value: Any) -> bool:
    return isinstance(value, datetime.datetime) and bool(value != value)  # NaT of pandas


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK in value:
        return _DECODERS[value[MARK]](value["value"])
    return {name: _plain(item) for name, item in value.items()}


def _zoned(value: datetime.datetime) -> list[str | None]:
    zone = getattr(value.tzinfo, "key", None)
    return [datetime.datetime.isoformat(value), zone]


def _unzoned(value: list[str | None]) -> datetime.datetime:
    text, zone = value
    assert text is not None
    made = datetime.datetime.fromisoformat(text)
    return made if zone is None else made.astimezone(ZoneInfo(zone))


#: In this order, because a datetime is a date.
_KINDS: tuple[tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ((bytes, bytearray, memoryview), "bytes", as_plain, base64.b64decode),
    (datetime.datetime, "datetime", _zoned, _unzoned),
    (datetime.date, "date", lambda v: v.isoformat(), datetime.date.fromisoformat),
    (datetime.time, "time", lambda v: v.isoformat(), datetime.time.fromisoformat),
    (
        datetime.timedelta, "duration",
        lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v),
    ),
    (decimal.Decimal, "decimal", str, decimal.Decimal),
)  # fmt: skip
_DECODERS = {name: decode for _, name, _, decode in _KINDS}
