"""Rows that are done, as lines of the journal: records, and why others were rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

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

#: A row and the lines of its records.
Written = tuple[Row, list[bytes]]


class RowWriter:
    """Of one chunk; ``row_of`` leads from its rows to those of the input."""

    def __init__(self, worker: Worker, journal: Journal, row_of: Callable[[int], int]) -> None:
        self._worker = worker
        self._journal = journal
        self._row_of = row_of
        self._held: list[Written] = []  # rejects of a worker that has not had a success yet

    def store(self, batch: list[Row]) -> None:
        """Journal the rows; those of a worker without any success wait for one (see `end`)."""
        worker = self._worker
        written = _encoded(batch)
        worker.num_rows += len(batch)
        worker.num_rejected += sum(1 for row in batch if row.failures)
        if not worker.plan.keep_going and worker.num_rejected == worker.num_rows:
            self._held += written
            if worker.num_rows >= _BROKEN_AFTER:
                self._give_up()
            return
        self._store_held()
        self._write(written)

    def end(self) -> None:
        """The chunk is over: what was held back is stored now, unless it is too much of it."""
        if len(self._held) >= _TOO_MANY_HELD:
            self._give_up()
        self._store_held()

    def _give_up(self) -> None:
        """Nothing has been stored: once the cause is put right, these rows are done again."""
        failure = self._held[-1][0].failures[-1]
        self._held = []
        raise TargetError(
            f"All records so far have failed, the last in {failure.stage}: {failure.reason}",
            hint="correct the stage or its settings; --keep-going rejects such records instead.",
        )

    def _store_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._write(sorted(held, key=lambda written: written[0].number))

    def _write(self, rows: list[Written]) -> None:
        """One entry per gapless range of rows, which are in ascending order."""
        begin = 0
        if rows[-1][0].number - rows[0][0].number != len(rows) - 1:
            for position in range(1, len(rows)):
                if rows[position][0].number != rows[position - 1][0].number + 1:
                    self._write_range(rows[begin:position])
                    begin = position
        self._write_range(rows[begin:])

    def _write_range(self, rows: list[Written]) -> None:
        lines = [line for _, own in rows for line in own]
        rejects = [
            self._reject_line(row, f) for row, _ in rows if row.failures for f in row.failures
        ]
        self._journal.add(
            rows[0][0].number,
            rows[-1][0].number + 1,
            b"".join(lines),
            len(lines),
            rejects=b"".join(rejects),
            num_rejects=len(rejects),
            num_dropped=sum(1 for row, own in rows if not own and not row.failures),
        )

    def _reject_line(self, row: Row, failure: Failure) -> bytes:
        record = {
            "id": row.id,
            "row": self._row_of(row.number),
            "stage": failure.stage,
            "reason": failure.reason.encode("utf-8", "replace").decode(),
            "traceback": failure.trace.encode("utf-8", "replace").decode(),
        }
        return orjson.dumps(record, default=str, option=_OPTIONS)


def _encoded(batch: list[Row]) -> list[Written]:
    dumps = orjson.dumps
    try:
        return [(row, [dumps(r, option=_OPTIONS) for r in row.records]) for row in batch]
    except (TypeError, ValueError):
        return [(row, _lines_of(row)) for row in batch]


def _lines_of(row: Row) -> list[bytes]:
    """One by one; what cannot be written becomes a failure of the row."""
    lines = []
    for record in row.records:
        try:
            lines.append(_line(record))
        except (TypeError, ValueError, RecursionError) as error:
            row.failures.append(failure_of("write", error))
    return lines


def _line(record: dict[str, Any]) -> bytes:
    """Integers of any size as they are, decimals as texts, which keep all of their digits."""
    try:
        return orjson.dumps(record, default=_plain, option=_OPTIONS)
    except TypeError as error:
        if not any(isinstance(value, int) and value.bit_length() > 63 for value in record.values()):
            raise error.__cause__ or error from None
        text = json.dumps(record, default=_plain, ensure_ascii=False, separators=(",", ":"))
        return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}: make it a text or a number in the stage")
