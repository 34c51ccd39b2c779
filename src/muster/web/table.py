"""The tasks of a run as columns, kept from one look to the next: sorted, filtered, cut to a page.

The first page is read from the ledger as it is. Whatever needs all tasks is taken from columns
that are read once and then follow: a scan of states and tokens says which tasks have changed, and
only these are read again. Each statement is short, so that no transaction keeps the writer's log
from being emptied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.base.errors import MusterError
from muster.base.shown_text import HIDDEN, is_secret_name
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader, TaskRow
from muster.farm.rows import SYSTEM, flattened, metrics_of, system_of
from muster.farm.task import TaskState
from muster.farm.template import is_command_of, is_number, to_number
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.run.session import is_held
from muster.web.query import BadQuery, parse, predicate

_CHUNK = 2000
#: A look at all states may take this part of the time.
_DUTY = 0.05
#: What takes no longer is done whenever somebody asks.
_SHORT_S = 0.05
_REMEMBERED = 8
_GROUPS = {"param": "setting", "metric": "result", "system": "system"}
_SYSTEM = ("number", "task", "state", "target", *list(SYSTEM)[3:])
_STATE_WORDS = {state.value: state.name.lower() for state in TaskState}
_READY, _CLAIMED = TaskState.READY.value, TaskState.CLAIMED.value

Signature = tuple[tuple[int, int], ...]


class Column(NamedTuple):
    part: str  # "param" | "metric" | "system"
    name: str


_KEY = Column("system", "task")


class TaskTable:
    """Methods may be called from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._columns: dict[Column, list[Any]] = {}
        self._ids: NDArray[np.int64] = np.zeros(0, np.int64)
        self._states: NDArray[np.int64] = np.zeros(0, np.int64)
        self._tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        self._version = 0
        self._read_at: NDArray[np.int64] = np.zeros(0, np.int64)  # the version of each row
        self._signature: Signature | None = None
        self._due_s = self._cost_s = 0.0
        self._remembered: dict[Any, Any] = {}
        self._run = ""

    # ------------------------------------------------------------------ following the ledger

    def signature(self) -> Signature:
        """Another one whenever something was recorded."""
        ledger = self._folder.ledger
        found = []
        for path in (ledger, f"{ledger}-wal", ledger.with_suffix(".segment")):
            with suppress(OSError):
                stat = Path(path).stat()
                if stat.st_size:  # an empty log comes and goes with whoever only looks
                    found.append((stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    @property
    def is_ready(self) -> bool:
        """Whether all columns have been read once."""
        return self._signature is not None

    def refresh(self, *, at_once: bool = True) -> bool:
        """Read what has changed. ``at_once``: even if the last look, which took long, was just now;
        otherwise False says that something is left to be read.
        """
        with self._lock:
            signature = self.signature()
            if signature == self._signature:
                return True
            if not at_once and time.monotonic() < self._due_s:
                return False
            begin_s = time.monotonic()
            self._version += 1
            self._read_changed()
            self._signature = signature
            self._remembered.clear()
            self._cost_s = time.monotonic() - begin_s
            self._due_s = time.monotonic() + self._cost_s / _DUTY
            return True

    def changed_since(self, version: int) -> tuple[list[str], int]:
        """The keys of tasks that were read after this version, and the version now."""
        with self._lock:
            keys = self._columns.get(_KEY, [])
            places = np.flatnonzero(self._read_at > version)
            return [keys[int(place)] for place in places], self._version

    def _read_changed(self) -> None:
        run = self._run_id()
        with LedgerReader(self._folder.ledger) as ledger:
            found: list[tuple[int, int, int]] = []
            while part := ledger.standings(found[-1][0] if found else 0):
                found += part
            now = np.array(found, np.int64).reshape(-1, 3)
            num = len(self._ids)
            is_another = run != self._run or len(now) < num
            if is_another or not np.array_equal(now[:num, 0], self._ids):
                num = 0  # another ledger has taken its place, also one that numbers alike
                self._columns = {}
            is_same = np.zeros(len(now), bool)
            is_same[:num] = (now[:num, 1] == self._states[:num]) & (
                now[:num, 2] == self._tokens[:num]
            )
            places = np.flatnonzero(~is_same)
            for cells in self._columns.values():
                cells.extend([None] * (len(now) - len(cells)))
            for begin in range(0, len(places), _CHUNK):
                chunk = places[begin : begin + _CHUNK]
                rows = ledger.rows_of(now[chunk, 0].tolist())
                self._put(chunk.tolist(), rows, len(now))
            read_at = np.zeros(len(now), np.int64)
            read_at[:num] = self._read_at[:num]
            read_at[places] = self._version
            self._read_at = read_at
            self._ids, self._states, self._tokens = now[:, 0], now[:, 1], now[:, 2]
            self._run = run

    def _run_id(self) -> str:
        with suppress(MusterError):
            return read_run(self._folder).run_id
        return self._run

    def _put(self, places: Sequence[int], rows: Sequence[TaskRow], num: int) -> None:
        for place, row in zip(places, rows, strict=True):
            for column, value in cells_of(self._folder, row).items():
                cells = self._columns.get(column)
                if cells is None:
                    cells = self._columns[column] = [None] * num
                cells[place] = value

    # ------------------------------------------------------------------ looking

    def page(
        self,
        *,
        sort: str = "",
        descending: bool = False,
        text: str = "",
        state: str = "",
        offset: int = 0,
        limit: int = 200,
    ) -> dict[str, Any]:
        """Some rows, and how many there are. Raises BadQuery for an unknown column."""
        if not self.is_ready and not (sort or text or state):
            return self._first_look(offset, limit)
        self.refresh(at_once=not self.is_ready or self._cost_s < _SHORT_S)
        with self._lock:
            places = self._chosen(sort, descending, text, state)
            shown = places[offset : offset + limit]
            return self._answer(len(places), offset, [int(place) for place in shown])

    def rows(self, keys: Sequence[str]) -> dict[str, Any]:
        """The rows of these tasks as they are known."""
        with self._lock:
            known = self._columns.get(_KEY, [])
            wanted = set(keys)
            places = [place for place, key in enumerate(known) if key in wanted]
            return self._answer(len(known), 0, places)

    def recent(self, most: int) -> dict[str, Any]:
        """The rows of the tasks that began last."""
        with self._lock:
            started = self._columns.get(Column("system", "started"), [])
            numbers = np.array([-1.0 if one is None else one for one in started], float)
            order = np.argsort(-numbers, kind="stable")[:most]
            return self._answer(len(started), 0, [int(p) for p in order if numbers[p] >= 0])

    def _first_look(self, offset: int, limit: int) -> dict[str, Any]:
        with LedgerReader(self._folder.ledger) as ledger:
            total = ledger.num_tasks()
            rows = ledger.rows_of(ledger.task_ids(offset, limit))
        columns: dict[Column, list[Any]] = {}
        for place, row in enumerate(rows):
            for column, value in cells_of(self._folder, row).items():
                columns.setdefault(column, [None] * len(rows))[place] = value
        states = np.array([row.state.value for row in rows], np.int64)
        return _page(columns, states, range(len(rows)), total, offset, self._is_running())

    def _answer(self, total: int, offset: int, places: Sequence[int]) -> dict[str, Any]:
        return _page(self._columns, self._states, places, total, offset, self._is_running())

    def _is_running(self) -> bool:
        return is_held(self._folder)

    def _chosen(self, sort: str, descending: bool, text: str, state: str) -> NDArray[np.int64]:
        places = self._kept(("which", text, state), lambda: self._which(text, state))
        if not sort:
            return places[::-1] if descending else places
        order = self._kept(("order", sort, descending), lambda: self._order(sort, descending))
        is_chosen = np.zeros(len(self._ids), bool)
        is_chosen[places] = True
        chosen: NDArray[np.int64] = order[is_chosen[order]]
        return chosen

    def _kept(self, name: Any, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        """What ``make`` makes, remembered until something changes."""
        if name not in self._remembered:
            while len(self._remembered) >= _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[name] = make()
        found: NDArray[np.int64] = self._remembered[name]
        return found

    def _which(self, text: str, state: str) -> NDArray[np.int64]:
        is_wanted = np.ones(len(self._ids), bool)
        if state:
            words = _words_of(self._is_running())
            codes = [code for code, word in words.items() if word == state]
            is_wanted &= np.isin(self._states, codes)
        for test in parse(text):
            passes = predicate(test)
            if test.column == "state":
                words = _words_of(self._is_running())
                codes = [code for code, word in words.items() if passes(word)]
                is_wanted &= np.isin(self._states, codes)
            elif test.column:
                cells = self._cells(test.column)
                is_wanted &= np.fromiter(map(passes, cells), bool, len(cells))
            else:
                lines = self._kept("lines", self._lines)
                wanted = test.text.casefold()
                is_wanted &= np.fromiter((wanted in line for line in lines), bool, len(lines))
        return np.flatnonzero(is_wanted)

    def _lines(self) -> Any:
        """Every row as one text, for a word that may stand in any column."""
        columns = [cells for column, cells in self._columns.items() if column.name != "state"]
        words = _words_of(self._is_running())
        states = [words[code] for code in self._states.tolist()]
        return [
            "\n".join(str(cell) for cell in row if cell is not None).casefold()
            for row in zip(*columns, states, strict=True)
        ]

    def _order(self, sort: str, descending: bool) -> NDArray[np.int64]:
        """Places by value, rows without one at the end in both directions."""
        cells = self._cells(sort)
        if sort == "state":
            words = _words_of(self._is_running())
            cells = [words[code] for code in self._states.tolist()]
        missing = np.fromiter((cell is None or cell != cell for cell in cells), bool, len(cells))
        known = np.flatnonzero(~missing)
        if all(isinstance(cells[place], int | float) for place in known):
            values = np.array([float(cells[place]) for place in known], float)
            order = np.argsort(-values if descending else values, kind="stable")
        else:
            keys = [_sort_key(cells[place]) for place in known]
            order = np.array(
                sorted(range(len(keys)), key=keys.__getitem__, reverse=descending), np.int64
            )
        return np.concatenate([known[order], np.flatnonzero(missing)]).astype(np.int64)

    def _cells(self, name: str) -> list[Any]:
        for key, column in keyed(self._columns).items():
            if key == name:
                return self._columns.get(column, [None] * len(self._ids))
        known = ", ".join(keyed(self._columns))
        raise BadQuery(f"There is no column {name[:60]!r}.", hint=f"Known: {known[:500]}.")


def cells_of(folder: RunFolder, row: TaskRow) -> dict[Column, Any]:
    """What is shown of a task."""
    params = flattened(canonical.decode(row.payload))
    if is_command_of(row.target, params):  # its parameters are texts
        params = {
            name: to_number(value) if isinstance(value, str) and is_number(value) else value
            for name, value in params.items()
        }
    cells: dict[Column, Any] = {}
    for name, value in params.items():
        cells[Column("param", name)] = HIDDEN if is_secret_name(name) and value else _cell(value)
    with suppress(OSError, ValueError):  # a result of its own file that is gone or not whole
        for name, value in metrics_of(folder, row).items():
            cells[Column("metric", name)] = _cell(value)
    system = {**system_of(folder, row), "number": row.task_id, "started": row.started_s}
    for name in (*_SYSTEM, "started"):
        cells[Column("system", name)] = system[name]
    return cells


def keyed(columns: dict[Column, list[Any]]) -> dict[str, Column]:
    """Columns by the names that the exported table has for them: settings, results, the rest."""
    system = [column for column in columns if column.part == "system"]
    named = {column.name: column for column in system} or {
        name: Column("system", name) for name in (*_SYSTEM, "started")
    }
    found: dict[str, Column] = {}
    for part in ("param", "metric"):
        for column in columns:
            if column.part == part:
                key = canonical.escape_surrogates(column.name)
                while key in found or key in named:
                    key = f"{part}_{key}"
                found[key] = column
    return {"number": named["number"], "state": named["state"], **found, **named}


def _page(
    columns: dict[Column, list[Any]],
    states: NDArray[np.int64],
    places: Sequence[int],
    total: int,
    offset: int,
    is_running: bool,
) -> dict[str, Any]:
    words = _words_of(is_running)
    shown = keyed(columns)
    rows = []
    for place in places:
        cells = [columns[column][place] if column in columns else None for column in shown.values()]
        cells[1] = words[int(states[place])]
        rows.append({"key": columns[_KEY][place], "cells": cells})
    heads = [
        {"key": key, "label": key, "group": _GROUPS[column.part],
         "numeric": _is_numeric(columns.get(column, ()))}
        for key, column in shown.items()
    ]  # fmt: skip
    return {"columns": heads, "total": total, "offset": offset, "rows": rows}


def _words_of(is_running: bool) -> dict[int, str]:
    """State by its number. Nothing runs where nobody works on the run."""
    return {**_STATE_WORDS, _READY: "waiting", _CLAIMED: "running" if is_running else "waiting"}


def _is_numeric(cells: Sequence[Any]) -> bool:
    """Judged by the first values that there are."""
    known = [cell for cell in cells[:1000] if cell is not None]
    return bool(known) and all(type(cell) in (int, float) for cell in known)


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return canonical.encode(value).decode()
    return value


def _sort_key(value: Any) -> tuple[bool, float, str]:
    if isinstance(value, int | float):
        return False, float(value), ""
    return True, 0.0, str(value)
