"""Finished parts: their lines, whether they are all there, and their bytes, checked while read.

A part holds JSON lines. Where input and output have types, the first line of a group of rows has a
field `MARK` that stands for the columns that are as they were read, for this line and the next
ones. It says in which rows of the input they are, or which of the bytes behind the line are an
Arrow stream of them. The lines themselves hold what the stages made, in which values that JSON does
not know are objects with that same field, so that they come back as what they were.

A line whose first field is `RAW` has that many bytes behind it: those of its values that are bytes,
and then the stream. Version 0.1.0 wrote both as base64 in the line, which is read as well.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple
from zoneinfo import ZoneInfo

import orjson

from muster.base.errors import SetupError
from muster.pipeline.sources.columnar import Again

_BLOCK_BYTES = 1 << 20
BATCH_ROWS = 1024
_BATCH_VALUES = 1 << 18
#: Begins with a character that no column's name has.
MARK = "\x01muster"
MARK_IN_JSON = orjson.dumps(MARK)
RAW = "\x01raw"
_RAW_START = b"{" + orjson.dumps(RAW) + b":"


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


class Carried:
    """``batch`` has a row per record and is read when it is asked for; ``names``: the columns of
    the records, in their order. ``fields`` of the batch, and of each how many values are not null.
    """

    def __init__(
        self, held: str | dict[str, Any], names: list[str], raw: bytes, again: Again | None
    ) -> None:
        self.names = names
        self._held, self._again, self._raw = held, again, raw
        if self._is_stream:
            self.num_rows: int = self.batch.num_rows
            self.fields: list[Any] = list(self.batch.schema)
            self.num_values = [len(c) - c.null_count for c in self.batch.columns]
        elif again is None:
            raise SetupError("These parts are read with the input that they are of.")
        else:
            about: Any = held
            self.num_rows = about["length"]
            self.fields = again.fields(about)
            self.num_values = [self.num_rows - nulls for _, _, nulls in about["columns"]]

    @property
    def _is_stream(self) -> bool:
        return isinstance(self._held, str) or "stream" in self._held

    @cached_property
    def batch(self) -> Any:
        if isinstance(self._held, str):
            data = base64.b64decode(self._held)
        elif self._is_stream:
            data = self._raw[len(self._raw) - self._held["stream"] :]
        else:
            assert self._again is not None
            return self._again.batch(self._held)
        import pyarrow as pa

        with pa.ipc.open_stream(data) as stream:
            return stream.read_next_batch()

    def has(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)


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


def _framed(part: Part) -> Iterator[bytes]:
    """The lines of a part, each with the bytes behind it. SetupError as in `blocks`."""

    def pieces(file: IO[bytes]) -> Iterator[bytes]:
        for line in file:
            size = min(num_behind(line), part.num_bytes)
            yield line + file.read(size) if size else line

    return _checked(part, pieces, lambda piece: 1)


def _num_ends(piece: bytes) -> int:
    return piece.count(b"\n")


def _checked(
    part: Part,
    pieces: Callable[[IO[bytes]], Iterator[bytes]],
    num_lines: Callable[[bytes], int] = _num_ends,
) -> Iterator[bytes]:
    digest, size, lines = hashlib.sha256(), 0, 0
    try:
        with part.rows.open("rb", buffering=_BLOCK_BYTES) as file:
            for piece in pieces(file):
                digest.update(piece)
                size += len(piece)
                lines += num_lines(piece)
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


def batches(parts: Iterable[Part], again: Again | None = None) -> Iterator[Batch]:
    """All records, at most `BATCH_ROWS` at a time and fewer where records are large, but never
    fewer than have carried columns together. ``again`` reads what was left in the input.
    """
    for part in parts:
        batch, num_values, wanted, line = Batch(part, 1, []), 0, 0, 0
        for line, piece in enumerate(_framed(part), start=1):
            end = len(piece) - num_behind(piece)
            text = piece[:end] if end < len(piece) else piece
            record = _record(part, text, line)
            carried: Carried | None = None
            if MARK_IN_JSON in text:
                record, carried = read_line(record, piece[end:], again)
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


def num_behind(line: bytes) -> int:
    """How many bytes are behind a line. It may have them at its end already."""
    if not line.startswith(_RAW_START):
        return 0
    number = line[len(_RAW_START) : line.find(b",", len(_RAW_START))]
    return int(number) if number.isdigit() else 0  # else it is damaged, which its sha256 shows


def with_header(head: bytes, stream: bytes, line: bytes) -> bytes:
    """The line of a record with another field ``head``, and ``stream`` behind what it has there."""
    num_own = num_behind(line)
    text, own = line[: len(line) - num_own], line[len(line) - num_own :]
    if num_own:
        text = b"{" + text[text.index(b",") + 1 :]
    text = b"{" + head + (b"}\n" if text == b"{}\n" else b"," + text[1:])
    return _with_bytes(text, [own, stream])


def _with_bytes(text: bytes, pieces: Sequence[bytes]) -> bytes:
    size = sum(map(len, pieces))
    return b"".join((_RAW_START, b"%d," % size, text[1:], *pieces)) if size else text


def read_line(
    record: dict[str, Any], raw: bytes = b"", again: Again | None = None
) -> tuple[dict[str, Any], Carried | None]:
    """A parsed line that has `MARK` somewhere, as what was written. ``raw``: what is behind it."""
    carried = None
    record.pop(RAW, None)
    if MARK in record:
        held, names = record.pop(MARK)
        carried = Carried(held, names, raw, again)
    return {name: _plain(value, raw) for name, value in record.items()}, carried


# ---------------------------------------------------------------------- values JSON does not know


class Marked:
    """For orjson: a value that it does not know, as an object that `read_line` turns back.

    It serves one line, and keeps the bytes that go behind it.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __call__(self, value: Any) -> Any:
        if _is_no_time(value):
            return None
        if isinstance(value, bytes | bytearray | memoryview):
            piece, begin = bytes(value), self._size
            self._pieces.append(piece)
            self._size += len(piece)
            return {MARK: _BEHIND, "value": [begin, self._size]}
        for kind, name, encode, _ in _KINDS:
            if isinstance(value, kind):
                return {MARK: name, "value": encode(value)}
        return as_plain(value)

    def whole(self, line: bytes) -> bytes:
        """The line with what belongs behind it."""
        return _with_bytes(line, self._pieces)


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


def _plain(value: Any, raw: bytes) -> Any:
    if isinstance(value, list):
        return [_plain(item, raw) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {name: _plain(item, raw) for name, item in value.items()}
    if value[MARK] == _BEHIND:
        begin, end = value["value"]
        return raw[begin:end]
    return _DECODERS[value[MARK]](value["value"])


def _zoned(value: datetime.datetime) -> list[str | None]:
    zone = getattr(value.tzinfo, "key", None)
    return [datetime.datetime.isoformat(value), zone]


def _unzoned(value: list[str | None]) -> datetime.datetime:
    text, zone = value
    assert text is not None
    made = datetime.datetime.fromisoformat(text)
    return made if zone is None else made.astimezone(ZoneInfo(zone))


#: Of bytes behind the line.
_BEHIND = "raw"
#: In this order, because a datetime is a date.
_KINDS: tuple[tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
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
_DECODERS["bytes"] = base64.b64decode  # of version 0.1.0
