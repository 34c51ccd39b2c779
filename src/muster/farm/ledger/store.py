"""The durable record of a run.

Guarantees
- One writer. Between ``begin`` and ``commit`` everything is recorded together or not at all, and
  a commit is on the disk (``synchronous=FULL``) before it returns.
- A task has at most one result: a result is accepted only for the task's current token.
- Tasks are inserted once per key; inserting a plan again changes nothing.

Not guaranteed
- Ledgers on network file systems, which SQLite's locks do not cover: see ``place``.
- Attempts cut short by the death of the coordinator are not listed; their tasks are ready again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from muster.farm.decisions import Stopped, fingerprint
from muster.farm.ledger.connect import SEARCH_TABLE, WITH_STOPPED, add_metrics, explained
from muster.farm.ledger.queries import CANCELLED, CLAIMED, READY, STOPPED, MetricRow, SearchRow
from muster.farm.ledger.tasks import TaskLedger
from muster.farm.task import AttemptRecord, Finished, Outcome, SlotSpec, Task, TaskState

#: The meta value that names the tasks which are cancelled and have not ended yet.
CANCELLING = "cancelling"


_RESULTS = "INSERT INTO results (task_id, token, value, sha256, files) VALUES "
_ATTEMPTS = "INSERT OR REPLACE INTO attempts VALUES "
#: A task of a row that has all of its fields, without a look at each.
_TASK = cast("Callable[[tuple[Any, ...]], Task]", partial(tuple.__new__, Task))


def _runs(rows: Sequence[Sequence[Any]], number: int, token: int) -> Iterator[tuple[int, int, int]]:
    """First and last number and token of rows that follow each other and have the same token.

    ``number`` and ``token`` say where in a row these are. Tasks are claimed and done in long runs,
    and to change a run takes a third of the time of changing its tasks one by one.
    """
    if not rows:
        return
    first = last = rows[0][number]
    own = rows[0][token]
    for row in rows[1:]:
        if row[number] != last + 1 or row[token] != own:
            yield first, last, own
            first, own = row[number], row[token]
        last = row[number]
    yield first, last, own


class Ledger(TaskLedger):
    """The writer's side. Use it from one process and one thread."""

    def __init__(self, path: Path, database: sqlite3.Connection | None = None) -> None:
        """``database``: a copy that is open already, in memory."""
        super().__init__(path, database)
        self._failure_ids: dict[str, int] = {}

    # ------------------------------------------------------------------ where tasks are

    def recover(self, *, kept: Collection[tuple[int, int]] = ()) -> int:
        """Void the claims of a coordinator that has died; returns how many there were.

        ``kept``: task and token of claims whose holders go on without it.
        """
        with explained(self.path, "write"):
            voided = self._db.execute(
                "UPDATE tasks SET state = ? WHERE state = ?", (READY, CLAIMED)
            ).rowcount
            self._claim_again(kept)
        return voided - len(kept)

    def take(self, key: bytes) -> Task | None:
        """Claim this one task, also one that has failed; None when it is done or unknown."""
        with explained(self.path, "write"):
            row = self._db.execute(
                "UPDATE tasks SET state = 1, token = token + 1 WHERE key = ? "
                "AND state NOT IN (2, 5) "
                "RETURNING task_id, key, target_id, payload, grp, token, tries",
                (key,),
            ).fetchone()
        return None if row is None else Task(*row)

    def record_waiting(
        self, records: Sequence[AttemptRecord], values: Sequence[tuple[bytes | None, str | None]]
    ) -> None:
        """Record results that came while there was no coordinator; their claims must still hold."""
        with explained(self.path, "write"):
            self._claim_again([(r.task_id, r.token) for r in records])
        if records:
            self.record_done(records, values)

    def _claim_again(self, claims: Collection[tuple[int, int]]) -> None:
        self._db.executemany(
            f"UPDATE tasks SET state = {CLAIMED} WHERE task_id = ? AND token = ?", list(claims)
        )

    def reopen(self, states: Sequence[TaskState]) -> int:
        """`muster retry`: tasks in these final states become ready, with their tries forgotten."""
        allowed = [s.value for s in states if s in (TaskState.FAILED, TaskState.CANCELLED)]
        marks = ",".join("?" * len(allowed))
        if TaskState.CANCELLED in states:
            self.drop_meta(CANCELLING)
        with explained(self.path, "write"):
            return self._db.execute(
                f"UPDATE tasks SET state = {READY}, tries = 0 WHERE state IN ({marks})", allowed
            ).rowcount

    def cancel_open(self) -> int:
        with explained(self.path, "write"):
            return self._db.execute(
                "UPDATE tasks SET state = ? WHERE state IN (?, ?)", (CANCELLED, READY, CLAIMED)
            ).rowcount

    def cancel_one(
        self, task_id: int, open_states: Collection[TaskState] = (TaskState.READY,)
    ) -> TaskState | None:
        """Cancel a task that is open, or that a search has paused; None where this has done it,
        else the state that the task has.
        """
        _, state, _ = self.state_of(task_id)
        is_paused = state is TaskState.STOPPED and self.is_paused(task_id)
        if not (state in open_states or is_paused):
            return state
        with explained(self.path, "write"):
            self._db.execute("DELETE FROM results WHERE task_id = ?", (task_id,))
            self._db.execute(f"UPDATE tasks SET state = {CANCELLED} WHERE task_id = ?", (task_id,))
        return None

    # ------------------------------------------------------------------ claims

    def claim(self, count: int) -> list[Task]:
        """Take up to ``count`` ready tasks, most urgent first, each with a new token."""
        with explained(self.path, "write"):
            rows = self._db.execute(
                "SELECT task_id, key, target_id, payload, grp, token + 1, tries, 0, '', 0, 0, "
                "priority, 0 FROM tasks WHERE state = 0 "
                "ORDER BY priority DESC, grp, task_id LIMIT ?",
                (count,),
            ).fetchall()
            self._db.executemany(
                "UPDATE tasks SET state = 1, token = ? WHERE task_id BETWEEN ? AND ?",
                [(token, first, last) for first, last, token in _runs(rows, 0, 5)],
            )
        return list(map(_TASK, rows))

    def retoken(self, tasks: Iterable[Task]) -> None:
        """Write the new tokens of claims that are handed out again after their holder vanished."""
        self._set_claims(tasks, CLAIMED)

    def release(self, tasks: Iterable[Task]) -> None:
        """Make claimed tasks ready again because the run stops."""
        self._set_claims(tasks, READY)

    def _set_claims(self, tasks: Iterable[Task], state: int) -> None:
        with explained(self.path, "write"):
            self._db.executemany(
                "UPDATE tasks SET state = ?, token = ?, tries = ? WHERE task_id = ?",
                [(state, task.token, task.tries, task.task_id) for task in tasks],
            )

    # ------------------------------------------------------------------ what came of them

    def record_done(
        self, records: Sequence[AttemptRecord], values: Sequence[tuple[bytes | None, str | None]]
    ) -> None:
        """Accept results. ``values``: per record the inline value, or None and a file's sha256.

        The token in the UPDATE is the fence: a result for an old token changes no row.
        """
        with explained(self.path, "write"):
            changed = self._db.executemany(
                "UPDATE tasks SET state = 2 "
                "WHERE task_id BETWEEN ? AND ? AND token = ? AND state = 1",
                _runs(records, 0, 1),
            ).rowcount
            if changed != len(records):
                raise sqlite3.IntegrityError(
                    f"results of {len(records)} attempts do not match the tokens in the ledger; "
                    "another program has changed it"
                )
            plain, rows = [], []
            for record, (value, sha) in zip(records, values, strict=True):
                if sha is None and not record[3].files:
                    plain.append((record[0], record[1], value))
                else:
                    rows.append((record[0], record[1], value, sha, record[3].files))
            self.add_rows(_RESULTS, "(?, ?, ?, NULL, 0)", plain, blobs=(2,))
            self._db.executemany(_RESULTS + "(?, ?, ?, ?, ?)", rows)
        self._insert_attempts(records)

    def record_failed(self, records: Sequence[AttemptRecord]) -> None:
        with explained(self.path, "write"):
            self._db.executemany(
                "UPDATE tasks SET state = 3, tries = tries + 1 WHERE task_id = ? AND token = ?",
                [(r.task_id, r.token) for r in records],
            )
        self._insert_attempts(records)

    def record_stopped(
        self, stopped: Sequence[Stopped], values: Sequence[bytes], *, has_files: bool = False
    ) -> None:
        """Record tasks that ended early on purpose, each with the last it has said.

        ``has_files``: whether earlier attempts of those that only waited have left any.
        """
        self.index_keys()
        with explained(self.path, "write"):
            self._db.execute(f"PRAGMA user_version = {WITH_STOPPED}")
            changed = self._db.executemany(
                f"UPDATE tasks SET state = {STOPPED} WHERE task_id = ? AND token = ?",
                [(task.task_id, task.token) for task, _ in stopped],
            ).rowcount
            if changed != len(stopped):
                raise sqlite3.IntegrityError(
                    f"{len(stopped)} stopped tasks do not match the tokens in the ledger"
                )
            self._db.executemany(
                "INSERT OR REPLACE INTO results (task_id, token, value, files) VALUES (?, ?, ?, ?)",
                [(task.task_id, task.token, value, record.finished.files if record else has_files)
                 for (task, record), value in zip(stopped, values, strict=True)],
            )  # fmt: skip
        self._insert_attempts([record for _, record in stopped if record is not None])

    def record_cancelled(self, cancelled: Sequence[Stopped]) -> None:
        with explained(self.path, "write"):
            self._db.executemany(
                f"UPDATE tasks SET state = {CANCELLED} WHERE task_id = ? AND token = ?",
                [(task.task_id, task.token) for task, _ in cancelled],
            )
        self._insert_attempts([record for _, record in cancelled if record is not None])

    def stop_ready(
        self, task_id: int, value: bytes, has_files: Callable[[Task], bool]
    ) -> Task | None:
        """End a task, if it waits. ``has_files``: whether an attempt of it has left any."""
        task = self.waiting(task_id)
        if task is not None:
            self.record_stopped([Stopped(task, None)], [value], has_files=has_files(task))
        return task

    def reopen_stopped(self, task_ids: Sequence[int]) -> None:
        """Make stopped tasks ready again: they go on from their checkpoints."""
        with explained(self.path, "write"):
            for task_id in task_ids:
                changed = self._db.execute(
                    f"UPDATE tasks SET state = {READY} WHERE task_id = ? AND state = {STOPPED}",
                    (task_id,),
                ).rowcount
                if changed:
                    self._db.execute("DELETE FROM results WHERE task_id = ?", (task_id,))

    def record_search(self, rows: Sequence[SearchRow]) -> None:
        """Add to the record of a search, which is replayed in this order."""
        with explained(self.path, "write"):
            self._db.execute(SEARCH_TABLE)
            self._db.executemany("INSERT INTO search (kind, task_id, body) VALUES (?, ?, ?)", rows)

    def record_tried(self, tried: Sequence[tuple[AttemptRecord, Task]]) -> None:
        """Failed attempts of tasks that will be tried again under a new token."""
        self._insert_attempts([record for record, _ in tried])
        self.retoken([task for _, task in tried])

    def record_late(self, worker_id: int, finished: Finished) -> None:
        with explained(self.path, "write"):
            self._db.execute(
                "INSERT INTO late_results VALUES (?, ?, ?, ?, ?)",
                (finished.task_id, finished.token, worker_id, time.time(), finished.value),
            )

    def record_metrics(self, rows: Sequence[MetricRow]) -> list[MetricRow]:
        """Record what attempts have logged; returns the rows that were new.

        It is kept for every token, also for one that was replaced meanwhile. A frame that is
        recorded already changes nothing.
        """
        with explained(self.path, "write"):
            if not self._has_metrics:
                add_metrics(self._db)
                self._has_metrics = True
            insert = (
                "INSERT OR IGNORE INTO metrics (task_id, token, serial, body) VALUES (?, ?, ?, ?)"
            )
            return [row for row in rows if self._db.execute(insert, row).rowcount]

    def use_up_token(self, task_id: int, token: int) -> None:
        """Have later claims of the task get higher tokens than this one."""
        with explained(self.path, "write"):
            self._db.execute(
                "UPDATE tasks SET token = max(token, ?) WHERE task_id = ?", (token, task_id)
            )

    def _insert_attempts(self, records: Sequence[AttemptRecord]) -> None:
        plain, rows = [], []
        for task_id, token, worker_id, f in records:
            if f[2] is Outcome.OK and not f.message and f.signal is None:  # an index costs less
                plain.append((task_id, token, worker_id, f[3], f[4], f[7], f[5], f[6]))
                continue
            failure_id = None if f.outcome in ("ok", "stopped") else self._failure_id(f)
            rows.append(
                (
                    task_id, token, worker_id, f.started_s, f.seconds, f.outcome, f.signal,
                    f.peak_mib, f.log_start, f.log_end, failure_id, f.message or None,
                )
            )  # fmt: skip
        with explained(self.path, "write"):
            self.add_rows(_ATTEMPTS, "(?, ?, ?, ?, ?, 'ok', NULL, ?, ?, ?, NULL, NULL)", plain)
            self._db.executemany(_ATTEMPTS + "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _failure_id(self, finished: Finished) -> int:
        mark = fingerprint(finished)
        if mark not in self._failure_ids:
            with explained(self.path, "write"):
                self._db.execute(
                    "INSERT OR IGNORE INTO failures (fingerprint, outcome, message, trace) "
                    "VALUES (?, ?, ?, ?)",
                    (mark, finished.outcome, finished.message, finished.trace),
                )
                row = self._db.execute(
                    "SELECT failure_id FROM failures WHERE fingerprint = ?", (mark,)
                ).fetchone()
            self._failure_ids[mark] = int(row[0])
        return self._failure_ids[mark]

    # ------------------------------------------------------------------ workers

    def worker_started(
        self, worker_id: int, slot: SlotSpec, host: str, log: str, code: str | None = None
    ) -> None:
        """``code``: the short name of the code that it runs, see `muster.base.code`."""
        with explained(self.path, "write"):
            self._db.execute(
                "INSERT OR REPLACE INTO workers "
                "(worker_id, slot_id, label, devices, host, log, started_s, code) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    worker_id, slot.slot_id, slot.label, "+".join(slot.devices), host, log,
                    time.time(), code,
                ),
            )  # fmt: skip

    def worker_ended(self, worker_id: int, ending: str) -> None:
        with explained(self.path, "write"):
            self._db.execute(
                "UPDATE workers SET ended_s = ?, ending = ? WHERE worker_id = ?",
                (time.time(), ending, worker_id),
            )

    def counts(self) -> dict[TaskState, int]:
        """Tasks by state."""
        with explained(self.path, "read"):
            rows = self._db.execute("SELECT state, count(*) FROM tasks GROUP BY state").fetchall()
        return {state: dict(rows).get(state.value, 0) for state in TaskState}
