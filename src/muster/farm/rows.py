"""What is known of each task of a run, streamed from its ledger: its parameters, its metrics, and
what muster says about it. ``table`` makes columns of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from muster.base.shown_text import shown_line
from muster.farm import canonical
from muster.farm.canonical import KEY_BYTES, short_key
from muster.farm.ledger.columns import Columns, Plain
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import TaskRow
from muster.farm.outcomes import REASONS
from muster.farm.results import whole_value
from muster.farm.task import Outcome, TaskState
from muster.farm.template import has_places, is_command_of, is_number, to_number
from muster.run.folder import RunFolder

#: What muster says about every task, after the parameters and the metrics.
SYSTEM: dict[str, type] = {
    "task": str,
    "target": str,
    "state": str,
    "attempts": int,
    "seconds": float,
    "device": str,
    "peak_mib": float,
    "folder": str,
    "error": str,
}


#: Tasks that are read at once: what is made of a few stays close to the processor.
_CHUNK = 1000
#: So many times as many are looked at to see which columns a table of many more has.
_PIECES = 8
_LARGE_CHUNK = 200
_WITH_RESULT = frozenset({TaskState.DONE, TaskState.STOPPED})
_FINAL = frozenset(state for state in TaskState if state.is_final)
#: After these, where attempts of more than one code are in the run: which one it was.
_CODE, _CODE_DIGITS = "code", 8
_KEY_DIGITS = 12
#: And where a search began tasks with the checkpoints of others: with whose.
_ORIGIN = "from_task"
#: Parameters, metrics, and what muster says, of one task.
Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
#: Parameters and metrics, a line of JSON for each task.
Lines = tuple[bytes, bytes]
#: What makes lists of these.
Parts = tuple[Callable[[], list[dict[str, Any]]], Callable[[], list[dict[str, Any]]]]


class Block:
    """Some tasks that follow each other: parameters and metrics of each, and by column what muster
    says about them. ``is_json``: none of these is a value that JSON lacks.

    ``lines``: of some blocks parameters and metrics as they are stored, in two texts of a line for
    each task. Whoever reads these needs no others, which are made when they are asked for.
    """

    def __init__(
        self, system: dict[str, list[Any]], make: Parts, *, is_json: bool, lines: Lines | None
    ) -> None:
        self.system = system
        self.is_json = is_json
        self.lines = lines
        self._make = make

    def __len__(self) -> int:
        return len(self.system["task"])

    @cached_property
    def params(self) -> list[dict[str, Any]]:
        return self._make[0]()

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return self._make[1]()


def rows(folder: RunFolder) -> Iterator[Row]:
    """Every task in the order of the plan."""
    for block in blocks(folder):
        systems = zip(*block.system.values(), strict=True)
        names = tuple(block.system)
        for params, metrics, values in zip(block.params, block.metrics, systems, strict=True):
            yield params, metrics, dict(zip(names, values, strict=True))


def blocks(folder: RunFolder) -> Generator[Block, None, None]:
    """Every task in the order of the plan, some at a time: column by column it takes a fifth of
    the time that it takes row by row.
    """
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        origins = {number: short_key(key) for number, key in ledger.origins().items()}
        for some in ledger.whole(_CHUNK):
            if isinstance(some, Plain):
                yield _plain_block(some, numbers, origins)
                continue
            for chunk in _light(iter([some])):
                yield _block(folder, chunk, numbers, origins)


def _plain_block(plain: Plain, numbers: frozenset[str], origins: dict[int, str]) -> Block:
    num, keys = len(plain.task_ids), plain.keys.lower()
    nothing, shown = [None] * num, shown_line(plain.target)
    digits_of = {code: code and code[:_CODE_DIGITS] for code in set(plain.codes)}
    system: dict[str, list[Any]] = {
        "task": [keys[at : at + _KEY_DIGITS] for at in range(0, len(keys), 2 * KEY_BYTES)],
        "target": [shown] * num,
        "state": ["done"] * num,
        "attempts": [1] * num,
        "seconds": list(plain.seconds),
        "device": list(plain.devices),
        "peak_mib": list(plain.peak_mib),
        "folder": nothing,
        "error": nothing,
        _CODE: list(map(digits_of.get, plain.codes)),
    }
    if origins:
        system[_ORIGIN] = [origins.get(number) for number in plain.task_ids]
    is_json = not (numbers or canonical.TAG in plain.payloads or canonical.TAG in plain.values)
    return Block(
        system,
        (
            lambda: _params([plain.target] * num, plain.payloads.split(b"\n"), numbers),
            lambda: canonical.decode_all(plain.values.split(b"\n")),
        ),
        is_json=is_json,
        lines=(plain.payloads, plain.values) if is_json else None,
    )


def _block(
    folder: RunFolder, chunk: Columns, numbers: frozenset[str], origins: dict[int, str]
) -> Block:
    of: Any = SimpleNamespace(**chunk)
    system = _system(folder, of)
    if origins:
        system[_ORIGIN] = [origins.get(number) for number in of.task_id]
    texts = [*of.payload, *filter(None, of.value)]
    # A text of a command that becomes a number may be one that JSON lacks.
    is_plain = not numbers and not _is_in_files(chunk)
    return Block(
        system,
        (
            partial(_params, of.target, of.payload, numbers),
            partial(_metrics, folder, of.key, of.state, of.value),
        ),
        is_json=is_plain and canonical.TAG not in b",".join(texts),
        lines=None,
    )


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


def looked_at(
    folder: RunFolder, *, by_some: bool = False
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Parameters and metrics of all tasks in the order of the plan, some at a time; ``by_some``: of
    many tasks only of the first, and of a few further on.
    """
    numbers = _numbers(folder)
    with LedgerReader(folder.ledger) as ledger:
        # Without a join to what is not looked at: it takes half of the time.
        fields = ["payload", "state", "value", "key_of_file", *(["target"] if numbers else [])]
        by_some = by_some and ledger.last_task() > _PIECES * _CHUNK
        pieces = ledger.pieces(_PIECES, _CHUNK, *fields) if by_some else None
        for chunk in _light(pieces or ledger.every(_CHUNK, *fields)):
            payloads, states, values, keys = (chunk[field] for field in fields[:4])
            params = _params(chunk.get("target", ()), payloads, numbers)
            yield params, _metrics(folder, keys, states, values)


def further_names(folder: RunFolder) -> list[str]:
    """What muster says about the tasks of this run besides SYSTEM, because they differ in it."""
    with LedgerReader(folder.ledger) as ledger:
        more = [_CODE] if ledger.num_codes() > 1 else []
        return more + ([_ORIGIN] if ledger.origins() else [])


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
