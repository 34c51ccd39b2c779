"""The lines of parts: columns that are as they were read, and values that JSON does not know.

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
import dataclasses
import datetime
import decimal
import enum
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import orjson

from muster.base.errors import SetupError
from muster.pipeline.sources.columnar import Again

#: Begins with a character that no column's name has.
MARK = "\x01muster"
MARK_IN_JSON = orjson.dumps(MARK)
RAW = "\x01raw"
_RAW_START = b"{" + orjson.dumps(RAW) + b":"
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
#: The text of a line, and the pieces of what is behind it: large ones are not copied to be joined.
Line = tuple[bytes, ...]
#: In what orjson says of an integer that it does not write.
_LONG_INTEGER = "64-bit"


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


def num_behind(line: bytes) -> int:
    """How many bytes are behind a line. It may have them at its end already."""
    if not line.startswith(_RAW_START):
        return 0
    number = line[len(_RAW_START) : line.find(b",", len(_RAW_START))]
    return int(number) if number.isdigit() else 0  # else it is damaged, which its sha256 shows


def with_header(head: bytes, stream: bytes, line: Line) -> Line:
    """The line of a record with another field ``head``, and ``stream`` behind what it has there."""
    text, *own = line
    if own:
        text = b"{" + text[text.index(b",") + 1 :]
    text = b"{" + head + (b"}\n" if text == b"{}\n" else b"," + text[1:])
    return _with_bytes(text, [*own, stream])


def _with_bytes(text: bytes, pieces: Sequence[bytes]) -> Line:
    if size := sum(map(len, pieces)):
        return (b"".join((_RAW_START, b"%d," % size, text[1:])), *pieces)
    return (text,)


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

    def whole(self, line: bytes) -> Line:
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


def as_json(value: Any, default: Callable[[Any], Any] = as_plain, option: int = _OPTIONS) -> bytes:
    """JSON of a value, with integers of any size as they are, which orjson refuses. Null stands for
    NaN and infinity, as orjson has it. Raises what orjson raises.
    """
    try:
        return orjson.dumps(value, default=default, option=option)
    except TypeError as error:
        if _LONG_INTEGER not in str(error):
            raise error.__cause__ or error from None

    def other(item: Any) -> Any:
        return _finite(_as_orjson_has_it(item, default, option))

    try:
        text = json.dumps(
            _finite(value), default=other, ensure_ascii=False, separators=(",", ":")
        )  # fmt: skip
    except RecursionError:
        raise TypeError("it is nested too deeply, or holds itself") from None
    return text.encode() + (b"\n" if option & orjson.OPT_APPEND_NEWLINE else b"")


def _as_orjson_has_it(item: Any, default: Callable[[Any], Any], option: int) -> Any:
    """What the json module does not know, which orjson may: arrays, dataclasses, enums, UUIDs."""
    with suppress(TypeError):  # a long integer is in it
        return json.loads(orjson.dumps(item, default=default, option=option))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return {name: getattr(item, name) for name in names if not name.startswith("_")}
    return item.value if isinstance(item, enum.Enum) else default(item)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    if zone is None:
        return made
    from zoneinfo import ZoneInfo  # here: every worker of a map imports this module

    return made.astimezone(ZoneInfo(zone))


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
