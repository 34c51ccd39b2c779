"""A run as a table, streamed from its ledger: one row per task, and the columns that they have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from muster.base.shown_text import shown_line
from muster.farm import canonical
from muster.farm.canonical import short_key
from muster.farm.decisions import REASONS
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.results import whole_value
from muster.farm.task import Outcome, TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder

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


_CHUNK = 20_000
#: After these, where attempts of more than one code are in the run: which one it was.
_CODE, _CODE_DIGITS = "code", 8
#: And where a search began tasks with the checkpoints of others: with whose.
_ORIGIN = "from_task"
FLOAT, TEXT, BOOL = pa.float64(), pa.string(), pa.bool_()
#: Parameters, metrics, and what muster says, of one task.
Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
PARTS = {"param": 0, "metric": 1, "system": 2}


def rows(folder: RunFolder) -> Iterator[Row]:
    """Every task in the order of the plan."""
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        origins = {number: short_key(key) for number, key in ledger.origins().items()}
        for row in ledger.tasks():
            system = {**system_of(folder, row), _ORIGIN: origins.get(row.task_id)}
            yield _params(row, numbers), metrics_of(folder, row), system


def done_rows(folder: RunFolder) -> Iterator[Row]:
    """The tasks of functions that are done, read without the first pass that commands need."""
    with LedgerReader(folder.ledger) as ledger:
        for row in ledger.tasks():
            if row.state is TaskState.DONE:
                yield _params(row, frozenset()), metrics_of(folder, row), system_of(folder, row)


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
    params = flattened(canonical.decode(row.payload))
    if not numbers or not is_command_of(row.target, params):
        return params
    return {
        name: to_number(value) if name in numbers and isinstance(value, str) else value
        for name, value in params.items()
    }


def flattened(params: dict[str, Any]) -> dict[str, Any]:
    """Fields of dataclasses and dicts as ``config.lr``, like those of results."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, dict) and value:
            inner = {f"{name}.{key}": item for key, item in flattened(value).items()}
            flat |= {name: value} if inner.keys() & params.keys() else inner
        else:
            flat[name] = value
    return flat


def metrics_of(folder: RunFolder, row: TaskRow) -> dict[str, Any]:
    if row.state not in (TaskState.DONE, TaskState.STOPPED):
        return {}
    value = whole_value(folder, row.key.hex(), row.state, row.value)
    metrics: dict[str, Any] = canonical.decode(value)
    return metrics


def system_of(folder: RunFolder, row: TaskRow) -> dict[str, Any]:
    """What muster says about a task, by the names in SYSTEM and the code."""
    key = row.key.hex()
    names = {TaskState.READY: "waiting", TaskState.CLAIMED: "waiting"}
    return {
        "task": key[:12],
        "target": shown_line(row.target),
        "state": names.get(row.state, row.state.name.lower()),
        "attempts": row.attempts,
        "seconds": row.seconds if row.state.is_final else None,
        "device": row.device,
        "peak_mib": row.peak_mib,
        "folder": str(folder.artifact(key).relative_to(folder.path)) if row.has_files else None,
        "error": error_of(row.state, row.outcome, row.message),
        _CODE: row.code and row.code[:_CODE_DIGITS],
    }


def error_of(state: TaskState, outcome: str | None, message: str | None) -> str | None:
    """Why a task has failed; None where it has not."""
    if state is not TaskState.FAILED or outcome is None:
        return None
    return f"{REASONS[Outcome(outcome)]}: {message or ''}".rstrip(": ")


def columns(folder: RunFolder) -> dict[str, tuple[str, str, pa.DataType]]:
    """Column name → (part, name in that part, type), from one pass over all tasks.

    A metric or parameter whose name another part has already taken gets a prefix.
    """
    seen: dict[tuple[str, str], pa.DataType | None] = {}
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        more = [_CODE] if ledger.num_codes() > 1 else []
        more += [_ORIGIN] if ledger.origins() else []
        for row in ledger.tasks():
            for part, values in (
                ("param", _params(row, numbers)),
                ("metric", metrics_of(folder, row)),
            ):
                for name, value in values.items():
                    seen[part, name] = widen(seen.get((part, name)), value)
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
    for name in more:
        table[f"system_{name}" if name in table else name] = ("system", name, pa.string())
    return table


_SIMPLE = {float: FLOAT, str: TEXT, bool: BOOL}


def widen(kind: pa.DataType | None, value: Any) -> pa.DataType | None:
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
        return BOOL
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else TEXT
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
    """One column of some rows; values that do not fit its type are converted to it."""
    index = PARTS[part]
    values = [row[index].get(name) for row in chunk]
    try:
        column = pa.array(values, type=kind)
        if not (kind == TEXT and pc.any(pc.match_substring(column, "\\ud")).as_py()):
            return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeEncodeError):
        pass
    return pa.array([fit(value, kind) for value in values], type=kind)
