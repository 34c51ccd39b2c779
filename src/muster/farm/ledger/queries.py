"""What the writer of a ledger asks it, and whoever only looks at it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from muster.farm import canonical
from muster.farm.ledger.connect import explained, has_metrics, has_table
from muster.farm.task import Task, TaskState

READY, CLAIMED, DONE, FAILED, CANCELLED, STOPPED = (state.value for state in TaskState)
#: What an attempt has logged at once: task, token, serial, a body of `muster.farm.metrics`.
MetricRow = tuple[int, int, int, bytes]
#: The meta value that names the tasks which are no part of the plan.
ADDED = "added"
#: The one with the hashes of the lists that some of these were read from, by their first task.
LISTED = "added_lists"


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

    def targets(self) -> list[str]:
        return [row[0] for row in self._all("SELECT name FROM targets")]

    def _all(self, sql: str, *values: object) -> list[Any]:
        with explained(self.path, "read"):
            return self._db.execute(sql, values).fetchall()
