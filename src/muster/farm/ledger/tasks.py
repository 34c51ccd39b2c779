"""Which tasks there are: the writer's side of a plan, and of what comes to it while it runs."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muster.farm.ledger.connect import (
    WITHOUT_KEYS,
    add_keys,
    create,
    drop_keys,
    explained,
    open_writer,
    version_of,
)
from muster.farm.ledger.queries import ADDED, LISTED, Addition, LedgerQueries
from muster.farm.task import NewTask, Task

_TASKS = "INTO tasks (key, target_id, payload, grp, priority) VALUES "
#: Rows that are added with one statement: half of the time of a statement for each of them.
_AT_ONCE = 50
#: Of SQLite's steps, while it sorts: about a tenth of a second.
_LOOK_AFTER = 1_000_000


class TaskLedger(LedgerQueries):
    """What `Ledger` has of transactions and of the list of tasks."""

    #: Whether the ledger lives on another disk than its run folder (see ``away``).
    is_away = False

    def __init__(self, path: Path, database: sqlite3.Connection | None = None) -> None:
        """``database``: a copy that is open already, in memory."""
        self.path = path
        self._has_metrics = False
        if database is None:
            with explained(path, "create"):
                path.parent.mkdir(parents=True, exist_ok=True)
            create(path)
            database = open_writer(path)
        self._db = database
        self._has_keys = version_of(database) != WITHOUT_KEYS

    def close(self) -> None:
        self._db.close()

    def snapshot(self) -> None:
        """Bring a copy to the run folder; nothing to do when the ledger lives there."""

    def begin(self) -> None:
        with explained(self.path, "write"):
            self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        with explained(self.path, "write"):
            self._db.execute("COMMIT")

    def roll_back(self) -> None:
        self._has_metrics = False  # the table may go with the transaction that made it
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        with suppress(sqlite3.Error):  # what went wrong is known already
            self._has_keys = version_of(self._db) != WITHOUT_KEYS

    # ------------------------------------------------------------------ the plan

    def set_meta(self, name: str, value: str) -> None:
        with explained(self.path, "write"):
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def drop_meta(self, name: str) -> None:
        with explained(self.path, "write"):
            self._db.execute("DELETE FROM meta WHERE name = ?", (name,))

    def target_id(self, name: str) -> int:
        with explained(self.path, "write"):
            self._db.execute("INSERT OR IGNORE INTO targets (name) VALUES (?)", (name,))
            row = self._db.execute("SELECT target_id FROM targets WHERE name = ?", (name,))
            return int(row.fetchone()[0])

    def record_code(self, target_id: int, code_hash: str) -> str | None:
        """Remember the target's code; returns the previous hash if it was another."""
        with explained(self.path, "write"):
            row = self._db.execute(
                "SELECT hash FROM code WHERE target_id = ? ORDER BY since_s DESC LIMIT 1",
                (target_id,),
            ).fetchone()
            if row is None or row[0] != code_hash:
                values = (target_id, code_hash, time.time())
                self._db.execute("INSERT INTO code VALUES (?, ?, ?)", values)
            return None if row is None or row[0] == code_hash else str(row[0])

    def add_tasks(self, tasks: Iterable[NewTask]) -> int:
        """Insert what is not there yet; returns how many were new."""
        self.index_keys()
        return self._insert("INSERT OR IGNORE", tasks)

    def list_tasks(self, tasks: Iterable[NewTask]) -> int:
        """`add_tasks` of a plan; between `forget_keys` and `index_keys` without a look whether
        they are there.
        """
        return self._insert("INSERT OR IGNORE" if self._has_keys else "INSERT", tasks)

    def _insert(self, how: str, tasks: Iterable[NewTask]) -> int:
        with explained(self.path, "write"):
            before = self._db.total_changes
            self.add_rows(f"{how} {_TASKS}", "(?, ?, ?, ?, ?)", tasks, blobs=(0, 2))
            return self._db.total_changes - before

    def add_rows(
        self, into: str, row: str, rows: Iterable[Sequence[Any]], *, blobs: Sequence[int] = ()
    ) -> None:
        """Add rows to a table. What is the same in all of them is a part of ``row``. ``blobs``:
        which of the values are bytes.
        """
        rows, width = iter(rows), row.count("?")
        while len(some := list(itertools.islice(rows, _AT_ONCE))) == _AT_ONCE:
            values = list(itertools.chain.from_iterable(some))
            for place in blobs:
                # Of bytes, and not of these, Python's sqlite3 asks in vain for an adapter, which
                # takes as long as to add the row.
                values[place::width] = map(bytearray, values[place::width])
            self._db.execute(into + row + f", {row}" * (_AT_ONCE - 1), values)
        self._db.executemany(into + row, some)

    def forget_keys(self) -> None:
        """Have no index of keys while many tasks are listed, of which none is here yet and no two
        are equal.

        Keys are as good as random: each that is added to a large index changes another page of it,
        which is written twice. To sort all of them once costs a tenth. A ledger is left without it
        only where its coordinator dies meanwhile; whoever opens it next to write makes it.
        """
        with explained(self.path, "write"):
            self._has_keys = not drop_keys(self._db)

    def keys_after(self, task_id: int, most: int) -> list[bytes]:
        """The keys of the first tasks with a higher number."""
        sql = "SELECT key FROM tasks WHERE task_id > ? ORDER BY task_id LIMIT ?"
        return [row[0] for row in self._all(sql, task_id, most)]

    def index_keys(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """``meanwhile`` is called now and then: it takes a second for a million tasks."""
        if self._has_keys:
            return

        failed: list[BaseException] = []

        def look() -> int:
            try:
                meanwhile()
            except BaseException as error:  # SQLite would say nothing of it but that it has ended
                failed.append(error)
            return len(failed)  # 0: go on

        self._db.set_progress_handler(look, _LOOK_AFTER)
        try:
            with explained(self.path, "sort the keys of"):
                add_keys(self._db)
        except Exception:
            if failed:
                raise failed[0] from None
            raise
        finally:
            self._db.set_progress_handler(None, 0)
        self._has_keys = True

    def note_added(self, first: int, said: Sequence[str], listed: str = "") -> None:
        """Note that the tasks from number ``first`` on are no part of the plan, see ``added``."""
        parts = [*self.added(), Addition(first, self.last_task(), tuple(said), listed)]
        self.set_meta(ADDED, json.dumps([part[:3] for part in parts]))  # as older musters read it
        lists = {str(part.first): part.listed for part in parts if part.listed}
        if lists:
            self.set_meta(LISTED, json.dumps(lists))

    def drop_tasks_after(self, task_id: int) -> None:
        """Take back tasks that were added and of which nobody has heard."""
        with explained(self.path, "write"):
            self._db.execute("DELETE FROM tasks WHERE task_id > ?", (task_id,))

    def divide(self, task: Task, payload: bytes, given: Sequence[tuple[bytes, bytes]]) -> int:
        """Make a running task smaller and insert the rest of it as new tasks.

        The task keeps its key and gets ``payload``; ``given`` are (key, payload) of the new tasks.
        Returns how many of them were not known.
        """
        with explained(self.path, "write"):
            self._db.execute(
                "UPDATE tasks SET payload = ? WHERE task_id = ?", (payload, task.task_id)
            )
            return self.add_tasks(NewTask(key, task.target_id, text) for key, text in given)
