"""Rows that are done, as lines of the journal: records, and why others were rejected."""

from __future__ import annotations

import orjson

from muster.base.errors import TargetError
from muster.pipeline.batch import Failure, Row, failure_of
from muster.pipeline.journal import Journal
from muster.pipeline.worker import Worker

#: So many records at the start of a worker that all fail say that the stage is broken.
_BROKEN_AFTER = 100
#: A chunk of so many is not stored either, when nothing but failures is in it.
_TOO_MANY_HELD = 20
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class RowWriter:
    """Of one chunk, whose row 0 is row ``first`` of the input."""

    def __init__(self, worker: Worker, journal: Journal, first: int) -> None:
        self._worker = worker
        self._journal = journal
        self._first = first
        self._held: list[Row] = []  # rejects of a worker that has not had a success yet

    def store(self, batch: list[Row]) -> None:
        """Journal the rows; those of a worker without any success wait for one (see below)."""
        worker = self._worker
        worker.num_rows += len(batch)
        worker.num_rejected += sum(1 for row in batch if row.failures)
        if not worker.plan.keep_going and worker.num_rejected == worker.num_rows:
            self._held += batch
            if worker.num_rows >= _BROKEN_AFTER:
                self._give_up()
            return
        self._store_held()
        self._write(batch)

    def _give_up(self) -> None:
        """Nothing has been stored: once the cause is put right, these rows are done again."""
        failure = self._held[-1].failures[-1]
        self._held = []
        raise TargetError(
            f"All records so far have failed, the last in {failure.stage}: {failure.reason}",
            hint="correct the stage or its settings; --keep-going rejects such records instead.",
        )

    def end(self) -> None:
        """The chunk is over: what was held back is stored now, unless it is too much of it."""
        if len(self._held) >= _TOO_MANY_HELD:
            self._give_up()
        self._store_held()

    def _store_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._write(held)

    def _write(self, rows: list[Row]) -> None:
        """One entry per gapless range of rows."""
        if rows[-1].number - rows[0].number == len(rows) - 1:
            self._write_range(rows)
            return
        begin = 0
        for position in range(1, len(rows) + 1):
            is_end = position == len(rows)
            if is_end or rows[position].number != rows[position - 1].number + 1:
                self._write_range(rows[begin:position])
                begin = position

    def _write_range(self, rows: list[Row]) -> None:
        try:
            lines = [
                orjson.dumps(record, option=_OPTIONS) for row in rows for record in row.records
            ]
        except (TypeError, ValueError):
            lines = [line for row in rows for line in self._lines_of(row)]
        rejects = [self._reject_line(row, f) for row in rows if row.failures for f in row.failures]
        self._worker.num_records += len(lines)
        self._journal.add(
            rows[0].number,
            rows[-1].number + 1,
            b"".join(lines),
            len(lines),
            rejects=b"".join(rejects),
            num_rejects=len(rejects),
            num_dropped=sum(1 for row in rows if not row.records and not row.failures),
        )

    def _lines_of(self, row: Row) -> list[bytes]:
        """What cannot be written becomes a failure of the row."""
        lines, kept = [], []
        for record in row.records:
            try:
                lines.append(orjson.dumps(record, option=_OPTIONS))
                kept.append(record)
            except (TypeError, ValueError) as error:
                row.failures.append(failure_of("write", error))
        row.records = kept
        return lines

    def _reject_line(self, row: Row, failure: Failure) -> bytes:
        record = {
            "id": row.id,
            "row": self._first + row.number,
            "stage": failure.stage,
            "reason": failure.reason.encode("utf-8", "replace").decode(),
            "traceback": failure.trace.encode("utf-8", "replace").decode(),
        }
        return orjson.dumps(record, default=str, option=_OPTIONS)
