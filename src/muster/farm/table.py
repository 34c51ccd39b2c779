"""The table of a run: one row per task, as columns of Arrow that are streamed from its ledger."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.json as pa_json

from muster.farm import canonical
from muster.farm.rows import SYSTEM, Block, Lines, blocks, further_names, looked_at
from muster.run.folder import RunFolder

FLOAT, TEXT, BOOL, WHOLE = pa.float64(), pa.string(), pa.bool_(), pa.int64()
_KINDS = {float: FLOAT, str: TEXT, bool: BOOL, int: WHOLE}
#: Tasks that are written at once, or fewer that are larger than this.
_BATCH, _BATCH_BYTES = 20_000, 2**24
#: Of a task's columns those that its user has named.
PARTS = ("param", "metric")
T = TypeVar("T")


class Column(NamedTuple):
    """Where a column of the table is from: the part, the name in that part; and its type.

    ``seen``: the type by the values that were looked at; None where no task had one.
    """

    part: str
    name: str
    kind: pa.DataType
    seen: pa.DataType | None


class OtherColumns(Exception):
    """Some tasks have other columns than those that were looked at."""


def columns(folder: RunFolder, *, by_some: bool = False) -> dict[str, Column]:
    """The columns by their names in the table, from one pass over all tasks.

    A metric or parameter whose name another part has already taken gets a prefix. ``by_some``: of
    many tasks look at some only, which takes no time; `check_columns` then says whether all others
    are like them.
    """
    seen: dict[tuple[str, str], pa.DataType | None] = {}
    for number, looked in enumerate(looked_at(folder, by_some=by_some)):
        for part, found in zip(PARTS, looked, strict=True):
            for name in dict.fromkeys(itertools.chain.from_iterable(found)):
                if by_some and number and (part, name) not in seen:
                    return columns(folder)  # the order of the columns is that of all tasks
                own = [row[name] for row in found if name in row]
                seen[part, name] = widen_by_all(seen.get((part, name)), own)
    table: dict[str, Column] = {}
    for part in PARTS:
        for (owner, name), kind in seen.items():
            if owner == part:
                column = canonical.escape_surrogates(name)
                while column in table or column in SYSTEM:
                    column = f"{part}_{column}"
                table[column] = Column(part, name, kind or TEXT, kind)
    for name, of in SYSTEM.items():
        table[name] = Column("system", name, _KINDS[of], _KINDS[of])
    for name in further_names(folder):
        own_name = f"system_{name}" if name in table else name
        table[own_name] = Column("system", name, TEXT, TEXT)
    return table


def check_columns(
    block: Block, table: Sequence[Column], values: Sequence[list[Any]], absent: object
) -> None:
    """OtherColumns where these tasks have a name that ``table`` lacks, or values of another type.

    ``values``: by column, with ``absent`` where a task has none. With another mark than None only
    the names are looked at.
    """
    num_known = 0
    for column, own in zip(table, values, strict=True):
        if column.part == "system":
            continue
        num_known += len(own) - own.count(absent)
        if absent is None and widen_by_all(column.seen, own) != column.seen:
            raise OtherColumns
    if num_known == sum(map(len, block.params)) + sum(map(len, block.metrics)):
        return
    known = {(column.part, column.name) for column in table}
    for part, found in (("param", block.params), ("metric", block.metrics)):
        if any((part, name) not in known for name in itertools.chain.from_iterable(found)):
            raise OtherColumns


def widen(kind: pa.DataType | None, value: Any) -> pa.DataType | None:
    """The type that holds what has been seen so far and ``value``; text if nothing else does."""
    if kind is not None and type(value) is not int and _KINDS.get(type(value)) is kind:
        return kind
    found = _type_of(value)
    if found is None or found == kind:
        return kind
    if kind is None:
        return found
    if {str(kind), str(found)} == {"int64", "double"}:
        return pa.float64()
    if pa.types.is_list(kind) and pa.types.is_list(found):
        inner = {str(kind.value_type), str(found.value_type)}
        if "null" in inner:
            return kind if pa.types.is_null(found.value_type) else found
        if inner == {"int64", "double"}:
            return pa.list_(pa.float64())
    return pa.string()


def widen_by_all(kind: pa.DataType | None, values: Sequence[Any]) -> pa.DataType | None:
    """`widen` by one value after the other; of numbers and texts a few stand for all."""
    types = set(map(type, values))
    if types <= {int, float, str, bool, type(None)}:
        whole = [value for value in values if type(value) is int] if int in types else []
        values = [*(each() for each in types), *([min(whole), max(whole)] if whole else [])]
    for value in values:
        kind = widen(kind, value)
    return kind


def _type_of(value: Any) -> pa.DataType | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return WHOLE if -(2**63) <= value < 2**63 else TEXT
    if isinstance(value, float):
        return FLOAT
    if isinstance(value, list):
        inner: pa.DataType | None = None
        for item in value:
            inner = widen(inner, item)
        return pa.list_(inner or pa.null())
    return TEXT


def fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        return _text(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return []
    if pa.types.is_list(kind):
        return [fit(item, kind.value_type) for item in value]
    return value


def _text(value: Any) -> str:
    """A value in a column of texts: whole numbers beyond 64 bits in full, the rest as JSON."""
    if isinstance(value, str):
        return canonical.escape_surrogates(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    return canonical.encode(value).decode()


def batches(
    folder: RunFolder, *, by_some: bool = False
) -> tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]:
    """The table as a stream of record batches; memory does not grow with the number of tasks.

    ``by_some``: with the columns of some tasks. The stream ends in OtherColumns where others have
    different ones.
    """
    table = columns(folder, by_some=by_some)
    schema = pa.schema([(name, column.kind) for name, column in table.items()])
    sources = list(table.values())

    read = readers_of_lines(sources)

    def arrays(block: Block) -> list[pa.Array]:
        found = None if read is None or block.lines is None else read(block.lines)
        if found is not None:
            return [
                found[column.part, column.name]
                if column.part in PARTS
                else array_of(block.system[column.name], column.kind)
                for column in sources
            ]
        values = [cells(block, column, None) for column in sources]
        if by_some:
            check_columns(block, sources, values, None)
        return [array_of(*one) for one in zip(values, schema.types, strict=True)]

    def stream() -> Iterator[pa.RecordBatch]:
        with ahead(blocks(folder)) as read_ahead:
            for block in read_ahead:
                yield pa.RecordBatch.from_arrays(arrays(block), schema=schema)

    return schema, _joined(stream())


Cells = dict[tuple[str, str], pa.Array]
#: Numbers from here on are whole ones that no column of them holds, or floats.
_BEYOND = float(2**63)


def readers_of_lines(table: Sequence[Column]) -> Callable[[Lines], Cells | None] | None:
    """A function that has Arrow read parameters and metrics from lines of JSON, without an object
    of Python for each. It gives what the values of each task would give, or None where some may
    not be as the columns say: then they are to be looked at. None where a column is not simple.
    """
    fields: dict[str, list[tuple[str, pa.DataType]]] = {part: [] for part in PARTS}
    for column in table:
        if column.part in PARTS:
            is_name = canonical.escape_surrogates(column.name) == column.name
            if column.kind not in (WHOLE, FLOAT, TEXT, BOOL) or not is_name:
                return None
            fields[column.part].append((column.name, column.kind))
    options = {
        part: pa_json.ParseOptions(
            explicit_schema=pa.schema(own), unexpected_field_behavior="error"
        )
        for part, own in fields.items()
    }

    def read(lines: Lines) -> Cells | None:
        found: Cells = {}
        for part, text in zip(PARTS, lines, strict=True):
            num = text.count(b"\n") + 1
            if b"\\ud" in text or text.count(b"{") != num:
                return None
            if not fields[part]:
                if text.count(b"{}") != num:
                    return None
                continue
            try:
                rows = pa_json.read_json(
                    pa.BufferReader(text),
                    parse_options=options[part],
                    read_options=pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                )
            except pa.ArrowInvalid:  # another name, or a value of another type
                return None
            for name, kind in fields[part]:
                cells = rows.column(name).combine_chunks()
                if len(cells) != num or (kind == FLOAT and _is_beyond(cells)):
                    return None
                found[part, name] = cells
        return found

    return read


def _is_beyond(cells: pa.Array) -> bool:
    """Whether a number may be a whole one that needs more than 64 bits, which Arrow rounds."""
    numbers = memoryview(cells.buffers()[1]).cast("d")  # without NumPy, which need not be there
    return max(numbers) >= _BEYOND or min(numbers) <= -_BEYOND


@contextmanager
def ahead(stream: Generator[T, None, None]) -> Iterator[Iterator[T]]:
    """What ``stream`` yields, each made by a thread while the one before is used: SQLite and Arrow
    hold no lock of Python's at work. Raises what making the next one raises.
    """
    over = object()
    with ThreadPoolExecutor(1) as thread:

        def each() -> Iterator[T]:
            following: Future[Any] = thread.submit(next, stream, over)
            while (one := following.result()) is not over:
                following = thread.submit(next, stream, over)
                yield one

        try:
            yield each()
        finally:
            thread.submit(stream.close).result()  # a ledger is closed by the thread that opened it


def _joined(batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
    """The same rows in larger batches."""
    some: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        some.append(batch)
        num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
        if num_rows >= _BATCH or num_bytes >= _BATCH_BYTES:
            yield from pa.Table.from_batches(some).combine_chunks().to_batches()
            some, num_rows, num_bytes = [], 0, 0
    if some:
        yield from pa.Table.from_batches(some).combine_chunks().to_batches()


def cells(block: Block, column: Column, absent: object) -> list[Any]:
    """The values of one column, ``absent`` where a task has none."""
    name = column.name
    if column.part == "system":
        return block.system[name]
    found = block.params if column.part == "param" else block.metrics
    try:
        return list(map(operator.itemgetter(name), found))  # half of the time of the other
    except KeyError:
        return [row.get(name, absent) for row in found]


#: How a surrogate begins that `canonical.escape_surrogates` has written out.
_SURROGATE = re.compile(rb"\\ud")


def holds(column: pa.Array, pattern: re.Pattern[bytes]) -> bool:
    """Whether the texts of a column, which stand behind each other in memory, hold what may be
    looked for in all of them at once: in a hundredth of the time that it takes one by one.
    """
    texts = column.buffers()[2]
    return texts is not None and pattern.search(texts) is not None


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values of a column; those that do not fit its type are converted to it."""
    try:
        column = pa.array(values, type=kind)
        if not (kind == TEXT and holds(column, _SURROGATE)):
            return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeEncodeError):
        pass
    return pa.array([fit(value, kind) for value in values], type=kind)
