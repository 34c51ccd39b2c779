"""What the writer of a ledger asks it, and whoever only looks at it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from muster.farm import canonical
from muster.farm.ledger.connect import explained, has_metrics, has_table, has_worker_code
from muster.farm.task import Task, TaskState

READY, CLAIMED, DONE, FAILED, CANCELLED, STOPPED = (state.value for state in TaskState)
#: What an attempt has logged at once: task, token, serial, a body of `muster.farm.metrics`.
MetricRow = tuple[int, int, int, bytes]
#: The meta value that names the tasks which are no part of the plan.
ADDED = "added"
#: The one with the hashes of the lists that some of these were read from, by their first task.
LISTED = "added_lists"

#: By the name of a field, its values in some tasks.
Columns = dict[str, Sequence[Any]]
_NO_RESULT = (None, None, 0)
_NO_ATTEMPT = (None,) * 5
#: The fields of `TaskRow`, as a query over tasks, results and their attempts has them.
_FIELDS = {
    "task_id": "t.task_id", "key": "t.key", "target": "g.name", "payload": "t.payload",
    "state": "t.state",
    "attempts": "(SELECT count(*) FROM attempts x WHERE x.task_id = t.task_id)",
    "value": "r.value", "has_files": "coalesce(r.files, 0)", "seconds": "a.seconds",
    "device": "w.label", "outcome": "a.outcome", "message": "a.message", "peak_mib": "a.peak_mib",
    "started_s": "a.started_s", "code": "w.code",
    "key_of_file": "CASE WHEN r.value IS NULL THEN t.key END",
}  # fmt: skip


class SearchRow(NamedTuple):
    """What a search was told or has decided; ``body`` is JSON. ``task_id``: None for a decision."""

    kind: str  # "proposal" | "heard" | "ended" | "decision"
    task_id: int | None
    body: bytes


class Addition(NamedTuple):
    """Tasks that were added to the plan: the numbers of the first and the last, and the words they
    were asked for with; none where a call did. ``listed``: the hash of the list file among these.
    """

    first: int
    last: int
    said: tuple[str, ...]
    listed: str = ""


class LedgerQueries:
    _db: sqlite3.Connection
    path: Path

    def meta(self, name: str) -> str | None:
        with explained(self.path, "read"):
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def added(self) -> list[Addition]:
        """What was added to the plan with `muster add`, in that order."""
        parts = json.loads(self.meta(ADDED) or "[]")
        lists = json.loads(self.meta(LISTED) or "{}")
        return [
            Addition(first, last, tuple(said), str(lists.get(str(first), "")))
            for first, last, said in parts
        ]

    def key_of(self, task_id: int) -> bytes:
        with explained(self.path, "read"):
            row = self._db.execute("SELECT key FROM tasks WHERE task_id = ?", (task_id,))
            return bytes(row.fetchone()[0])

    def made_from(self, task_id: int) -> tuple[str, bytes]:
        """The name of the task's target, and its parameters."""
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT name, payload FROM tasks JOIN targets USING (target_id) WHERE task_id = ?",
                (task_id,),
            ).fetchone()
        return str(row[0]), bytes(row[1])

    def tasks_of(self, target_id: int) -> list[tuple[int, bytes, bytes, TaskState, bytes | None]]:
        """All tasks of a target: number, key, parameters, state, result if it is stored here."""
        with explained(self.path, "read"):
            rows = self._db.execute(
                "SELECT task_id, key, payload, state, value FROM tasks "
                "LEFT JOIN results USING (task_id) WHERE target_id = ? ORDER BY task_id",
                (target_id,),
            )
            return [(*row[:3], TaskState(row[3]), row[4]) for row in rows]

    def state_of(self, task_id: int) -> tuple[bytes, TaskState, bytes | None]:
        """A task's key, where it is, and its result if that is stored here."""
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT key, state, value FROM tasks LEFT JOIN results USING (task_id) "
                "WHERE task_id = ?",
                (task_id,),
            ).fetchone()
        return row[0], TaskState(row[1]), row[2]

    def standing(self, key: bytes) -> tuple[int, TaskState, bytes | None]:
        """The number of a task that is there, its state, and its result if that is stored here."""
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT task_id, state, value FROM tasks LEFT JOIN results USING (task_id) "
                "WHERE key = ?",
                (key,),
            ).fetchone()
        return int(row[0]), TaskState(row[1]), row[2]

    def metrics_of(self, task_id: int) -> list[tuple[int, bytes]]:
        """What a task has logged: token and body, in the order of recording."""
        with explained(self.path, "read"):
            if not has_metrics(self._db):
                return []
            sql = "SELECT token, body FROM metrics WHERE task_id = ? ORDER BY frame_id"
            return self._db.execute(sql, (task_id,)).fetchall()

    def seconds_of_attempts(self, task_ids: Iterable[int]) -> float:
        """How long the attempts of these tasks took."""
        sql = "SELECT seconds FROM attempts WHERE task_id = ?"
        with explained(self.path, "read"):
            return float(sum(row[0] for one in task_ids for row in self._db.execute(sql, (one,))))

    def lengths(self, most: int = 5000) -> list[tuple[int, bytes, float]]:
        """What tasks took, those of the highest numbers: target, parameters, seconds."""
        sql = (
            "SELECT target_id, payload, seconds FROM attempts JOIN tasks USING (task_id) "
            "WHERE outcome = 'ok' ORDER BY attempts.task_id DESC LIMIT ?"
        )
        return self._all(sql, most)

    def is_paused(self, task_id: int) -> bool:
        """Whether a stopped task of a search would go on if it were promoted."""
        sql = "SELECT body FROM search WHERE kind = 'ended' AND task_id = ? ORDER BY id DESC"
        # One that rested has ended for good where another trial has its place.
        replaced = (
            "SELECT body FROM search WHERE kind = 'decision' "
            "AND instr(CAST(body AS TEXT), '\"replace\"')"
        )
        with explained(self.path, "read"):
            if not has_table(self._db, "search"):
                return False
            row = self._db.execute(sql, (task_id,)).fetchone()
            last = {} if row is None else canonical.decode(row[0])
            if last.get("state") != "paused":
                return False
            others = self._db.execute(replaced).fetchall()
        return all(canonical.decode(body)["trial"] != last["trial"] for (body,) in others)

    def has_had_gpus(self) -> bool:
        """Whether a worker had GPUs of the coordinator's machine."""
        with explained(self.path, "read"):
            found = self._db.execute("SELECT 1 FROM workers WHERE devices <> '' LIMIT 1").fetchone()
        return found is not None

    def search_rows(self) -> list[SearchRow]:
        with explained(self.path, "read"):
            if not has_table(self._db, "search"):
                return []
            rows = self._db.execute("SELECT kind, task_id, body FROM search ORDER BY id")
            return [SearchRow._make(row) for row in rows]

    def task_of_key(self, key: bytes) -> tuple[Task, bool] | None:
        """The task of this key as it is, and whether it is done."""
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT task_id, key, target_id, payload, grp, token, tries, state FROM tasks "
                "WHERE key = ?",
                (key,),
            ).fetchone()
        return None if row is None else (Task(*row[:-1]), row[-1] == DONE)

    def waiting(self, task_id: int) -> Task | None:
        """The task if it waits to be claimed."""
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT task_id, key, target_id, payload, grp, token, tries FROM tasks "
                f"WHERE task_id = ? AND state = {READY}",
                (task_id,),
            ).fetchone()
        return None if row is None else Task(*row)

    def accepted(self, key_hex: str) -> tuple[str, int | None]:
        """The task's state ("done", "stopped", "failed", "claimed", "open" or "unknown") and the
        token of its accepted result.
        """
        try:
            key = bytes.fromhex(key_hex)
        except ValueError:  # the name of something that is not ours
            return "unknown", None
        with explained(self.path, "read"):
            row = self._db.execute(
                "SELECT state, results.token FROM tasks LEFT JOIN results USING (task_id) "
                "WHERE key = ?",
                (key,),
            ).fetchone()
        if row is None:
            return "unknown", None
        names = {DONE: "done", FAILED: "failed", CLAIMED: "claimed", STOPPED: "stopped"}
        return names.get(row[0], "open"), row[1]

    def last_task(self) -> int:
        """The highest number of a task; 0 where there is none."""
        with explained(self.path, "read"):
            row = self._db.execute("SELECT COALESCE(MAX(task_id), 0) FROM tasks").fetchone()
            return int(row[0])

    def still_claimed(self, claims: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of these claims (task, token) that no later claim or result has replaced."""
        with explained(self.path, "read"):
            return {
                claim
                for claim in claims
                if self._db.execute(
                    "SELECT 1 FROM tasks WHERE task_id = ? AND token = ? AND state IN (0, 1)", claim
                ).fetchone()
            }

    def stopped(self) -> dict[bytes, int]:
        """The number of each stopped task, by its key."""
        with explained(self.path, "read"):
            return dict(
                self._db.execute("SELECT key, task_id FROM tasks WHERE state = ?", (STOPPED,))
            )

    def next_worker_id(self) -> int:
        with explained(self.path, "read"):
            row = self._db.execute("SELECT coalesce(max(worker_id), 0) + 1 FROM workers")
            return int(row.fetchone()[0])

    def num_results(self) -> int:
        with explained(self.path, "read"):
            return int(self._db.execute("SELECT count(*) FROM results").fetchone()[0])

    def cells(self, fields: Sequence[str], task_ids: Sequence[int]) -> list[Any]:
        """These fields of `TaskRow`, as SQLite has them, of these tasks in the order of the plan.
        Tables in which none of the fields is are not looked at.
        """
        if not task_ids:
            return []
        first, last = task_ids[0], task_ids[-1]
        if last - first + 1 == len(task_ids):
            return self._all(self._select(fields, "WHERE t.task_id BETWEEN ? AND ? "), first, last)
        marks = ", ".join("?" * len(task_ids))
        return self._all(self._select(fields, f"WHERE t.task_id IN ({marks}) "), *task_ids)

    def targets(self) -> list[str]:
        return [row[0] for row in self._all("SELECT name FROM targets")]

    def every(self, most: int, *fields: str) -> Iterator[Columns]:
        """These fields of `TaskRow`, as SQLite has them, of all tasks in the order of the plan,
        ``most`` at a time: of each field its values.
        """
        with explained(self.path, "read"):
            cursor = self._db.execute(self._select(fields, ""))
            while rows := cursor.fetchmany(most):
                yield dict(zip(fields, zip(*rows, strict=True), strict=True))

    def pieces(self, count: int, most: int, *fields: str) -> Iterator[Columns]:
        """`every` of the first tasks, and of as many at ``count - 1`` places further on."""
        last = self.last_task()
        for first in (1 + part * last // count for part in range(count)):
            if rows := self.cells(fields, range(first, first + most)):
                yield dict(zip(fields, zip(*rows, strict=True), strict=True))

    def whole(self, most: int) -> Iterator[Columns]:
        """The same with all fields but when an attempt began, and an outcome only where it is not
        "ok". The tables are read from begin to end beside each other, where a join would look each
        task up in five.
        """
        code = "code" if has_worker_code(self._db) else "NULL"
        with explained(self.path, "read"), self._one_state():
            targets = dict(self._db.execute("SELECT target_id, name FROM targets"))
            label_of = dict(self._db.execute("SELECT worker_id, label FROM workers"))
            code_of = dict(self._db.execute(f"SELECT worker_id, {code} FROM workers"))
            tasks = self._db.execute(
                "SELECT task_id, key, target_id, payload, state FROM tasks ORDER BY task_id"
            )
            while rows := tasks.fetchmany(most):
                ids, keys, target_ids, payloads, states = zip(*rows, strict=True)
                tokens, values, has_files = self._results(ids)
                attempts, last = self._attempts(ids, tokens)
                worker_ids, seconds, peaks, outcomes, messages = last
                yield {
                    "task_id": ids, "key": keys, "payload": payloads, "state": states,
                    "target": list(map(targets.get, target_ids)),
                    "value": values, "has_files": has_files, "attempts": attempts,
                    "seconds": seconds, "peak_mib": peaks, "outcome": outcomes,
                    "message": messages, "device": list(map(label_of.get, worker_ids)),
                    "code": list(map(code_of.get, worker_ids)),
                }  # fmt: skip

    @contextmanager
    def _one_state(self) -> Iterator[None]:
        """Let several queries see the same state of the ledger."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def _results(self, ids: Sequence[int]) -> tuple[Sequence[Any], ...]:
        """Of each of these tasks, which follow each other: token, value, whether it has files."""
        where = "FROM results WHERE task_id BETWEEN ? AND ? ORDER BY task_id", (ids[0], ids[-1])
        if ids[-1] - ids[0] + 1 == len(ids):
            rows = self._all(f"SELECT token, value, files {where[0]}", *where[1])
            if len(rows) == len(ids):  # then these are theirs
                return tuple(zip(*rows, strict=True))
        rows = self._all(f"SELECT task_id, token, value, files {where[0]}", *where[1])
        known = {row[0]: row[1:] for row in rows}
        return tuple(zip(*(known.get(number, _NO_RESULT) for number in ids), strict=True))

    def _attempts(
        self, ids: Sequence[int], tokens: Sequence[int | None]
    ) -> tuple[Sequence[int], Sequence[Sequence[Any]]]:
        """Of each of these tasks: how many attempts; of the one of its result or its last:
        worker, seconds, peak, outcome, message.
        """
        rows = self._db.execute(
            "SELECT task_id, token, worker_id, seconds, peak_mib, nullif(outcome, 'ok'), message "
            "FROM attempts WHERE task_id BETWEEN ? AND ? ORDER BY task_id, token",
            (ids[0], ids[-1]),
        ).fetchall()
        if len(rows) == len(ids):
            numbers, own, *columns = zip(*rows, strict=True)
            if numbers == ids and own == tokens:  # nearly always so, and no look at each
                return [1] * len(ids), columns
        wanted, counts, last = dict(zip(ids, tokens, strict=True)), dict.fromkeys(ids, 0), {}
        for number, token, *said in rows:
            counts[number] += 1
            if wanted[number] in (None, token):
                last[number] = said
        found = (last.get(number, _NO_ATTEMPT) for number in ids)
        return list(counts.values()), list(zip(*found, strict=True))

    def _select(self, fields: Sequence[str], which: str) -> str:
        known = _FIELDS if has_worker_code(self._db) else {**_FIELDS, "code": "NULL"}
        return (
            f"SELECT {', '.join(known[field] for field in fields)} "
            "FROM tasks t LEFT JOIN targets g USING (target_id) "
            "LEFT JOIN results r ON r.task_id = t.task_id "
            "LEFT JOIN attempts a ON a.task_id = t.task_id AND a.token = "
            " coalesce(r.token, "
            "  (SELECT max(token) FROM attempts y WHERE y.task_id = t.task_id)) "
            "LEFT JOIN workers w ON w.worker_id = a.worker_id "
            f"{which}ORDER BY t.task_id"
        )

    def _all(self, sql: str, *values: object) -> list[Any]:
        with explained(self.path, "read"):
            return self._db.execute(sql, values).fetchall()
