"""Looking at a ledger without disturbing its writer: short read-only transactions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from muster.farm.canonical import short_key, task_label
from muster.farm.ledger.away import open_whole
from muster.farm.ledger.columns import LedgerColumns
from muster.farm.ledger.connect import explained, has_metrics, has_table, has_worker_code
from muster.farm.ledger.records import (
    AttemptRow,
    FailureGroup,
    LogPart,
    MetricsRow,
    RecentTask,
    TaskRow,
    WorkSpan,
)
from muster.farm.metrics import names_in
from muster.farm.task import TaskState

_FETCH = 2000
_LONGEST_KEY = 64
_SHORTEST_KEY = 12  # of digits alone: as many as the table shows
_LONGEST_NUMBER = 19  # digits; SQLite holds all of fewer
_ENDED = "CASE outcome WHEN 'ok' THEN 'done' WHEN 'stopped' THEN 'stopped' ELSE 'failed' END"
_STATES = {state.value: state for state in TaskState}


class LedgerReader(LedgerColumns):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = open_whole(path)

    @property
    def is_copy(self) -> bool:
        """Whether it has what there was when it was opened, of a ledger that lives elsewhere."""
        return not self._db.execute("PRAGMA database_list").fetchone()[2]

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def counts(self) -> dict[TaskState, int]:
        """Tasks by state. Done and stopped ones have results, whose count is an index scan, and so
        is that of waiting ones and of those that ended in another way; the rest is claimed.
        """
        # The index of an older ledger is of all that is not done, and is used where that is said.
        sql = "SELECT state, count(*) FROM tasks WHERE state > 2 AND state <> 2 GROUP BY state"
        with self._one_state():
            counts: dict[int, int] = dict(self._all(sql))
            results = self._all("SELECT count(*) FROM results")[0][0]
            ready = self._all("SELECT count(*) FROM tasks WHERE state = 0")[0][0]
            known = self.num_tasks()
        counts[TaskState.READY] = ready
        counts[TaskState.DONE] = results - counts.get(TaskState.STOPPED, 0)
        counts[TaskState.CLAIMED] = known - sum(counts.values())
        return {state: counts.get(state, 0) for state in TaskState}

    def states(self) -> list[TaskState]:
        """The state of every task in the order of the plan."""
        return [_STATES[row[0]] for row in self._all("SELECT state FROM tasks ORDER BY task_id")]

    def num_tasks(self) -> int:
        return int(self._all("SELECT count(*) FROM tasks")[0][0])

    def num_retried(self) -> int:
        """Attempts that failed and were tried again."""
        sql = (
            "SELECT count(*) FROM attempts JOIN tasks USING (task_id) "
            "WHERE outcome NOT IN ('ok', 'stopped') "
            "AND NOT (state = 3 AND attempts.token = tasks.token)"
        )
        return int(self._all(sql)[0][0])

    def ended(self) -> list[tuple[int, int]]:
        """Task and token of every task that is done, failed or cancelled."""
        return self._all("SELECT task_id, token FROM tasks WHERE state >= 2 ORDER BY task_id")

    def task(self, task_id: int) -> TaskRow:
        """One task, which must be there."""
        return next(self._rows("WHERE t.task_id = ? ", task_id))

    def keys(self) -> dict[int, bytes]:
        """The key of every task, by its number."""
        return dict(self._all("SELECT task_id, key FROM tasks"))

    def tasks(self) -> Iterator[TaskRow]:
        """Every task in the order of the plan; memory does not grow with their number."""
        return self._rows()

    def standings(self, above: int = 0, most: int = 20_000) -> list[tuple[int, int, int]]:
        """Number, state and token of the next tasks after ``above``; whoever compares them with
        what it saw knows which tasks have changed.
        """
        return self._all(
            "SELECT task_id, state, token FROM tasks WHERE task_id > ? ORDER BY task_id LIMIT ?",
            above,
            most,
        )

    def rows_of(self, task_ids: Sequence[int]) -> list[TaskRow]:
        """These tasks, as far as they are there, in the order of the plan."""
        marks = ", ".join("?" * len(task_ids))
        return list(self._rows(f"WHERE t.task_id IN ({marks}) ", *task_ids))

    def task_ids(self, offset: int, most: int) -> list[int]:
        """The numbers of ``most`` tasks from the ``offset``-th one of the plan on."""
        sql = "SELECT task_id FROM tasks ORDER BY task_id LIMIT ? OFFSET ?"
        return [row[0] for row in self._all(sql, most, offset)]

    def _rows(self, which: str = "", *values: object) -> Iterator[TaskRow]:
        with explained(self.path, "read"):
            cursor = self._db.execute(self._select(TaskRow._fields, which), values)
            while rows := cursor.fetchmany(_FETCH):
                for row in rows:
                    parts = (*row[:4], _STATES[row[4]], *row[5:7], bool(row[7]), *row[8:])
                    yield TaskRow._make(parts)

    def has_values(self) -> bool:
        """Whether any result has a field."""
        sql = "SELECT 1 FROM results WHERE value IS NULL OR value <> CAST('{}' AS BLOB) LIMIT 1"
        return bool(self._all(sql))

    def num_codes(self) -> int:
        """How many versions of the code made the attempts; all unknown ones count as one."""
        if not has_worker_code(self._db):
            return 1
        sql = "SELECT count(DISTINCT coalesce(code, '')) FROM workers"
        if self._all(sql)[0][0] < 2:  # nearly always so, and known without reading all attempts
            return 1
        did_something = " WHERE worker_id IN (SELECT worker_id FROM attempts)"
        return int(self._all(sql + did_something)[0][0])

    def origins(self) -> dict[int, bytes]:
        """Of each task that a search began with another's checkpoint, the key of that one."""
        with explained(self.path, "read"):
            if not has_table(self._db, "search"):
                return {}
            which = "SELECT task_id, body FROM search WHERE kind = 'proposal'"
            of_heirs = f'{which} AND instr(CAST(body AS TEXT), \'"by":"pbt"\')'
            if self._db.execute(of_heirs).fetchone() is None:
                return {}
            proposals = {task: orjson.loads(body) for task, body in self._db.execute(which)}
        keys = self.keys()
        of_trial = {body["trial"]: keys[task] for task, body in proposals.items()}
        return {
            task: of_trial[body["parent"]]
            for task, body in proposals.items()
            if body.get("parent") is not None
        }

    def payloads(self) -> Iterator[bytes]:
        """The parameters of every task of the plan, encoded."""
        added = self.added()
        with explained(self.path, "read"):
            for number, payload in self._db.execute("SELECT task_id, payload FROM tasks"):
                if not any(part.first <= number <= part.last for part in added):
                    yield payload

    def metrics(self, *, above: int = 0, task_id: int | None = None) -> Iterator[MetricsRow]:
        """What was logged, in the order of recording: after frame ``above``, by one task or all.

        A reader of a ledger that lives elsewhere sees what there was when it was opened.
        """
        with explained(self.path, "read"):
            if not has_metrics(self._db):
                return
            of_task = "" if task_id is None else " AND task_id = :task"
            cursor = self._db.execute(
                "SELECT frame_id, task_id, token, body FROM metrics "
                f"WHERE frame_id > :above{of_task} ORDER BY frame_id",
                {"above": above, "task": task_id},
            )
            while rows := cursor.fetchmany(_FETCH):
                yield from map(MetricsRow._make, rows)

    def last_frame(self) -> int:
        """The number of the last frame of metrics; 0 before the first."""
        if not has_metrics(self._db):
            return 0
        return int(self._all("SELECT coalesce(max(frame_id), 0) FROM metrics")[0][0])

    def tasks_with_metrics(self) -> set[int]:
        """The tasks that have logged something."""
        sql = "SELECT DISTINCT task_id FROM metrics"
        with explained(self.path, "read"):
            return {row[0] for row in self._db.execute(sql)} if has_metrics(self._db) else set()

    def metric_names(self, task_id: int) -> list[str]:
        """What a task has logged, in the order of its first points."""
        return list(dict.fromkeys(
            name for row in self.metrics(task_id=task_id) for name in names_in(row.body)
        ))  # fmt: skip

    def find(self, text: str) -> list[tuple[int, bytes]]:
        """Tasks whose number is ``text`` or whose key starts with it; two at most.

        A few digits are a number and nothing else: somebody who means task 25 of 18 would get
        whichever task has a key that begins so.
        """
        found: list[tuple[int, bytes]] = []
        is_number = text.isascii() and text.isdigit()
        if is_number and len(text) < _LONGEST_NUMBER:
            found = self._all("SELECT task_id, key FROM tasks WHERE task_id = ?", int(text))
        if not found and not (is_number and len(text) < _SHORTEST_KEY):
            with suppress(ValueError):  # of digits in hexadecimal, whether of whole bytes or not
                low, high = (bytes.fromhex(text + digit * (len(text) % 2)) for digit in "0f")
                sql = "SELECT task_id, key FROM tasks WHERE key BETWEEN ? AND ? LIMIT 2"
                found = self._all(sql, low, high + b"\xff" * _LONGEST_KEY)
        return found

    def log_parts(self, task_id: int) -> list[LogPart]:
        """One entry per recorded attempt, oldest first."""
        rows = self._all(
            "SELECT token, outcome, w.log, log_start, log_end FROM attempts "
            "JOIN workers w USING (worker_id) WHERE task_id = ? ORDER BY token",
            task_id,
        )
        return [LogPart._make(row) for row in rows]

    def open_log(self, slot: str) -> tuple[str, int] | None:
        """The log of the worker that was started last in this slot, and where in it the output of
        its last recorded task ends; None where there was no worker.
        """
        rows = self._all(
            "SELECT log, coalesce((SELECT max(log_end) FROM attempts JOIN workers x "
            " USING (worker_id) WHERE x.log = w.log), 0) "
            "FROM workers w WHERE label = ? ORDER BY worker_id DESC LIMIT 1",
            slot,
        )
        return rows[0] if rows else None

    def attempts(self, task_id: int) -> list[AttemptRow]:
        """The recorded attempts of a task, oldest first."""
        rows = self._all(
            "SELECT token, outcome, message, w.label, w.host, a.started_s, seconds, peak_mib "
            "FROM attempts a JOIN workers w USING (worker_id) WHERE task_id = ? ORDER BY token",
            task_id,
        )
        return [AttemptRow._make(row) for row in rows]

    def spans(self) -> dict[bytes, tuple[float, float]]:
        """When the first attempt of each task began and its last one ended, by the task's key."""
        sql = (
            "SELECT key, min(started_s), max(started_s + seconds) "
            "FROM attempts JOIN tasks USING (task_id) GROUP BY task_id"
        )
        return {key: (begin, end) for key, begin, end in self._all(sql)}

    def failures(self) -> list[FailureGroup]:
        """Failed attempts grouped by cause, the most frequent first."""
        groups = self._all(
            "SELECT f.failure_id, f.outcome, f.message, f.trace, count(*), "
            " coalesce(sum(t.state = 3 AND a.token = t.token), 0), "
            " min(a.started_s + a.seconds), max(a.started_s + a.seconds), "
            " count(DISTINCT a.task_id) "
            "FROM attempts a JOIN failures f USING (failure_id) JOIN tasks t USING (task_id) "
            "GROUP BY f.failure_id ORDER BY 6 DESC, 5 DESC, 1"
        )
        return [
            FailureGroup._make((*of[:5], *self._examples(number, of[4] > 0), *of[5:], number))
            for number, *of in groups
        ]

    def failure_times(self, columns: int) -> tuple[float, float, dict[int, list[int]]]:
        """When attempts failed: of the time from the first attempt's begin to the last one's end,
        cut into ``columns``, how many failed in each, by the number of their cause."""
        sql = "SELECT min(started_s), max(started_s + seconds) FROM attempts"
        first, last = self._all(sql)[0]
        counts: dict[int, list[int]] = {}
        if first is None:
            return 0.0, 0.0, counts
        rows = self._all(
            "SELECT failure_id, min(?, CAST((started_s + seconds - ?) / ? AS INTEGER)) AS col,"
            " count(*) FROM attempts WHERE failure_id IS NOT NULL GROUP BY failure_id, col",
            columns - 1, first, max(last - first, 1e-9) / columns,
        )  # fmt: skip
        for number, column, num in rows:
            counts.setdefault(number, [0] * columns)[max(0, column)] = num
        return first, last, counts

    def failed_tasks(self, count: int = 5) -> list[str]:
        """What the first failed tasks are called."""
        sql = "SELECT task_id, payload FROM tasks WHERE state = 3 ORDER BY task_id LIMIT ?"
        return [task_label(*row) for row in self._all(sql, count)]

    def _examples(
        self, failure_id: int, has_failed: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:  # fmt: skip
        # A task that came right later is not named beside those that failed.
        failed = "AND t.state = 3 AND a.token = t.token " if has_failed else ""
        rows = self._all(
            "SELECT DISTINCT key, task_id, payload FROM attempts a JOIN tasks t USING (task_id) "
            f"WHERE failure_id = ? {failed}ORDER BY task_id LIMIT 5",
            failure_id,
        )
        return tuple(short_key(row[0]) for row in rows), tuple(task_label(*r[1:]) for r in rows)

    def work_spans(self, most: int) -> list[WorkSpan]:
        """When each slot worked, in order: attempts that began close together and ended alike are
        one span, so that there are about ``most`` of them at most.
        """
        sql = "SELECT min(started_s), max(started_s + seconds), count(*) FROM attempts"
        first, last, num = self._all(sql)[0]
        if not num:
            return []
        slots = self._all("SELECT count(DISTINCT slot_id) FROM workers")[0][0]
        # A column of pixels of a slot holds at most one span of each of three endings.
        width = (last - first) / max(1, most // (3 * slots))
        column = (
            "task_id || '.' || token" if num <= most else "CAST((started_s - ?) / ? AS INTEGER)"
        )
        rows = self._all(
            "SELECT label, begin, until, ended, num, key FROM ("
            " SELECT worker_id, min(started_s) AS begin, max(started_s + seconds) AS until,"
            " count(*) AS num, min(task_id) AS task_id,"
            f" {_ENDED} AS ended, {column} AS col FROM attempts GROUP BY worker_id, col, ended)"
            " JOIN workers USING (worker_id) JOIN tasks USING (task_id) ORDER BY slot_id, begin",
            *(() if num <= most else (first, width)),
        )
        return [WorkSpan._make((*row[:5], short_key(row[5]))) for row in rows]

    def recent(self, count: int) -> list[RecentTask]:
        """The tasks whose attempts ended last, the latest first."""
        rows = self._all(
            f"SELECT key, task_id, payload, {_ENDED}, seconds, started_s + seconds AS ended_s "
            "FROM attempts JOIN tasks USING (task_id) ORDER BY ended_s DESC LIMIT ?",
            count,
        )
        return [RecentTask(short_key(row[0]), task_label(*row[1:3]), *row[3:]) for row in rows]

    def trace_of(self, task_id: int) -> str | None:
        """The traceback of a task's last failed attempt."""
        rows = self._all(
            "SELECT trace FROM attempts JOIN failures USING (failure_id) WHERE task_id = ? "
            "ORDER BY token DESC LIMIT 1",
            task_id,
        )
        return rows[0][0] if rows else None
