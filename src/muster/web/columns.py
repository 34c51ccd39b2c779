"""The columns of a run's tasks: which there are, and their cells, read from a ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from sys import getsizeof
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.base.shown_text import (
    HIDDEN,
    hide_secrets,
    is_secret_name,
    shown_line,
    without_secrets,
)
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import TaskRow
from muster.farm.results import whole_value
from muster.farm.rows import SYSTEM, error_of, flattened, metrics_of, system_of
from muster.farm.task import TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder

_GROUPS = {"param": "setting", "metric": "result", "system": "system"}
_STATES = {state.value: state for state in TaskState}
_FINAL = frozenset(state.value for state in TaskState if state.is_final)
_WITH_RESULT = (TaskState.DONE.value, TaskState.STOPPED.value)


class Column(NamedTuple):
    part: str  # "param" | "metric" | "system"
    name: str


#: All texts of a row in one, of each no more than this, for a word that may stand in any of them.
LINE = Column("", "line")
_MOST_OF_TEXT = 1000
_BLOCK = 2_000


def _task(folder: RunFolder, key: bytes) -> str:
    return key.hex()[:12]


def _as_it_is(folder: RunFolder, value: Any) -> Any:
    return value


#: What muster says about a task: the fields of `TaskRow` that it is made of, and how.
_OF_SYSTEM: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "number": (("task_id",), _as_it_is),
    "task": (("key",), _task),
    "state": (("state",), lambda folder, state: _STATES[state].name.lower()),
    "target": (("target",), lambda folder, target: shown_line(target)),
    "attempts": (("attempts",), _as_it_is),
    "seconds": (
        ("state", "seconds"),
        lambda folder, state, seconds: seconds if state in _FINAL else None,
    ),
    "device": (("device",), _as_it_is),
    "peak_mib": (("peak_mib",), _as_it_is),
    "folder": (
        ("key", "has_files"),
        lambda folder, key, has: (
            str(folder.artifact(key.hex()).relative_to(folder.path)) if has else None
        ),
    ),
    "error": (
        ("state", "outcome", "message"),
        lambda folder, state, outcome, message: _cell(error_of(_STATES[state], outcome, message)),
    ),
    "started": (("started_s",), _as_it_is),
}
_NUMERIC = frozenset({"number", "attempts", "seconds", "peak_mib", "started"})
assert SYSTEM.keys() <= _OF_SYSTEM.keys()


class Names:
    """The columns that were seen so far, and whether they hold nothing but numbers."""

    def __init__(self) -> None:
        self._known: dict[Column, bool | None] = {}  # None: no value was seen yet

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, part: str, cells: dict[str, Any]) -> None:
        for name, value in cells.items():
            column = Column(part, name)
            if value is None:
                self._known.setdefault(column, None)
            elif (was := self._known.get(column)) is not False:
                is_one = type(value) is float or type(value) is int
                if was is not is_one:
                    self._known[column] = is_one

    def add(self, other: Names) -> None:
        for column, is_numeric in other._known.items():
            was = self._known.get(column)
            self._known[column] = is_numeric if was is None else was and is_numeric is not False

    def keyed(self) -> dict[str, Column]:
        """By the names that the exported table has for them: settings, results, the rest."""
        system = {name: Column("system", name) for name in _OF_SYSTEM}
        found: dict[str, Column] = {}
        for part in ("param", "metric"):
            for column in self._known:
                if column.part == part:
                    key = canonical.escape_surrogates(column.name)
                    while key in found or key in system:
                        key = f"{part}_{key}"
                    found[key] = column
        return {"number": system["number"], "state": system["state"], **found, **system}

    def heads(self) -> list[dict[str, Any]]:
        return [
            {
                "key": key,
                "label": key,
                "group": _GROUPS[column.part],
                "numeric": column.name in _NUMERIC
                if column.part == "system"
                else bool(self._known[column]),
            }
            for key, column in self.keyed().items()
        ]


def cells_of(folder: RunFolder, row: TaskRow, names: Names) -> dict[Column, Any]:
    """All cells of a task."""
    params = {
        name: _shown(row.target, params, name)
        for params in [flattened(canonical.decode(row.payload))]
        for name in params
    }
    results: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a result of its own file that is gone or not whole
        results = {name: _cell(value) for name, value in metrics_of(folder, row).items()}
    system = {**system_of(folder, row), "number": row.task_id, "started": row.started_s}
    system["error"] = _cell(system["error"])
    names.learn("param", params)
    names.learn("metric", results)
    return {
        Column(part, name): value
        for part, cells in (("param", params), ("metric", results), ("system", system))
        for name, value in cells.items()
    }


def read_cells(
    folder: RunFolder, ledger: LedgerReader, column: Column, task_ids: Sequence[int], names: Names
) -> Iterable[Any]:
    """One cell for each of these tasks. The lines tell ``names`` of all columns."""
    part, name = column
    if column == LINE:
        return _lines(folder, ledger, task_ids, names)
    if part == "param":
        return _settings(ledger.cells(("target", "payload"), task_ids), name)
    if part == "metric":
        rows = ledger.cells(("key_of_file", "state", "value"), task_ids)
        return _values(folder, rows, name)
    fields, make = _OF_SYSTEM[name]
    return (make(folder, *row) for row in ledger.cells(fields, task_ids))


def _lines(
    folder: RunFolder, ledger: LedgerReader, task_ids: Sequence[int], names: Names
) -> Iterator[str]:
    fields = ("key", "target", "payload", "state", "value", "device", "outcome", "message")
    shapes: dict[tuple[object, ...], bool] = {}

    def texts(part: str, cells: dict[str, Any]) -> Iterable[str]:
        # Nearly all rows have the same names and types: what has to be known of them is asked once.
        shape = (part, *cells, *map(type, cells.values()))
        is_simple = shapes.get(shape)
        if is_simple is None:
            is_simple = shapes[shape] = {float, int, str, bool}.issuperset(
                map(type, cells.values())
            ) and not any(map(is_secret_name, cells))
            if is_simple:
                names.learn(part, cells)
        if is_simple:
            return map(str, cells.values())
        flat = flattened(cells) if part == "param" else cells
        names.learn(part, flat)
        shown = ((name, value) for name, value in flat.items() if value is not None)
        return [str(_shown("", {name: value}, name)) for name, value in shown]

    for key, target, payload, state, value, device, outcome, message in ledger.cells(
        fields, task_ids
    ):
        words = [key.hex()[:12], target, device or ""]
        words += texts("param", canonical.decode(payload))
        words += texts("metric", _result(folder, key, state, value))
        if outcome != "ok":
            words.append(error_of(_STATES[state], outcome, message) or "")
        yield "\n".join(word[:_MOST_OF_TEXT] for word in words).casefold()


class Cells(list[Any]):
    """A column that is kept. ``num_bytes``: what its cells take."""

    def __init__(self, cells: Iterable[Any]) -> None:
        super().__init__(cells)
        self.num_bytes = sum(map(getsizeof, self)) + 8 * len(self)

    def renew(self, num: int, places: Sequence[int], values: Iterable[Any]) -> None:
        """``num``: how many cells there are by now; ``values`` stand at ``places``."""
        more = num - len(self)
        self.extend([None] * more)
        self.num_bytes += more * (getsizeof(None) + 8)
        for place, value in zip(places, values, strict=True):
            self.num_bytes += getsizeof(value) - getsizeof(self[place])
            self[place] = value


def _settings(rows: Sequence[Any], name: str) -> Iterator[Any]:
    """``rows``: of each task the target and the payload."""
    is_secret = is_secret_name(name)
    for some in _blocks(rows):
        decoded = canonical.decode_all([payload for _, payload in some])
        for (target, _), params in zip(some, decoded, strict=True):
            value = params.get(name)
            if is_secret or not (type(value) is float or type(value) is int):
                if value is None or isinstance(value, dict):
                    params = flattened(params)
                value = _shown(target, params, name)
            yield value


def _values(folder: RunFolder, rows: Sequence[Any], name: str) -> Iterator[Any]:
    """``rows``: of each task the key, where its result may be a file, the state and the result."""
    for some in _blocks(rows):
        for found in _results(folder, some):
            value = found.get(name)
            yield value if type(value) is float or type(value) is int else _cell(value)


def _results(folder: RunFolder, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Decoded as one text, unless one of them is elsewhere or not whole."""
    texts = [value if state in _WITH_RESULT else b"{}" for _, state, value in rows]
    with suppress(ValueError):
        if None not in texts and len(found := canonical.decode_all(texts)) == len(rows):
            return found
    return [_result(folder, *row) for row in rows]


def _blocks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """So many that what they are decoded to stays near the processor."""
    return (rows[begin : begin + _BLOCK] for begin in range(0, len(rows), _BLOCK))


def _shown(target: str, params: dict[str, Any], name: str) -> Any:
    """A setting as a cell has it; those of commands are texts, also where they are numbers."""
    value = params.get(name)
    if is_secret_name(name) and value:
        return HIDDEN
    if isinstance(value, str) and is_number(value) and is_command_of(target, params):
        return to_number(value)
    return _cell(value)


def _result(folder: RunFolder, key: bytes, state: int, value: bytes | None) -> dict[str, Any]:
    if state not in _WITH_RESULT:
        return {}
    try:
        if value is None:
            value = whole_value(folder, key.hex(), _STATES[state], None)
        found: dict[str, Any] = canonical.decode(value)
    except (OSError, ValueError):  # a result of its own file that is gone or not whole
        return {}
    return found


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return canonical.encode(hide_secrets(value)).decode()
    if isinstance(value, str):
        return _without_secrets(value) if len(value) < _MOST_OF_TEXT else without_secrets(value)
    return value


@lru_cache(maxsize=1024)  # a column of words has the same few again and again
def _without_secrets(text: str) -> str:
    return without_secrets(text)


def order(cells: Sequence[Any], descending: bool) -> NDArray[np.int64]:
    """Places by value, rows without one at the end in both directions."""
    if {*map(type, cells)} <= {float, int, bool, type(None)}:
        with suppress(OverflowError):  # of a whole number that no float holds
            values = np.array(cells, float)  # NaN where there is none
            return np.argsort(-values if descending else values, kind="stable")
    known = [place for place, cell in enumerate(cells) if cell is not None and cell == cell]
    keys = {place: _sort_key(cells[place]) for place in known}
    in_order = sorted(known, key=keys.__getitem__, reverse=descending)
    missing = np.ones(len(cells), bool)
    missing[known] = False
    return np.concatenate([np.array(in_order, np.int64), np.flatnonzero(missing)])


def _sort_key(value: Any) -> tuple[bool, float, str]:
    if not isinstance(value, int | float):
        return True, 0.0, str(value)
    try:
        return False, float(value), ""
    except OverflowError:
        return False, math.inf if value > 0 else -math.inf, ""
