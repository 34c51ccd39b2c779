"""Rows of Arrow data as records for stages, and back: columns that stages have not changed.

A stage gets plain Python values: bytes, datetime, Decimal, lists, dicts. Python's times end at
microseconds and the year 9999; a stage sees nanoseconds cut off, and a time beyond as the integer
that is stored. A column that stages do not change is written from the Arrow data, without loss.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from muster.pipeline.sinks.lines import MARK_IN_JSON
from muster.pipeline.sources.source import ArrowRow, Origin

_SIMPLE = (int, str, bytes, bool, type(None))
#: Values of rows that are kept together: Arrow cannot hold more than 2 GiB of them, and a stage may
#: have made many records of one large row.
_GROUP_BYTES = 64 << 20
#: A dictionary that is so much longer than the rows of a group is cut to what they use.
_LONG_DICTIONARY = 4


def rows_of(batch: pa.RecordBatch, origin: Origin | None = None) -> Iterator[ArrowRow]:
    names = batch.schema.names
    columns = [values_of(column) for column in batch.columns]
    if not columns:
        columns, names = [[None] * batch.num_rows], []
    for index, values in enumerate(zip(*columns, strict=True)):
        row = ArrowRow(zip(names, values, strict=False))
        row.batch, row.index, row.origin = batch, index, origin
        yield row


def values_of(array: Any) -> list[Any]:
    """The values of a column as a stage sees them."""
    try:
        view = _view(array.type)
        return (array if view is None else array.cast(view, safe=False)).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, OverflowError, ValueError, LookupError):
        return [_value_of(scalar) for scalar in array]


def json_like(array: Any) -> list[Any]:
    """As `values_of`, but maps are lists of [key, value], as in lines of JSON."""
    values = values_of(array)
    return [_with_lists(v) for v in values] if pa.types.is_nested(array.type) else values


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _value_of(scalar: Any) -> Any:
    """One value of a column in which some value has no equal in Python."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        return {name: _value_of(scalar[name]) for name in scalar.type.names}
    if isinstance(scalar, pa.MapScalar):
        return [(_value_of(pair["key"]), _value_of(pair["value"])) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar):  # of all kinds of lists
        return [_value_of(item) for item in scalar.values]
    if isinstance(scalar, pa.DictionaryScalar):
        return _value_of(scalar.value)
    try:
        view = _view(scalar.type)
        return (scalar if view is None else scalar.cast(view, safe=False)).as_py()
    except (pa.ArrowException, OverflowError, ValueError, LookupError):
        return scalar.value  # of times, dates and durations


def lost_as_text(schema: Any) -> list[str]:
    """Sentences that name the columns whose values JSON lines and CSV cannot hold."""
    raw = [field.name for field in schema if _holds_bytes(field.type)]
    fine = [field.name for field in schema if _view(field.type) is not None]
    said = []
    if raw:
        said.append(f"bytes become base64 text in this output: {', '.join(raw)}")
    if fine:
        said.append(
            f"nanoseconds are cut off in this output, Parquet keeps them: {', '.join(fine)}"
        )
    return said


def _holds_bytes(kind: Any) -> bool:
    types = pa.types
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    if types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


@cache
def _view(kind: Any) -> Any:
    """The type with nanoseconds replaced by microseconds; None if there are none in it."""
    found = _in_microseconds(kind)
    return None if found == kind else found


def _in_microseconds(kind: Any) -> Any:
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_dictionary(kind):
        inner = _in_microseconds(kind.value_type)
        return kind if inner == kind.value_type else inner
    if types.is_map(kind):
        return pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([f.with_type(_in_microseconds(f.type)) for f in kind])
    if types.is_fixed_size_list(kind):
        field = kind.value_field
        return pa.list_(field.with_type(_in_microseconds(field.type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        field = kind.value_field
        return make(field.with_type(_in_microseconds(field.type)))
    return kind


# ------------------------------------------------------------------ from records to columns


def pieces_of(rows: Sequence[ArrowRow]) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a batch whose values can be kept together. A row may be there often."""
    if not rows:
        return
    times = max(Counter(row.index for row in rows).values())
    if times * rows[0].batch.nbytes <= _GROUP_BYTES:  # by far the most
        yield 0, len(rows)
        return
    begin = size = 0
    sizes: dict[int, int] = {}
    for place, row in enumerate(rows):
        if row.index not in sizes:
            sizes[row.index] = sum(map(_num_bytes, row.values()))
        size += sizes[row.index]
        if size > _GROUP_BYTES and place > begin:
            yield begin, place
            begin, size = place, sizes[row.index]
    yield begin, len(rows)


def _num_bytes(value: Any) -> int:
    """About how many bytes Arrow takes for a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 8


def untouched(rows: Sequence[ArrowRow], records: Sequence[dict[str, Any]]) -> list[str]:
    """The columns of the rows' batch that all records hold unchanged, or with None.

    ``records``: each made of the row at the same place. None fits, because every type has it.
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
    if not pa.types.is_nested(field.type):
        return False
    here = [i for i, record in enumerate(records) if record.get(field.name) is not None]
    column = rows[0].batch.column(field.name)
    fresh = values_of(column.take(pa.array([rows[i].index for i in here], pa.int64())))
    now = [records[i][field.name] for i in here]
    return fresh != now and not all(map(_is_same, fresh, now))


def _is_same(one: Any, two: Any) -> bool:
    """Compare two values; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(_is_same, one, two))
    both_nan = isinstance(one, float) and isinstance(two, float) and math.isnan(one)
    return bool(one == two) or (both_nan and math.isnan(two))


def header(
    rows: Sequence[ArrowRow], records: Sequence[dict[str, Any]], kept: Sequence[str]
) -> tuple[bytes, bytes]:
    """The field `MARK` of the first line of a group, with its name and without braces, and what
    goes behind that line: nothing where the field can say in which rows of the input the columns
    are, else an Arrow stream of them.
    """
    source, origin = rows[0].batch, rows[0].origin
    taken = [
        (
            name,
            [
                row.index if name in r and (r[name] is not None or row[name] is None) else None
                for row, r in zip(rows, records, strict=True)
            ],
        )
        for name in kept
    ]
    for name, _ in taken:  # what cannot be taken should fail now and not when all is done
        _taken(source.column(name).slice(0, 1), [None])
    longest: list[str] = max((list(record) for record in records), key=len)
    names = dict.fromkeys(longest)  # the order of a record that has most of them
    names.update(dict.fromkeys(name for record in records for name in record))
    stream = b""
    if origin is None:
        stream = _stream(batch_of(source, taken))
        held: dict[str, Any] = {"stream": len(stream)}
    else:
        held = {
            "file": origin.file, "group": origin.group, "row": origin.row,
            "num_rows": source.num_rows, "length": len(rows),
            "columns": [
                [name, _shortened(index), _num_nulls(source.column(name), index)]
                for name, index in taken
            ],
        }  # fmt: skip
    return MARK_IN_JSON + b":" + orjson.dumps([held, list(names)]), stream


def batch_of(source: Any, taken: Sequence[tuple[str, list[int | None]]]) -> Any:
    """A batch of columns of ``source``, of each the rows at these places; None is null."""
    arrays, fields = [], []
    for name, index in taken:
        arrays.append(_with_short_dictionary(_taken(source.column(name), index)))
        fields.append(field_of(source.schema, name, has_gaps=None in index))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def field_of(schema: Any, name: str, *, has_gaps: bool) -> Any:
    field = schema.field(name)
    return field.with_nullable(True) if has_gaps else field


def _stream(batch: Any) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    return out.getvalue()


def _taken(column: Any, index: list[int | None]) -> Any:
    first = index[0]
    if first is not None and _is_range(index, first):
        return column.slice(first, len(index))
    places, kind = pa.array(index, pa.int64()), column.type
    if pa.types.is_string_view(kind):  # Arrow takes no views
        return column.cast(pa.large_string()).take(places).cast(kind)
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary()).take(places).cast(kind)
    return column.take(places)


def _is_range(index: list[int | None], first: int) -> bool:
    return index == list(range(first, first + len(index)))


def _shortened(index: list[int | None]) -> int | list[int | None]:
    """The places as `whole` reads them: of a range the first alone."""
    first = index[0]
    return first if first is not None and _is_range(index, first) else index


def whole(index: int | list[int | None], length: int) -> list[int | None]:
    return list(range(index, index + length)) if isinstance(index, int) else index


def _num_nulls(column: Any, index: list[int | None]) -> int:
    if not column.null_count:
        return index.count(None)
    return int(_taken(column.is_null(), index).fill_null(True).true_count)


def _with_short_dictionary(array: Any) -> Any:
    # The order of what is ordered is in its dictionary, which therefore stays.
    if not pa.types.is_dictionary(array.type) or array.type.ordered:
        return array
    if len(array.dictionary) <= _LONG_DICTIONARY * len(array):
        return array
    fresh = array.dictionary_decode().dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        fresh.indices.cast(array.type.index_type), fresh.dictionary
    )


def by_appearance(column: Any) -> Any:
    """A column whose chunks share a dictionary, with another that holds what is used, in the order
    in which it first comes: one that does not depend on the batches in which the rows came.
    """
    kind = column.type
    if not pa.types.is_dictionary(kind) or kind.ordered or not column.num_chunks:
        return column
    used = pa.chunked_array([chunk.indices for chunk in column.chunks]).unique().drop_null()
    dictionary = column.chunk(0).dictionary.take(used)
    chunks = [
        pa.DictionaryArray.from_arrays(
            pc.index_in(chunk.indices, value_set=used).cast(kind.index_type), dictionary
        )
        for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, type=kind)
