"""The table of a run: one row per task, streamed from the ledger to Parquet and CSV.

`muster.farm.table_process` refreshes both files in a process of its own. Missing is empty, never 0.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from muster.base.atomic_files import replacing, sweep
from muster.base.collector import without_collector
from muster.base.errors import SetupError, UsageError
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader
from muster.farm.rows import blocks
from muster.farm.table import (
    TEXT,
    OtherColumns,
    ahead,
    array_of,
    batches,
    cells,
    check_columns,
    columns,
    holds,
    widen_by_all,
)
from muster.run.folder import RunFolder

_ABSENT = object()
#: Of anybody's records: a row group.
_RECORDS_AT_ONCE = 20_000
#: With one of these at its start a spreadsheet takes a text for something to compute.
_SIGN = re.compile(rb"[=+\-@\t\r]")


def export(folder: RunFolder, target: Path) -> int:
    """Write the table to ``target`` (.parquet, .csv or .jsonl) and return its number of rows."""
    suffix = _suffix_of(target)
    with writing(target), without_collector():
        if suffix == ".jsonl":
            return _first_by_some(lambda by_some: _export_lines(folder, target, by_some))
        return _export_tables(folder, target)


def export_records(records: Callable[[], Iterator[Mapping[str, Any]]], target: Path) -> int:
    """Write a table of anybody's records to ``target``, as `export` does: the columns in the
    order in which they come up, empty where a record has none. Returns their number; nothing is
    written where there is none.

    records: gives them twice, so that not all are held; those that come between the two are left
        for the next export
    """
    suffix, count = _suffix_of(target), 0
    kinds: dict[str, pa.DataType | None] = {}
    for some in _by_some(records()):
        count += len(some)
        for name in dict.fromkeys(name for record in some for name in record):
            kinds[name] = widen_by_all(kinds.get(name), [record.get(name) for record in some])
    if not count:
        return 0
    schema = pa.schema([(name, kind or TEXT) for name, kind in kinds.items()])
    again = itertools.islice(records(), count)
    with writing(target), replacing(target) as beside:
        if suffix == ".jsonl":
            with beside.open("wb") as lines:
                lines.writelines(canonical.encode(dict(record)) + b"\n" for record in again)
            return count
        with _writer(beside, suffix, schema) as write:
            for some in _by_some(again):
                columns = [array_of([r.get(f.name) for r in some], f.type) for f in schema]
                write(pa.RecordBatch.from_arrays(columns, schema=schema))
    return count


def _by_some(records: Iterator[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    while some := list(itertools.islice(records, _RECORDS_AT_ONCE)):
        yield some


def export_table(table: pa.Table, target: Path) -> int:
    """Write a table to ``target``, as `export` does."""
    suffix = _suffix_of(target)
    with writing(target), replacing(target) as beside:
        if suffix == ".jsonl":
            with beside.open("wb") as lines:
                for batch in table.to_batches():
                    lines.writelines(canonical.encode(row) + b"\n" for row in batch.to_pylist())
        else:
            with _writer(beside, suffix, table.schema) as write:
                for batch in table.to_batches():
                    write(batch)
    return int(table.num_rows)


def _suffix_of(target: Path) -> str:
    suffix = target.suffix.lower()
    if suffix not in (".parquet", ".csv", ".jsonl"):
        raise UsageError(
            f"Cannot export to {target}: {suffix or 'no suffix'} is not a known format.",
            hint="end the name with .csv, .parquet or .jsonl; `muster export` also writes a search "
            "to .db.",
        )
    check_target(target)
    return suffix


def check_target(target: Path) -> None:
    """UsageError where there is no folder for the file."""
    if not target.parent.is_dir():
        raise UsageError(
            f"Cannot export to {target}: there is no folder {target.parent}.",
            hint="make that folder first, or name another.",
        )


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """SetupError for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"Cannot write {target}: {error.strerror or error}.",
            hint="make room, or name a place where you may write.",
        ) from error


def _num_tasks(folder: RunFolder) -> int:
    with LedgerReader(folder.ledger) as ledger:
        return ledger.num_tasks()


def _check_whole(count: int, known: int, target: Path) -> None:
    """Raise where rows are missing; a plan may grow under the export, so more rows are no loss."""
    if count < known:
        raise SetupError(
            f"The counts do not balance: the ledger knows {known:,} tasks, and the table has "
            f"{count:,} rows. {target} was left as it was.",
            hint="the ledger is damaged; please report it.",
        )


def refresh(folder: RunFolder) -> None:
    """Renew ``results.parquet`` and ``results.csv`` in one pass. For who holds the run alone."""
    for target in (folder.results_parquet, folder.results_csv):
        sweep(target)
    _export_tables(folder, folder.results_parquet, folder.results_csv)


def _first_by_some(write: Callable[[bool], int]) -> int:
    """Write with the columns that some tasks have; and again, after a look at all of them, where
    others turn out to have different ones. A look at a million tasks takes a fifth of the time.
    """
    try:
        return write(True)
    except OtherColumns:
        return write(False)


def _export_tables(folder: RunFolder, *targets: Path) -> int:
    def write(by_some: bool) -> int:
        known, count = _num_tasks(folder), 0
        schema, stream = batches(folder, by_some=by_some)
        with ExitStack() as stack:
            writers = []
            for target in targets:
                beside = stack.enter_context(replacing(target))
                writers.append(stack.enter_context(_writer(beside, target.suffix.lower(), schema)))
            for batch in stack.enter_context(ahead(stream)):
                count += batch.num_rows
                for write_batch in writers:
                    write_batch(batch)
            _check_whole(count, known, targets[-1])
        return count

    return _first_by_some(write)


def _export_lines(folder: RunFolder, target: Path, by_some: bool) -> int:
    known, count = _num_tasks(folder), 0
    table = columns(folder, by_some=by_some)
    names, sources = tuple(table), list(table.values())
    with (
        replacing(target) as beside,
        beside.open("wb") as lines,
        ahead(blocks(folder)) as stream,
    ):
        for block in stream:
            by_column = [cells(block, column, _ABSENT) for column in sources]
            if by_some:
                check_columns(block, sources, by_column, _ABSENT)
            lines.writelines(_lines(names, by_column, block.is_json))
            count += len(block)
        _check_whole(count, known, target)
    return count


def _lines(
    names: Sequence[str], by_column: Sequence[Sequence[Any]], is_json: bool
) -> Iterator[bytes]:
    """A line for each row, without what a row has not. One at a time: to keep a thousand of them
    and join them takes longer than to write each, for the memory that they come and go with.
    """
    # Without a step of Python's own for each.
    rows: Iterator[dict[str, Any]] = map(
        dict, map(zip, repeat(names), zip(*by_column, strict=True))
    )
    if any(_ABSENT in column for column in by_column):
        rows = ({name: of[name] for name in of if of[name] is not _ABSENT} for of in rows)
    if is_json:
        return map(canonical.encode_json_line, rows)
    return (canonical.encode(row) + b"\n" for row in rows)


@contextmanager
def _writer(
    path: Path, suffix: str, schema: pa.Schema
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Writes record batches of ``schema`` as Parquet or CSV; closed on leaving."""
    # Opened here: pyarrow takes no path that is not Unicode.
    if suffix == ".parquet":
        with path.open("wb") as file, pa_parquet.ParquetWriter(file, schema) as parquet:
            yield parquet.write_batch
        return
    flat = pa.schema([(canonical.csv_cell(field.name), _flat_type(field.type)) for field in schema])
    options = pa_csv.WriteOptions(quoting_style="needed")
    with path.open("wb") as file, pa_csv.CSVWriter(file, flat, write_options=options) as csv:
        yield lambda batch: csv.write_batch(_flatten(batch, flat))


def _flat_type(kind: pa.DataType) -> pa.DataType:
    """CSV has no lists: they become JSON text; the rest stays."""
    return pa.string() if pa.types.is_list(kind) else kind


def _flatten(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for column, field in zip(batch.columns, schema, strict=True):
        if field.type != column.type:
            values = column.to_pylist()
            column = pa.array(
                [None if v is None else canonical.encode(v).decode() for v in values],
                type=field.type,
            )
        elif field.type == TEXT and holds(column, _SIGN):
            safe = [None if v is None else canonical.csv_cell(v) for v in column.to_pylist()]
            column = pa.array(safe, type=field.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


if __name__ == "__main__":  # by this name a coordinator that an update outlives asks for its table
    from muster.farm.table_process import main

    sys.exit(main(sys.argv[1:]))
