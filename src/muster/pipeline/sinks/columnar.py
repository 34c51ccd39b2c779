"""Parquet of records: a schema that holds them all, written one row group at a time."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from muster.base.errors import UsageError
from muster.pipeline.arrow import by_appearance, json_like
from muster.pipeline.sinks.lines import as_json
from muster.pipeline.sinks.parts import Batch, Part, batches
from muster.pipeline.sinks.survey import Seen
from muster.pipeline.sources.columnar import Again

#: Of a row group. It is small, because it decides the peak of memory, which should be the same
#: for a few thousand records and for millions.
GROUP_BYTES = 8 << 20
GROUP_ROWS = 100_000
#: Chunks of a row group whose bytes count more than its rows.
_CHUNKS = 8
#: Marks a column of JSON text, so that a reader knows to parse it.
_JSON_MARK = {b"muster": b"json"}
_NOTED = (b"pandas", b"huggingface")
_SCALARS = {
    "bool": pa.bool_(),
    "string": pa.string(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")()
       for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
#: What Python's values are.
_PLAIN = {
    bool: pa.bool_(), int: pa.int64(), str: pa.string(), bytes: pa.binary(),
    datetime.date: pa.date32(), datetime.time: pa.time64("us"),
    datetime.timedelta: pa.duration("us"),
}  # fmt: skip
_DIGITS_OF_DECIMAL128 = 38
#: Of a number, about.
_WIDTH = 8
_OF_ANY_LENGTH = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
)  # fmt: skip
_DECLARED = re.compile(r"(?P<item>\w+)(?P<list>\[(?P<length>\d+|\*|)\])?")


class ParquetEncoder:
    """Writes Parquet. A column has its declared type, else the input's if no stage changed it.

    Every other column has the type that holds all values, as `Seen` knows them. Integers among
    floats become floats, and keys that a struct lacks become null. A column of values without a
    common type is JSON text, and a note names it. A column without any value is text. Lists
    declared as of one length are stored as of any length where there are nulls beside them, for
    pyarrow up to 25 cannot read back the others (apache/arrow#35692).
    ``metadata``: what the schema of the input carried beside its columns; ``again`` reads columns
    that are still there.
    """

    def __init__(
        self,
        seen: Mapping[str, Seen],
        declared: Mapping[str, str],
        metadata: Mapping[bytes, bytes] | None = None,
        num_rows: int = 0,
        again: Again | None = None,
    ) -> None:
        self._again = again
        notes = []
        fields = []
        self._declared = declared
        self._checked: dict[str, Any] = {}
        self._carried = {name for name, found in seen.items() if found.carried}
        for name in dict.fromkeys((*seen, *declared)):
            if name in declared:
                found = seen.get(name)
                kind = self._checked[name] = declared_type(name, declared[name], found)
                if (0 if found is None else found.num_lists) < num_rows:
                    kind = _of_any_length(kind)
                fields.append(pa.field(name, kind))
                continue
            if name in self._carried:
                field = seen[name].carried[0]
                has_nulls = seen[name].num_carried < num_rows
                fields.append(field.with_nullable(field.nullable or has_nulls))
                continue
            why = seen[name].conflict()
            if why is None:
                fields.append(pa.field(name, _type_of(seen[name])))
            else:
                fields.append(pa.field(name, pa.string(), metadata=_JSON_MARK))
                notes.append(f"column {name!r} is JSON text: its values are {why}")
        self.schema = pa.schema(fields, _kept_metadata(metadata or {}, self._carried, fields))
        self.notes = tuple(notes)

    def writes_as(self, other: ParquetEncoder) -> bool:
        """Whether both write the same file of the same parts."""
        # A column of one type is written in one way, whether it is carried or not.
        is_one_schema = self.schema.equals(other.schema, check_metadata=True)
        return is_one_schema and self._checked == other._checked

    def write(self, parts: Iterable[Part], file: IO[bytes]) -> None:
        with (
            pq.ParquetWriter(file, self.schema, compression="zstd") as writer,
            ThreadPoolExecutor(1) as thread,
        ):

            def write(group: Any) -> None:
                writer.write_table(group, row_group_size=group.num_rows)

            # A row group is encoded while the next one is read.
            at_work: Future[Any] = thread.submit(int)
            for group in self._groups(parts):
                at_work.result()
                at_work = thread.submit(write, group)
            at_work.result()
        if self._again is not None:
            self._again.check_unchanged()

    def _groups(self, parts: Iterable[Part]) -> Iterator[Any]:
        """Row groups that end where their values say, in whatever batches the rows come: the file
        of a run that was interrupted has the same bytes as that of one that was not. So do the
        chunks in them, because pages end where chunks do.
        """
        group: list[Any] = []
        chunk: list[Any] = []
        rows = size = in_chunk = 0
        for batch in batches(parts, self._again):
            table = self._table(batch)
            ends, begin = np.cumsum(row_bytes(table)), 0
            while begin < table.num_rows:
                before = int(ends[begin - 1]) if begin else 0
                room = min(GROUP_BYTES - size, GROUP_BYTES // _CHUNKS - in_chunk)
                full = int(np.searchsorted(ends, before + room)) + 1
                stop = min(full, begin + GROUP_ROWS - rows, table.num_rows)
                taken = int(ends[stop - 1]) - before
                chunk.append(table.slice(begin, stop - begin))
                rows, size, in_chunk = rows + stop - begin, size + taken, in_chunk + taken
                is_full = rows == GROUP_ROWS or size >= GROUP_BYTES
                if is_full or in_chunk >= GROUP_BYTES // _CHUNKS:
                    group.append(_joined(chunk))
                    chunk, in_chunk = [], 0
                if is_full:
                    yield _whole(group)
                    group, rows, size = [], 0, 0
                begin = stop
        if chunk:
            group.append(_joined(chunk))
        if group:
            yield _whole(group)

    def _table(self, batch: Batch) -> Any:
        arrays = []
        there: Any = None if batch.carried is None else batch.carried.batch
        names = set() if there is None else set(there.schema.names)
        for field in self.schema:
            if field.name in self._carried:
                if field.name in names:
                    column = there.column(field.name)
                    arrays.append(column if column.type == field.type else column.cast(field.type))
                else:
                    arrays.append(pa.nulls(len(batch.records), field.type))
                continue
            if field.name in names:
                values = json_like(there.column(field.name))
            else:
                values = [record.get(field.name) for record in batch.records]
            if is_json_text(field):
                values = [None if v is None else as_json(v).decode() for v in values]
            try:
                array = _exact(values, self._checked.get(field.name, field.type))
                arrays.append(array if array.type == field.type else array.cast(field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                raise self._misfit(field, values, batch) from None
        if not arrays:
            raise UsageError(
                "No record has any column, and Parquet keeps no rows without columns.",
                hint="write a .jsonl file instead, or have the stage return something.",
            )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _misfit(self, field: Any, values: list[Any], batch: Batch) -> UsageError:
        for line, value in enumerate(values, start=batch.line):
            try:
                _exact([value], self._checked.get(field.name, field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                record = batch.records[line - batch.line]
                known = f"id {record['id']!r}, " if "id" in record else ""
                return UsageError(
                    f"The column {field.name!r} is declared as "
                    f"{self._declared.get(field.name, field.type)}, and a value does not fit: "
                    f"{_shortened(value)} ({known}line {line} of {batch.part.rows}): "
                    f"{str(error).strip().rstrip('.')}. No output was written.",
                    hint="declare another type for that column, or have the stage make what it "
                    "declares.",
                )
        raise AssertionError(f"all values of {field.name} fit one by one, but not together")


def row_bytes(table: Any) -> Any:
    """About how many bytes each row of a batch takes, as an array. It depends on the values alone,
    not on the buffers in which they lie.
    """
    return sum(map(_sizes, table.columns), np.zeros(table.num_rows, np.int64))


def _sizes(array: Any) -> Any:
    kind, types = array.type, pa.types
    if isinstance(array, pa.ExtensionArray):
        return _sizes(array.storage)
    if types.is_struct(kind):
        inner = sum(_sizes(array.field(i)) for i in range(kind.num_fields))
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        values = [array.keys, array.items] if types.is_map(kind) else [array.values]
        ends = np.concatenate([[0], np.cumsum(sum(map(_sizes, values)))])
        inner = np.diff(ends[np.asarray(array.offsets)])
    elif types.is_fixed_size_list(kind):
        length = kind.list_size
        values = array.values.slice(array.offset * length, len(array) * length)
        inner = _sizes(values).reshape(len(array), length).sum(axis=1)
    else:
        return _flat_sizes(array)
    return np.where(np.asarray(array.is_valid()), inner, 0)


def _flat_sizes(array: Any) -> Any:
    kind, types = array.type, pa.types
    if types.is_binary_view(kind):
        array = array.cast(pa.large_binary())
    elif types.is_string_view(kind):
        array = array.cast(pa.large_string())
    kind = array.type
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
    elif any(is_(kind) for is_ in _OF_ANY_LENGTH):
        return np.asarray(pc.binary_length(array).fill_null(0)).astype(np.int64) + _WIDTH
    else:
        width = _WIDTH
    return np.full(len(array), width, np.int64)


def _joined(batches: list[Any]) -> Any:
    """A table of one chunk. What is already one is not copied."""
    table = pa.Table.from_batches(batches)
    return table if len(batches) == 1 else table.unify_dictionaries().combine_chunks()


def _whole(group: list[Any]) -> Any:
    """A row group of these chunks."""
    table = pa.concat_tables(group).unify_dictionaries()
    return pa.table(list(map(by_appearance, table.columns)), schema=table.schema)


def _kept_metadata(
    metadata: Mapping[bytes, bytes], carried: set[str], fields: Sequence[Any]
) -> dict[bytes, bytes] | None:
    """The notes of pandas and Hugging Face about columns, as far as they are still true."""
    if not metadata or {field.name for field in fields} == carried:
        return dict(metadata) or None
    kept = dict(metadata)
    try:
        if b"pandas" in kept:
            noted = orjson.loads(kept[b"pandas"])
            noted["columns"] = [c for c in noted["columns"] if c.get("field_name") in carried]
            indices = noted["index_columns"]
            noted["index_columns"] = [i for i in indices if isinstance(i, dict) or i in carried]
            kept[b"pandas"] = orjson.dumps(noted)
        if b"huggingface" in kept:
            noted = orjson.loads(kept[b"huggingface"])
            features = noted["info"]["features"]
            noted["info"]["features"] = {n: f for n, f in features.items() if n in carried}
            kept[b"huggingface"] = orjson.dumps(noted)
    except (ValueError, LookupError, TypeError, AttributeError):
        # Of another shape than these libraries write: nobody could read it anyway.
        kept = {name: text for name, text in kept.items() if name not in _NOTED}
    return kept


def is_json_text(field: Any) -> bool:
    """Whether a column of a file that was read is JSON text, by its field in the schema."""
    return (field.metadata or {}).get(b"muster") == b"json"


def declared_type(column: str, text: str, seen: Seen | None) -> Any:
    """``float32``, ``string[]`` (a list), ``float32[384]`` (a list of that length) as a type.

    ``float32[*]``: a list of fixed length, which is that of the first value. UsageError: unknown.
    """
    match = _DECLARED.fullmatch(text.strip())
    if match is None or match["item"] not in _SCALARS:
        raise UsageError(
            f"The column {column!r} is declared as {text!r}, which is not a type.",
            hint=f"write one of {', '.join(sorted(_SCALARS))}, with [] for a list and [384] for "
            "one of fixed length.",
        )
    item = _SCALARS[match["item"]]
    if match["list"] is None:
        return item
    if match["length"] == "*":
        length = None if seen is None else seen.length
        return pa.list_(item) if length is None else pa.list_(item, length)
    return pa.list_(item, int(match["length"])) if match["length"] else pa.list_(item)


def _of_any_length(kind: Any) -> Any:
    return pa.list_(kind.value_field) if pa.types.is_fixed_size_list(kind) else kind


def _type_of(seen: Seen) -> Any:
    if not seen.kinds:
        return pa.string()
    if list in seen.kinds:
        assert seen.item is not None
        return pa.list_(_type_of(seen.item))
    if dict in seen.kinds:
        return pa.struct([pa.field(name, _type_of(inner)) for name, inner in seen.fields.items()])
    if float in seen.kinds:
        return pa.float64()
    kind = next(iter(seen.kinds))
    if kind is datetime.datetime:
        zones = seen.zones
        return pa.timestamp("us", tz=next(iter(zones)) if len(zones) == 1 else "UTC")
    if kind is decimal.Decimal:
        before, behind = seen.digits
        make = pa.decimal128 if before + behind <= _DIGITS_OF_DECIMAL128 else pa.decimal256
        return make(before + behind, behind)
    return _PLAIN[kind]


def _exact(values: list[Any], kind: Any) -> Any:
    """An array of exactly these values; ValueError where pyarrow would change one silently."""
    _check_kinds(values, kind)
    array = pa.array(values, type=kind)
    flat = array
    while _is_list(flat.type):
        flat = flat.flatten()
    # JSON has no infinity, so this one is a number that was too large.
    if pa.types.is_floating(flat.type) and pc.any(pc.is_inf(flat)).as_py():
        raise ValueError(f"it is too large for {flat.type}")
    return array


def _check_kinds(values: list[Any], kind: Any) -> None:
    """ValueError for what pyarrow would take and change: 1.5 to 1, and a text to its letters."""
    kinds = set(map(type, values))
    if _is_list(kind):
        if not kinds <= {list, type(None)}:
            raise ValueError("it is not a list")
        _check_kinds([v for items in values if items is not None for v in items], kind.value_type)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if bool in kinds:
            raise ValueError("it is not a number")
        if float in kinds and pa.types.is_integer(kind):
            for value in values:
                if type(value) is float and not value.is_integer():
                    raise ValueError("it is not a whole number")


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
