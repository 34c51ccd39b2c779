"""The table of a run: one row per task, streamed from the ledger to Parquet and CSV.

``python -m muster.farm.export RUN`` refreshes both files; the coordinator runs it as a child, so
that its own memory stays small. Missing is empty, never 0.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from muster.base.atomic_files import replacing
from muster.base.errors import MusterError, SetupError, UsageError
from muster.base.reaper import die_with_parent
from muster.base.shown_text import shown_line
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.lifecycle import REASONS
from muster.farm.task import Outcome, TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder

_CHUNK = 20_000
#: What a spreadsheet takes for the start of something to compute.
_FORMULA = r"^[=+\-@\t\r]"

#: What muster says about every task, after the parameters and the metrics.
SYSTEM = {
    "task": pa.string(),
    "target": pa.string(),
    "state": pa.string(),
    "attempts": pa.int64(),
    "seconds": pa.float64(),
    "device": pa.string(),
    "peak_mib": pa.float64(),
    "folder": pa.string(),
    "error": pa.string(),
}
#: After these, where attempts of more than one code are in the run: which one it was.
_CODE, _CODE_DIGITS = "code", 8


#: Parameters, metrics, and what muster says, of one task.
Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
_PARTS = {"param": 0, "metric": 1, "system": 2}


def rows(folder: RunFolder) -> Iterator[Row]:
    """Every task in the order of the plan."""
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        for row in ledger.tasks():
            yield _params(row, numbers), _metrics(folder, row), _system(folder, row)


def done_rows(folder: RunFolder) -> Iterator[Row]:
    """The tasks of functions that are done, without a look at all the others first."""
    with LedgerReader(folder.ledger) as ledger:
        for row in ledger.tasks():
            if row.state is TaskState.DONE:
                yield _params(row, frozenset()), _metrics(folder, row), _system(folder, row)


def _numbers(folder: RunFolder) -> frozenset[str]:
    """Parameters of commands, which are texts, all of whose values are numbers."""
    found: dict[str, bool] = {}
    with LedgerReader(folder.ledger) as ledger:
        for row in ledger.tasks():
            params = canonical.decode(row.payload)
            if not is_command_of(row.target, params):
                continue
            for name, value in params.items():
                if isinstance(value, str):
                    found[name] = found.get(name, True) and is_number(value)
    return frozenset(name for name, is_one in found.items() if is_one)


def _params(row: TaskRow, numbers: frozenset[str]) -> dict[str, Any]:
    params = _flat(canonical.decode(row.payload))
    if not numbers or not is_command_of(row.target, params):
        return params
    return {
        name: to_number(value) if name in numbers and isinstance(value, str) else value
        for name, value in params.items()
    }


def _flat(params: dict[str, Any]) -> dict[str, Any]:
    """Fields of dataclasses and dicts as ``config.lr``, like those of results."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, dict) and value:
            inner = {f"{name}.{key}": item for key, item in _flat(value).items()}
            flat |= {name: value} if inner.keys() & params.keys() else inner
        else:
            flat[name] = value
    return flat


def _metrics(folder: RunFolder, row: TaskRow) -> dict[str, Any]:
    if row.state is not TaskState.DONE:
        return {}
    value = row.value
    if value is None:
        value = folder.value(row.key.hex()).read_bytes()
    metrics: dict[str, Any] = canonical.decode(value)
    return metrics


def _system(folder: RunFolder, row: TaskRow) -> dict[str, Any]:
    key = row.key.hex()
    names = {TaskState.READY: "waiting", TaskState.CLAIMED: "waiting"}
    error = None
    if row.state is TaskState.FAILED and row.outcome is not None:
        error = f"{REASONS[Outcome(row.outcome)]}: {row.message or ''}".rstrip(": ")
    return {
        "task": key[:12],
        "target": shown_line(row.target),
        "state": names.get(row.state, row.state.name.lower()),
        "attempts": row.attempts,
        "seconds": row.seconds if row.state.is_final else None,
        "device": row.device,
        "peak_mib": row.peak_mib,
        "folder": str(folder.artifact(key).relative_to(folder.path)) if row.has_files else None,
        "error": error,
        _CODE: row.code and row.code[:_CODE_DIGITS],
    }


def columns(folder: RunFolder) -> dict[str, tuple[str, str, pa.DataType]]:
    """Column name → (part, name in that part, type), from one pass over all tasks.

    A metric or parameter whose name another part has already taken gets a prefix.
    """
    seen: dict[tuple[str, str], pa.DataType | None] = {}
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        has_codes = ledger.num_codes() > 1
        for row in ledger.tasks():
            for part, values in (
                ("param", _params(row, numbers)),
                ("metric", _metrics(folder, row)),
            ):
                for name, value in values.items():
                    seen[part, name] = _widen(seen.get((part, name)), value)
    table: dict[str, tuple[str, str, pa.DataType]] = {}
    for part in ("param", "metric"):
        for (owner, name), kind in seen.items():
            if owner == part:
                column = canonical.escape_surrogates(name)
                while column in table or column in SYSTEM:
                    column = f"{part}_{column}"
                table[column] = (part, name, kind or pa.string())
    for name, kind in SYSTEM.items():
        table[name] = ("system", name, kind)
    if has_codes:
        table[_code_column(table)] = ("system", _CODE, pa.string())
    return table


def _code_column(taken: Container[str]) -> str:
    return f"system_{_CODE}" if _CODE in taken else _CODE


_FLOAT, _TEXT, _BOOL = pa.float64(), pa.string(), pa.bool_()
_SIMPLE = {float: _FLOAT, str: _TEXT, bool: _BOOL}


def _widen(kind: pa.DataType | None, value: Any) -> pa.DataType | None:
    """The type that holds what has been seen so far and ``value``; text if nothing else does."""
    if kind is not None and _SIMPLE.get(type(value)) is kind:
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


def _type_of(value: Any) -> pa.DataType | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else _TEXT
    if isinstance(value, float):
        return _FLOAT
    if isinstance(value, list):
        inner: pa.DataType | None = None
        for item in value:
            inner = _widen(inner, item)
        return pa.list_(inner or pa.null())
    return _TEXT


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        return _text(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return []
    if pa.types.is_list(kind):
        return [_fit(item, kind.value_type) for item in value]
    return value


def _text(value: Any) -> str:
    """A value in a column of texts: whole numbers beyond 64 bits in full, the rest as JSON."""
    if isinstance(value, str):
        return canonical.escape_surrogates(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    return canonical.encode(value).decode()


def batches(folder: RunFolder) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The table as a stream of record batches; memory does not grow with the number of tasks."""
    table = columns(folder)
    schema = pa.schema([(name, kind) for name, (_, _, kind) in table.items()])

    def stream() -> Iterator[pa.RecordBatch]:
        all_rows = rows(folder)
        while chunk := list(itertools.islice(all_rows, _CHUNK)):
            arrays = [_column(chunk, *source) for source in table.values()]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return schema, stream()


def _column(chunk: Sequence[Row], part: str, name: str, kind: pa.DataType) -> pa.Array:
    """One column of some rows. Values that do not fit its type as they are, are made to."""
    index = _PARTS[part]
    values = [row[index].get(name) for row in chunk]
    try:
        column = pa.array(values, type=kind)
        if not (kind == _TEXT and pc.any(pc.match_substring(column, "\\ud")).as_py()):
            return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeEncodeError):
        pass
    return pa.array([_fit(value, kind) for value in values], type=kind)


def export(folder: RunFolder, target: Path) -> int:
    """Write the table to ``target`` (.parquet, .csv or .jsonl) and return its number of rows."""
    suffix = _suffix_of(target)
    with _writing(target):
        if suffix == ".jsonl":
            return _export_lines(folder, target)
        known, count = _num_tasks(folder), 0
        schema, stream = batches(folder)
        with replacing(target) as beside, _writer(beside, suffix, schema) as write:
            for batch in stream:
                count += batch.num_rows
                write(batch)
            _check_whole(count, known, target)
        return count


def export_records(records: Sequence[Mapping[str, Any]], target: Path) -> int:
    """Write a table of anybody's records to ``target``, as `export` does: the columns in the
    order in which they come up, empty where a record has none.
    """
    suffix = _suffix_of(target)
    kinds: dict[str, pa.DataType | None] = {}
    for record in records:
        for name, value in record.items():
            kinds[name] = _widen(kinds.get(name), value)
    schema = pa.schema([(name, kind or _TEXT) for name, kind in kinds.items()])
    with _writing(target), replacing(target) as beside:
        if suffix == ".jsonl":
            beside.write_bytes(b"".join(canonical.encode(dict(r)) + b"\n" for r in records))
            return len(records)
        with _writer(beside, suffix, schema) as write:
            columns = [
                pa.array([_fit(record.get(field.name), field.type) for record in records],
                         type=field.type)
                for field in schema
            ]  # fmt: skip
            write(pa.RecordBatch.from_arrays(columns, schema=schema))
    return len(records)


def _suffix_of(target: Path) -> str:
    suffix = target.suffix.lower()
    if suffix not in (".parquet", ".csv", ".jsonl"):
        raise UsageError(
            f"Cannot export to {target}: {suffix or 'no suffix'} is not a known format.",
            hint="end the name with .csv, .parquet or .jsonl.",
        )
    if not target.parent.is_dir():
        raise UsageError(
            f"Cannot export to {target}: there is no folder {target.parent}.",
            hint="make that folder first, or name another.",
        )
    return suffix


@contextmanager
def _writing(target: Path) -> Iterator[None]:
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
    """While a run goes on its plan may grow under the export: more rows are no loss."""
    if count < known:
        raise SetupError(
            f"The counts do not balance: the ledger knows {known:,} tasks, and the table has "
            f"{count:,} rows. {target} was left as it was.",
            hint="the ledger is damaged; please report it.",
        )


def refresh(folder: RunFolder) -> None:
    """Renew ``results.parquet`` and ``results.csv`` in one pass."""
    known, count = _num_tasks(folder), 0
    schema, stream = batches(folder)
    with (
        replacing(folder.results_parquet) as parquet,
        replacing(folder.results_csv) as csv,
        _writer(parquet, ".parquet", schema) as write_parquet,
        _writer(csv, ".csv", schema) as write_csv,
    ):
        for batch in stream:
            count += batch.num_rows
            write_parquet(batch)
            write_csv(batch)
        _check_whole(count, known, folder.results_csv)


def _export_lines(folder: RunFolder, target: Path) -> int:
    known, count = _num_tasks(folder), 0
    sources = [(column, _PARTS[part], name) for column, (part, name, _) in columns(folder).items()]
    with replacing(target) as beside, beside.open("wb") as lines:
        for row in rows(folder):
            cells = {column: row[i][name] for column, i, name in sources if name in row[i]}
            lines.write(canonical.encode(cells) + b"\n")
            count += 1
        _check_whole(count, known, target)
    return count


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
        elif field.type == _TEXT and pc.any(pc.match_substring_regex(column, _FORMULA)).as_py():
            cells = [None if v is None else canonical.csv_cell(v) for v in column.to_pylist()]
            column = pa.array(cells, type=field.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a child of this process: it goes when that is killed
        die_with_parent(int(sys.argv[2]))
    try:
        refresh(RunFolder(Path(sys.argv[1])))
    except MusterError as problem:
        sys.exit(str(problem))
