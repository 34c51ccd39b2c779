"""The tasks of a run as a table that is sorted, filtered and cut to a page.

The rows that are shown are read from the ledger. Kept are number, state and token of every task,
and the columns that somebody sorts or filters by: each is read when it is wanted, which takes some
tenths of a second for 100,000 tasks, and then follows the run. A scan of states and tokens says
which tasks have changed. Each statement is short, so that no transaction keeps the writer's log
from being emptied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from muster.base.errors import MusterError
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.run.session import is_held
from muster.web.columns import LINE, Cells, Column, Names, cells_of, order, read_cells
from muster.web.folder import Stamp, stamps_of
from muster.web.query import BadQuery, parse, predicate

#: So many tasks are read by one statement. Of more that have changed, no column is kept. What is
#: read ahead stops for whoever asks after each few.
_CHUNK, _FEW, _PAUSE_S = 20_000, 500, 0.005
#: So long may it take until what stands in a ledger's log can be read.
COMMIT_S = 2.0
#: A look at all states may take this part of a processor, and this part of the time, in which a
#: slow disk or file server is kept busy.
_DUTY, _DUTY_OF_DISKS, _MOST_S = 0.01, 0.05, 30.0
#: So much of a processor is used at once to read ahead in a run that goes on.
_AHEAD_S = 0.02
#: What takes no longer is done whenever somebody asks.
_SHORT_S = 0.05
_REMEMBERED = 8
#: What all tables may keep, and one of them.
_MOST_BYTES, _MOST_OF_ONE = 256_000_000, 128_000_000
_READY, _CLAIMED = TaskState.READY.value, TaskState.CLAIMED.value
_STATE_WORDS = {state.value: state.name.lower() for state in TaskState}

Signature = tuple[Stamp, ...]
Numbers = NDArray[np.int64]


class _Prefetched:
    """What has been read ahead of these tasks. ``version``: when that began."""

    def __init__(self, ids: Numbers, version: int) -> None:
        self.ids, self.version = ids, version
        self.lines: list[Any] = []
        self.names = Names()


class TaskTable:
    """Methods may be called from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._version = 0
        self._due_s = self._cost_s = 0.0
        self._asking_now: set[object] = set()
        self._begin()

    def _begin(self) -> None:
        """Nothing is known."""
        self._ids: Numbers = np.zeros(0, np.int64)
        self._states: Numbers = np.zeros(0, np.int64)
        self._tokens: Numbers = np.zeros(0, np.int64)
        self._read_at: Numbers = np.zeros(0, np.int64)  # the version of each row
        self._columns: dict[Column, Cells] = {}  # the one that was used last comes last
        self._names = Names()
        self._signature: Signature | None = None  # of what was read last
        self._changed_s, self._is_settled = 0.0, False
        self._remembered: dict[Any, Any] = {}
        self._run = ""
        self._ahead: _Prefetched | None = None
        self.is_prepared = False

    # ------------------------------------------------------------------ following the ledger

    def signature(self) -> Signature:
        """Another one whenever something was recorded."""
        return stamps_of(self._folder.ledger_files)

    @property
    def is_ready(self) -> bool:
        """Whether the states of all tasks have been read."""
        return self._signature is not None

    @property
    def num_columns(self) -> int:
        """Settings and results that were seen so far; all of them once `prepare` has ended."""
        return len(self._names)

    def prepare(self, *, at_once: bool = True) -> None:
        """Read ahead what a word needs, and with it the names of all columns; without ``at_once``
        a few tasks now, and in the next call those that follow.
        """
        if not self.is_ready:
            self.refresh()
        with self._lock:
            ahead = None if at_once else self._ahead  # which two at once would read twice
            if ahead is None or not self._has(ahead):
                ahead = _Prefetched(self._ids, self._version)
            if not at_once:
                self._ahead = ahead
        begin_s = time.thread_time()
        with LedgerReader(self._folder.ledger) as ledger:
            while (begin := len(ahead.lines)) < len(ahead.ids):
                # Two threads that read rows wait for each other at every row: who asks comes first.
                while self._asking_now:
                    time.sleep(_PAUSE_S)
                few = ahead.ids[begin : begin + _FEW].tolist()
                lines = list(read_cells(self._folder, ledger, LINE, few, ahead.names))
                if len(lines) < len(few):
                    self._ahead = None
                    return  # another ledger has taken its place: the next look sees it
                ahead.lines += lines
                if not at_once and time.thread_time() - begin_s > _AHEAD_S:
                    return
        with self._lock, LedgerReader(self._folder.ledger) as ledger:
            if not self._has(ahead):
                return  # another ledger has taken its place
            self._ahead = None
            self._names.add(ahead.names)
            self._columns.setdefault(LINE, Cells(ahead.lines))
            self._renew(ledger, self._ids, np.flatnonzero(self._read_at > ahead.version))
            self.is_prepared = LINE in self._columns
        _CACHE.used(self)

    def _has(self, ahead: _Prefetched) -> bool:
        return np.array_equal(self._ids[: len(ahead.ids)], ahead.ids)

    def refresh(self, *, at_once: bool = True) -> bool:
        """Read what has changed. ``at_once``: even if the last look, which took long, was just now;
        otherwise False says that something may be left to be read.
        """
        with self._lock:
            signature, begin_s = self.signature(), time.monotonic()
            if signature != self._signature:
                self._changed_s, self._is_settled = begin_s, False
            if self._is_settled:
                return True
            if not at_once and begin_s < self._due_s:
                return False
            used_s = time.thread_time()
            self._read_changed()
            used_s = time.thread_time() - used_s
            self._signature = signature
            # What was committed just now may not have been read yet, and be the last.
            self._is_settled = begin_s - self._changed_s >= COMMIT_S
            self._cost_s = time.monotonic() - begin_s
            pause_s = max(used_s / _DUTY, self._cost_s / _DUTY_OF_DISKS)
            self._due_s = time.monotonic() + min(_MOST_S, pause_s)
            return at_once or self._is_settled

    def changed_since(self, version: int) -> tuple[list[int], int]:
        """The numbers of tasks that were read after this version, and the version now."""
        with self._lock:
            return self._ids[self._read_at > version].tolist(), self._version

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
                if num:  # another ledger has taken its place, also one that numbers alike
                    self._columns, self._names, self._ahead = {}, Names(), None
                num = 0
            is_same = np.zeros(len(now), bool)
            is_same[:num] = (now[:num, 1] == self._states[:num]) & (
                now[:num, 2] == self._tokens[:num]
            )
            places = np.flatnonzero(~is_same)
            if len(places) or len(now) != len(self._ids) or not self.is_ready:
                self._version += 1
                self._remembered.clear()
            self._renew(ledger, now[:, 0], places)
            read_at = np.zeros(len(now), np.int64)
            read_at[:num] = self._read_at[:num]
            read_at[places] = self._version
            self._read_at = read_at
            self._ids, self._states, self._tokens = now[:, 0], now[:, 1], now[:, 2]
            self._run = run

    def _renew(self, ledger: LedgerReader, ids: Numbers, places: Numbers) -> None:
        """Read the cells at these places again, in all columns that are kept."""
        if len(places) > _CHUNK:
            self._columns, self.is_prepared = {}, False  # they may have columns of their own
        for column, cells in self._columns.items():
            values = self._read(ledger, column, ids[places].tolist())
            cells.renew(len(ids), places.tolist(), values)

    def _run_id(self) -> str:
        with suppress(MusterError):
            return read_run(self._folder).run_id
        return self._run

    # ------------------------------------------------------------------ what is kept

    @property
    def num_bytes(self) -> int:
        """What is kept, about."""
        numbers = 8 * len(self._ids) * (4 + len(self._remembered))
        return numbers + sum(cells.num_bytes for cells in list(self._columns.values()))

    def forget(self) -> None:
        """Keep nothing, unless somebody uses it at this moment."""
        if self._lock.acquire(blocking=False):
            if not self._asking_now:
                self._begin()
            self._lock.release()

    def _cells(self, ledger: LedgerReader, column: Column) -> list[Any]:
        """A whole column; those that were not used for the longest time give way."""
        cells = self._columns.pop(column, None)
        if cells is None:
            ids = self._ids.tolist()
            parts = (ids[begin : begin + _CHUNK] for begin in range(0, len(ids), _CHUNK))
            cells = Cells(cell for part in parts for cell in self._read(ledger, column, part))
        self._columns[column] = cells
        while self.num_bytes > _MOST_OF_ONE and len(self._columns) > 1:
            del self._columns[next(iter(self._columns))]
        return cells

    def _read(self, ledger: LedgerReader, column: Column, ids: Sequence[int]) -> list[Any]:
        return list(read_cells(self._folder, ledger, column, ids, self._names))

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
        is_plain = not (sort or descending or text or state)
        with self._asking():
            if not is_plain:
                self.refresh(at_once=not self.is_ready or self._cost_s < _SHORT_S)
            with self._lock, LedgerReader(self._folder.ledger) as ledger:
                if is_plain:
                    total, shown = ledger.num_tasks(), ledger.task_ids(offset, limit)
                else:
                    places = self._chosen(ledger, sort, descending, text, state)
                    total, shown = len(places), self._ids[places[offset : offset + limit]].tolist()
                return {**self._rows(ledger, shown), "total": total, "offset": offset}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        one = object()
        self._asking_now.add(one)
        try:
            yield
        finally:
            self._asking_now.discard(one)
            _CACHE.used(self)

    def parts(
        self, *, sort: str, descending: bool, text: str, state: str
    ) -> Iterator[list[list[Any]]]:
        """The names of the columns; then all rows that are wanted, some at a time. A run that goes
        on may get more columns meanwhile: the rows have those of the beginning.
        """
        self.refresh()
        if not self.is_prepared or LINE not in self._columns:
            self.prepare()
        with self._asking():
            self.refresh()
            with self._lock, LedgerReader(self._folder.ledger) as ledger:
                ids = self._ids[self._chosen(ledger, sort, descending, text, state)].tolist()
                columns = self._names.keyed()
        yield [[*columns]]
        for begin in range(0, len(ids), _FEW):
            with LedgerReader(self._folder.ledger) as ledger:
                some = self._found(ledger, ids[begin : begin + _FEW], Names())
            yield [[cells.get(column) for column in columns.values()] for cells in some]

    def rows(self, task_ids: Sequence[int]) -> dict[str, Any]:
        """The rows of these tasks."""
        with self._lock, LedgerReader(self._folder.ledger) as ledger:
            return self._rows(ledger, task_ids)

    def _rows(self, ledger: LedgerReader, task_ids: Sequence[int]) -> dict[str, Any]:
        found = self._found(ledger, task_ids, self._names)
        columns = self._names.keyed().values()
        return {
            "columns": self._names.heads(),
            "rows": [
                {
                    "key": cells[Column("system", "task")],
                    "cells": [cells.get(column) for column in columns],
                }
                for cells in found
            ],
        }

    def _found(
        self, ledger: LedgerReader, task_ids: Sequence[int], names: Names
    ) -> list[dict[Column, Any]]:
        """All cells of these tasks, in their order."""
        words = _words_of(is_held(self._folder))
        rows = {row.task_id: row for row in ledger.rows_of(sorted(task_ids))}
        return [
            {
                **cells_of(self._folder, row, names),
                Column("system", "state"): words[row.state.value],
            }
            for task_id in task_ids
            if (row := rows.get(task_id)) is not None
        ]

    def _chosen(
        self, ledger: LedgerReader, sort: str, descending: bool, text: str, state: str
    ) -> Numbers:
        """The places of the rows that are wanted, in their order."""
        is_running = is_held(self._folder)
        words = _words_of(is_running)
        places = self._kept(
            ("which", text, state, is_running), lambda: self._which(ledger, text, state, words)
        )
        if not sort:
            return places[::-1] if descending else places
        in_order = self._kept(
            ("order", sort, descending, is_running),
            lambda: order(self._named(ledger, sort, words), descending),
        )
        is_chosen = np.zeros(len(self._ids), bool)
        is_chosen[places] = True
        chosen: Numbers = in_order[is_chosen[in_order]]
        return chosen

    def _kept(self, name: Any, make: Callable[[], Numbers]) -> Numbers:
        """What ``make`` makes, remembered until something changes."""
        if name not in self._remembered:
            while len(self._remembered) >= _REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[name] = make()
        found: Numbers = self._remembered[name]
        return found

    def _which(self, ledger: LedgerReader, text: str, state: str, words: dict[int, str]) -> Numbers:
        is_wanted = np.ones(len(self._ids), bool)
        if state:
            is_wanted &= self._in_state(words, lambda word: word == state)
        for test in parse(text):
            passes = predicate(test)
            if test.column == "state":
                is_wanted &= self._in_state(words, passes)
            elif test.column:
                cells = self._named(ledger, test.column, words)
                is_wanted &= np.fromiter(map(passes, cells), bool, len(cells))
            else:
                lines, wanted = self._cells(ledger, LINE), test.text.casefold()
                has = np.fromiter((wanted in line for line in lines), bool, len(lines))
                is_wanted &= has | self._in_state(words, passes)
        return np.flatnonzero(is_wanted)

    def _in_state(self, words: dict[int, str], passes: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.isin(self._states, [code for code, word in words.items() if passes(word)])

    def _named(self, ledger: LedgerReader, name: str, words: dict[int, str]) -> list[Any]:
        """The cells of the column that the table calls so."""
        if name == "state":
            return [words[code] for code in self._states.tolist()]
        if name not in self._names.keyed():
            self._cells(ledger, LINE)  # of a row that nobody has looked at yet, perhaps
        known = self._names.keyed()
        if name not in known:
            raise BadQuery(
                f"There is no column {name[:60]!r}.", hint=f"Known: {', '.join(known)[:500]}."
            )
        return self._cells(ledger, known[name])


class _TableCache:
    """The tables of all runs: those that nobody has used for the longest time keep nothing."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[TaskTable, None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def used(self, table: TaskTable) -> None:
        with self._lock:
            self._tables.pop(table, None)
            self._tables[table] = None  # the last one now
            total = sum(one.num_bytes for one in self._tables)
            for one in list(self._tables)[:-1]:
                if total <= _MOST_BYTES:
                    break
                total -= one.num_bytes
                one.forget()


_CACHE = _TableCache()


def _words_of(is_running: bool) -> dict[int, str]:
    """State by its number. Nothing runs where nobody works on the run."""
    return {**_STATE_WORDS, _READY: "waiting", _CLAIMED: "running" if is_running else "waiting"}
