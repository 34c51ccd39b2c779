"""A run as a table, streamed from its ledger: one row per task, and the columns that they have."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa

from muster.base.shown_text import shown_line
from muster.farm import canonical
from muster.farm.canonical import short_key
from muster.farm.decisions import REASONS
from muster.farm.ledger.queries import Columns
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.results import whole_value
from muster.farm.task import Outcome, TaskState
from muster.farm.template import has_places, is_command_of, is_number, to_number
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


#: Tasks that are read at once: what is made of a few stays close to the processor.
_CHUNK = 1000
#: So many times as many are looked at to see which columns a table of many more has.
_PIECES = 8
_LARGE_CHUNK = 200
#: Tasks that are written at once, or fewer that are larger than this.
_BATCH, _BATCH_BYTES = 20_000, 2**24
_WITH_RESULT = frozenset({TaskState.DONE, TaskState.STOPPED})
_FINAL = frozenset(state for state in TaskState if state.is_final)
#: After these, where attempts of more than one code are in the run: which one it was.
_CODE, _CODE_DIGITS = "code", 8
#: And where a search began tasks with the checkpoints of others: with whose.
_ORIGIN = "from_task"
FLOAT, TEXT, BOOL = pa.float64(), pa.string(), pa.bool_()
#: Parameters, metrics, and what muster says, of one task.
Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


class Block(NamedTuple):
    """Some tasks that follow each other: parameters and metrics of each, and by column what muster
    says about them. ``is_json``: none of these is a value that JSON lacks.
    """

    params: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    system: dict[str, list[Any]]
    is_json: bool


def rows(folder: RunFolder) -> Iterator[Row]:
    """Every task in the order of the plan."""
    for block in blocks(folder):
        systems = zip(*block.system.values(), strict=True)
        names = tuple(block.system)
        for params, metrics, values in zip(block.params, block.metrics, systems, strict=True):
            yield params, metrics, dict(zip(names, values, strict=True))


def blocks(folder: RunFolder) -> Iterator[Block]:
    """Every task in the order of the plan, some at a time: column by column it takes a fifth of
    the time that it takes row by row.
    """
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        origins = {number: short_key(key) for number, key in ledger.origins().items()}
        for chunk in _light(ledger.whole(_CHUNK)):
            of: Any = SimpleNamespace(**chunk)
            system = _system(folder, of)
            if origins:
                system[_ORIGIN] = [origins.get(number) for number in of.task_id]
            metrics = _metrics(folder, of.key, of.state, of.value)
            texts = [*of.payload, *filter(None, of.value)]
            # A text of a command that becomes a number may be one that JSON lacks.
            is_plain = not numbers and not _is_in_files(chunk)
            is_json = is_plain and canonical.TAG not in b",".join(texts)
            yield Block(_params(of.target, of.payload, numbers), metrics, system, is_json)


def _light(chunks: Iterator[Columns]) -> Iterator[Columns]:
    """In small pieces where results are in files of their own, which may be large."""
    for chunk in chunks:
        most = _LARGE_CHUNK if _is_in_files(chunk) else _CHUNK
        for at in range(0, len(chunk["state"]), most):
            yield {name: column[at : at + most] for name, column in chunk.items()}


def _is_in_files(chunk: Columns) -> bool:
    """Whether results of these tasks are in files of their own."""
    values = zip(chunk["state"], chunk["value"], strict=True)
    return None in chunk["value"] and any(
        value is None and state in _WITH_RESULT for state, value in values
    )


def done_rows(folder: RunFolder) -> Iterator[Row]:
    """The tasks of functions that are done, read without the first pass that commands need."""
    with LedgerReader(folder.ledger) as ledger:
        for row in ledger.tasks():
            if row.state is TaskState.DONE:
                [params] = _params([row.target], [row.payload], frozenset())
                yield params, metrics_of(folder, row), system_of(folder, row)


def _numbers(folder: RunFolder) -> frozenset[str]:
    """Parameters of commands, which are texts, all of whose values are numbers."""
    found: dict[str, bool] = {}
    with LedgerReader(folder.ledger) as ledger:
        if not any(map(has_places, ledger.targets())):
            return frozenset()
        for chunk in ledger.every(_CHUNK, "target", "payload"):
            for target, payload in zip(*chunk.values(), strict=True):
                params = canonical.decode(payload)
                if not is_command_of(target, params):
                    continue
                for name, value in params.items():
                    if isinstance(value, str):
                        found[name] = found.get(name, True) and is_number(value)
    return frozenset(name for name, is_one in found.items() if is_one)


def _params(
    targets: Sequence[str], payloads: Sequence[bytes], numbers: frozenset[str]
) -> list[dict[str, Any]]:
    """The parameters of some tasks; those of commands that are ``numbers`` as such."""
    found = canonical.decode_all(payloads)
    if sum(map(bytes.count, payloads, itertools.repeat(b"{"))) > len(payloads):
        found = [flattened(params) for params in found]
    if not numbers:
        return found
    return [
        {
            name: to_number(value) if name in numbers and isinstance(value, str) else value
            for name, value in params.items()
        }
        if is_command_of(target, params)
        else params
        for target, params in zip(targets, found, strict=True)
    ]


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
    return _metrics(folder, [row.key], [row.state], [row.value])[0]


def _metrics(
    folder: RunFolder, keys: Sequence[bytes], states: Sequence[int], values: Sequence[bytes | None]
) -> list[dict[str, Any]]:
    return canonical.decode_all([
        (value or whole_value(folder, key.hex(), TaskState(state), value))
        if state in _WITH_RESULT
        else b"{}"
        for key, state, value in zip(keys, states, values, strict=True)
    ])  # fmt: skip


def system_of(folder: RunFolder, row: TaskRow) -> dict[str, Any]:
    """What muster says about a task, by the names in SYSTEM and the code."""
    return {name: column[0] for name, column in _system(folder, TaskRow._make(zip(row))).items()}


def _system(folder: RunFolder, of: Any) -> dict[str, list[Any]]:
    """The same of some tasks: ``of`` has their columns by the names of `TaskRow`."""
    keys = [key.hex() for key in of.key]
    targets = {target: shown_line(target) for target in set(of.target)}
    states, nothing = set(of.state), [None] * len(keys)
    names = {state: state.name.lower() for state in TaskState}
    names |= {TaskState.READY: "waiting", TaskState.CLAIMED: "waiting"}
    return {
        "task": [key[:12] for key in keys],
        "target": [targets[target] for target in of.target],
        "state": [names[state] for state in of.state],
        "attempts": of.attempts,
        "seconds": of.seconds
        if _FINAL.issuperset(states)
        else [
            seconds if state in _FINAL else None
            for state, seconds in zip(of.state, of.seconds, strict=True)
        ],
        "device": of.device,
        "peak_mib": of.peak_mib,
        "folder": nothing
        if not any(of.has_files)
        else [
            str(folder.artifact(key).relative_to(folder.path)) if has_files else None
            for key, has_files in zip(keys, of.has_files, strict=True)
        ],
        "error": nothing
        if TaskState.FAILED not in states
        else [
            error_of(TaskState.FAILED, outcome, message) if state == TaskState.FAILED else None
            for state, outcome, message in zip(of.state, of.outcome, of.message, strict=True)
        ],
        _CODE: [code and code[:_CODE_DIGITS] for code in of.code],
    }


def error_of(state: TaskState, outcome: str | None, message: str | None) -> str | None:
    """Why a task has failed; None where it has not."""
    if state is not TaskState.FAILED or outcome is None:
        return None
    return f"{REASONS[Outcome(outcome)]}: {message or ''}".rstrip(": ")


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
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        more = [_CODE] if ledger.num_codes() > 1 else []
        more += [_ORIGIN] if ledger.origins() else []
        # Without a join to what is not looked at: it takes half of the time.
        fields = ["payload", "state", "value", "key_of_file", *(["target"] if numbers else [])]
        by_some = by_some and ledger.last_task() > _PIECES * _CHUNK
        pieces = ledger.pieces(_PIECES, _CHUNK, *fields) if by_some else None
        for number, chunk in enumerate(_light(pieces or ledger.every(_CHUNK, *fields))):
            payloads, states, values, keys = (chunk[field] for field in fields[:4])
            targets = chunk.get("target", ())
            for part, found in (
                ("param", _params(targets, payloads, numbers)),
                ("metric", _metrics(folder, keys, states, values)),
            ):
                for name in dict.fromkeys(itertools.chain.from_iterable(found)):
                    if by_some and number and (part, name) not in seen:
                        return columns(folder)  # the order of the columns is that of all tasks
                    own = [row[name] for row in found if name in row]
                    seen[part, name] = widen_by_all(seen.get((part, name)), own)
    table: dict[str, Column] = {}
    for part in ("param", "metric"):
        for (owner, name), kind in seen.items():
            if owner == part:
                column = canonical.escape_surrogates(name)
                while column in table or column in SYSTEM:
                    column = f"{part}_{column}"
                table[column] = Column(part, name, kind or TEXT, kind)
    for name, kind in SYSTEM.items():
        table[name] = Column("system", name, kind, kind)
    for name in more:
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


def batches(
    folder: RunFolder, *, by_some: bool = False
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The table as a stream of record batches; memory does not grow with the number of tasks.

    ``by_some``: with the columns of some tasks. The stream ends in OtherColumns where others have
    different ones.
    """
    table = columns(folder, by_some=by_some)
    schema = pa.schema([(name, column.kind) for name, column in table.items()])
    sources = list(table.values())

    def stream() -> Iterator[pa.RecordBatch]:
        for block in blocks(folder):
            values = [cells(block, column, None) for column in sources]
            if by_some:
                check_columns(block, sources, values, None)
            arrays = [_array(*one) for one in zip(values, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return schema, _joined(stream())


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values of a column; those that do not fit its type are converted to it."""
    try:
        column = pa.array(values, type=kind)
        if not (kind == TEXT and holds(column, _SURROGATE)):
            return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeEncodeError):
        pass
    return pa.array([fit(value, kind) for value in values], type=kind)
