"""Columns of the input that the stages left alone, as Arrow data between the lines of a journal.

The journal holds JSON lines. Where input and output have types, the first line of a group of rows
has a field `MARK` with an Arrow stream in it: the columns that are as they were read, for this line
and the next ones. The lines themselves hold what the stages made, in which values that JSON does
not know are objects with that same field, so that they come back as what they were.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import orjson

from muster.pipeline.sources.model import ArrowRow

#: Begins with a character that no column's name has.
MARK = "\x01muster"
MARK_IN_JSON = orjson.dumps(MARK)
_SIMPLE = (int, str, bytes, bool, type(None))
#: A dictionary that is so much longer than the rows of a group is cut to what they use.
_LONG_DICTIONARY = 4


class Carried(NamedTuple):
    """``batch`` has a row per record; ``names``: the columns of the records, in their order."""

    batch: Any
    names: list[str]


def untouched(rows: Sequence[ArrowRow], records: Sequence[dict[str, Any]]) -> list[str]:
    """The columns of the rows' batch that are in the records, and as they were given to a stage
    or None, which every type has.

    ``records``: each made of the row at the same place.
    """
    if not rows:
        return []
    found = []
    for field in rows[0].batch.schema:
        name = field.name
        pairs = [(r[name], row[name]) for row, r in zip(rows, records, strict=True) if name in r]
        is_kept = all(value is given or _is_kept(value, given) for value, given in pairs)
        if pairs and is_kept and not _was_altered(field, rows, records):
            found.append(name)
    return found


def _is_kept(value: Any, given: Any) -> bool:
    if value is None:
        return True
    return type(value) is type(given) and type(value) in _SIMPLE and bool(value == given)


def _was_altered(field: Any, rows: Sequence[ArrowRow], records: Sequence[dict[str, Any]]) -> bool:
    """Whether a stage has changed a list or a struct in place."""
    import pyarrow as pa

    from muster.pipeline.sources.arrow_rows import values_of

    if not pa.types.is_nested(field.type):
        return False
    here = [i for i, record in enumerate(records) if record.get(field.name) is not None]
    column = rows[0].batch.column(field.name)
    fresh = values_of(column.take(pa.array([rows[i].index for i in here], pa.int64())))
    now = [records[i][field.name] for i in here]
    return fresh != now and not all(map(_is_same, fresh, now))


def _is_same(one: Any, two: Any) -> bool:
    """Equality for which NaN is itself."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(_is_same, one, two))
    both_nan = isinstance(one, float) and isinstance(two, float) and math.isnan(one)
    return bool(one == two) or (both_nan and math.isnan(two))


def header(
    rows: Sequence[ArrowRow], records: Sequence[dict[str, Any]], kept: Sequence[str]
) -> bytes:
    """The field `MARK` of the first line of a group, with its name and without braces."""
    import pyarrow as pa

    source = rows[0].batch
    arrays, fields = [], []
    for name in kept:
        index = [
            row.index if name in r and (r[name] is not None or row[name] is None) else None
            for row, r in zip(rows, records, strict=True)
        ]
        array = _taken(source.column(name), index)
        arrays.append(_with_short_dictionary(array))
        field = source.schema.field(name)
        fields.append(field if None not in index else field.with_nullable(True))
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    out = io.BytesIO()
    with pa.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    longest: list[str] = max((list(record) for record in records), key=len)
    names = dict.fromkeys(longest)  # the order of a record that has most of them
    names.update(dict.fromkeys(name for record in records for name in record))
    data = orjson.dumps([base64.b64encode(out.getbuffer()).decode(), list(names)])
    return MARK_IN_JSON + b":" + data


def _taken(column: Any, index: list[int | None]) -> Any:
    import pyarrow as pa

    first = index[0]
    if first is not None and index == list(range(first, first + len(index))):
        return column.slice(first, len(index))
    return column.take(pa.array(index, pa.int64()))


def _with_short_dictionary(array: Any) -> Any:
    import pyarrow as pa

    if not pa.types.is_dictionary(array.type):
        return array
    if len(array.dictionary) <= _LONG_DICTIONARY * len(array):
        return array
    fresh = array.dictionary_decode().dictionary_encode()
    kind = array.type
    return pa.DictionaryArray.from_arrays(
        fresh.indices.cast(kind.index_type), fresh.dictionary, ordered=kind.ordered
    )


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
    """For orjson: what it does not know, as an object that `read_line` makes the same again."""
    if _is_no_time(value):
        return None
    for kind, name, encode, _ in _KINDS:
        if isinstance(value, kind):
            return {MARK: name, "value": encode(value)}
    return as_plain(value)


def as_plain(value: Any) -> Any:
    """For orjson: what it does not know, in the form that JSON and CSV have for it.

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
