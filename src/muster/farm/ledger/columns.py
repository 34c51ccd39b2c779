"""Reading the tasks of a ledger column by column, for tables of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from muster.farm.canonical import KEY_BYTES
from muster.farm.ledger.connect import explained, has_worker_code
from muster.farm.ledger.queries import LedgerQueries

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
#: Longer parameters are not read as `Plain`: all of a block would be one text.
_MOST_PLAIN = 4096
_TRIES = 8


class Plain(NamedTuple):
    """Tasks that follow each other and of which there is little to say: all have the same target,
    and each is done by its only attempt and has a result that is in the ledger, and no files.

    Most blocks of a large run are such. SQLite joins their texts in half of the time in which
    Python gets them one by one.
    """

    task_ids: range
    target: str
    keys: str  # in hexadecimal digits, one behind the other
    payloads: bytes  # a line for each
    values: bytes  # a line for each
    devices: Sequence[str | None]
    codes: Sequence[str | None]
    seconds: Sequence[float]
    peak_mib: Sequence[float | None]


class LedgerColumns(LedgerQueries):
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

    def whole(self, most: int) -> Iterator[Columns | Plain]:
        """The same with all fields but when an attempt began, and an outcome only where it is not
        "ok". The tables are read from begin to end beside each other, where a join would look each
        task up in five. What is `Plain` comes as that.
        """
        code = "code" if has_worker_code(self._db) else "NULL"
        with explained(self.path, "read"), self._one_state():
            targets = dict(self._db.execute("SELECT target_id, name FROM targets"))
            label_of = dict(self._db.execute("SELECT worker_id, label FROM workers"))
            code_of = dict(self._db.execute(f"SELECT worker_id, {code} FROM workers"))
            longest = self._all("SELECT max(length(payload)) FROM tasks")[0][0] or 0
            above = num_tried = num_plain = 0
            while True:
                # A run that has hardly any such tasks is not asked about each block.
                if longest <= _MOST_PLAIN and num_tried <= 2 * num_plain + _TRIES:
                    num_tried += 1
                    plain = self._plain(above + 1, above + most, targets, label_of, code_of)
                    if plain is not None:
                        num_plain, above = num_plain + 1, above + most
                        yield plain
                        continue
                rows = self._all(
                    "SELECT task_id, key, target_id, payload, state FROM tasks "
                    "WHERE task_id > ? ORDER BY task_id LIMIT ?",
                    above, most,
                )  # fmt: skip
                if not rows:
                    return
                ids, keys, target_ids, payloads, states = zip(*rows, strict=True)
                above = ids[-1]
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

    def _plain(
        self,
        first: int,
        last: int,
        targets: dict[int, str],
        label_of: dict[int, str],
        code_of: dict[int, str | None],
    ) -> Plain | None:
        """The tasks of these numbers if they are `Plain`.

        SQLite reads a range of a table in the order of its numbers, and joins texts in that order.
        """
        num, span = last - first + 1, (first, last)
        count, target_id, other, keys, payloads = self._all(
            "SELECT total(state = 2), min(target_id), max(target_id), hex(group_concat(key, '')), "
            "CAST(group_concat(payload, char(10)) AS BLOB) "
            "FROM tasks WHERE task_id BETWEEN ? AND ?",
            *span,
        )[0]
        if count != num or target_id != other or len(keys) != 2 * KEY_BYTES * num:
            return None
        count, token, other, has_files, values = self._all(
            "SELECT count(nullif(value, x'')), min(token), max(token), max(files), "
            "CAST(group_concat(value, char(10)) AS BLOB) "
            "FROM results WHERE task_id BETWEEN ? AND ?",
            *span,
        )[0]
        if count != num or token != other or has_files:
            return None
        (num_attempts,) = self._all(
            "SELECT count(*) FROM attempts WHERE task_id BETWEEN ? AND ?", *span
        )[0]
        attempts = self._all(
            "SELECT worker_id, seconds, peak_mib FROM attempts WHERE task_id BETWEEN ? AND ? "
            "AND token = ? AND outcome = 'ok' AND message IS NULL ORDER BY task_id",
            *span, token,
        )  # fmt: skip
        if num_attempts != num or len(attempts) != num:  # else one of each task
            return None
        worker_ids, seconds, peaks = zip(*attempts, strict=True)
        return Plain(
            task_ids=range(first, last + 1),
            target=targets[target_id],
            keys=keys,
            payloads=payloads,
            values=values,
            devices=list(map(label_of.get, worker_ids)),
            codes=list(map(code_of.get, worker_ids)),
            seconds=seconds,
            peak_mib=peaks,
        )

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
        wanted = ", ".join(known[field] for field in fields)
        # SQLite would look each task's attempts up also where nothing of them is wanted.
        of_attempts = "a." in wanted or "w." in wanted
        joins = {
            "LEFT JOIN targets g USING (target_id) ": "g." in wanted,
            "LEFT JOIN results r ON r.task_id = t.task_id ": "r." in wanted or of_attempts,
            "LEFT JOIN attempts a ON a.task_id = t.task_id AND a.token = coalesce(r.token, "
            "(SELECT max(token) FROM attempts y WHERE y.task_id = t.task_id)) ": of_attempts,
            "LEFT JOIN workers w ON w.worker_id = a.worker_id ": "w." in wanted,
        }
        tables = "".join(join for join, is_needed in joins.items() if is_needed)
        return f"SELECT {wanted} FROM tasks t {tables}{which}ORDER BY t.task_id"
