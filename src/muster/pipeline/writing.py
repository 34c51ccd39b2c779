"""Finished rows as lines of the journal: their records, and the reasons of rejected ones."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson

from muster.base.errors import TargetError
from muster.pipeline.batch import Failure, Row, Usual, failure_of
from muster.pipeline.journal import Journal
from muster.pipeline.sinks.lines import MARK, RAW, Line, Marked, as_json, as_plain, with_header
from muster.pipeline.sources.source import ArrowRow
from muster.pipeline.worker import Worker

#: If so many records at the start of a worker all fail, the stage is taken to be broken.
_BROKEN_AFTER = 100
#: A chunk of so many rows or more is not stored either, when all of them have failed.
_TOO_MANY_HELD = 20
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE

_MOST_SHOWN = 1000
_LONGEST_ID = 200
_TYPED_OPTIONS = _OPTIONS | orjson.OPT_PASSTHROUGH_DATETIME

#: What `MARK` and `RAW` begin with; a line without it has neither.
_MARK_START = b'"\\u0001'

#: A row and the lines of its records.
Written = tuple[Row, list[Line]]


class RisingIds:
    """Whether each id is greater than the one before, so that no two are the same.

    ``ends``: nothing, or the first and the last id, for as long as all are whole numbers or all
    texts, and rise. None otherwise, or where some ids are not known.
    """

    def __init__(self, ends: list[Any] | None) -> None:
        self.ends = ends

    def add(self, ids: list[Any]) -> None:
        if self.ends is None or not ids:
            return
        ends, ids = [self.ends[0] if self.ends else ids[0], ids[-1]], [*self.ends[1:], *ids]
        is_of_one_type = set(map(type, ids)) in ({int}, {str})
        is_rising = is_of_one_type and all(map(operator.lt, ids, ids[1:]))
        self.ends = ends if is_rising and all(map(_is_short, ends)) else None


def _is_short(value: int | str) -> bool:
    """Whether an id is written in the ledger as it is."""
    if isinstance(value, int):
        return value.bit_length() < 64
    return len(value) <= _LONGEST_ID and value.isascii()


class RowWriter:
    """Writes the rows of one chunk; ``row_of`` maps a row of the chunk to a row of the input."""

    def __init__(self, worker: Worker, journal: Journal, row_of: Callable[[int], int]) -> None:
        self._worker = worker
        self._journal = journal
        self._row_of = row_of
        self._held: list[Written] = []  # rejects of a worker that has not had a success yet
        plan = worker.plan
        self._gives_ids = plan.keeps_ids and "id" not in plan.source["columns"]
        #: Whether there is another id than those that we give; of rows of earlier attempts nobody
        #: has told.
        self.has_own_ids = self._gives_ids and journal.num_done > 0
        self.ids = RisingIds([] if plan.keeps_ids and not journal.num_done else None)

    def store(self, batch: list[Row], *, is_certain: bool = False) -> None:
        """Journal the rows; those of a worker without any success wait for one (see `end`), unless
        what became of them ``is_certain``.
        """
        worker = self._worker
        written = _typed(batch) if worker.plan.keeps_types else _encoded(batch)
        worker.num_rows += len(batch)
        worker.num_rejected += sum(1 for row in batch if row.failures)
        self._note_ids(batch)
        if is_certain:
            self._write(written)
            return
        if not worker.plan.keep_going and worker.num_rejected == worker.num_rows:
            self._held += written
            if worker.num_rows >= _BROKEN_AFTER:
                self._give_up()
            return
        self._store_held()
        self._write(written)

    def store_usual(self, batch: Usual) -> bool:
        """Journal rows with a record each; False, and nothing is done, where values that JSON does
        not know take more care.
        """
        dumps, option = orjson.dumps, _TYPED_OPTIONS if self._worker.plan.keeps_types else _OPTIONS
        try:
            lines = b"".join([dumps(record, None, option) for record in batch.records])
        except (TypeError, ValueError):
            return False
        if b"\\" in lines and _MARK_START in lines:  # most have none, which is seen at once
            return False
        first, count = batch.first, len(batch.records)
        self._worker.num_rows += count
        ids = [record.get("id") for record in batch.records]
        if self._gives_ids and not self.has_own_ids:
            ours = list(map(self._row_of, range(first, first + count)))
            if ids != ours or set(map(type, ids)) != {int}:
                self.has_own_ids = not all(map(self._has_our_ids, batch.rows()))
        self.ids.add(ids)
        self._store_held()
        self._journal.add(first, first + count, [lines], count)
        self._worker.num_stored += count
        return True

    def _note_ids(self, batch: list[Row]) -> None:
        if self._gives_ids and not self.has_own_ids:
            self.has_own_ids = not all(map(self._has_our_ids, batch))
        if self.ids.ends is not None:
            self.ids.add([record.get("id") for row in batch for record in row.records])

    def _has_our_ids(self, row: Row) -> bool:
        """Whether the id of every record is the row's number, or a text that begins with it."""
        if not row.records:
            return True
        own, ids = self._row_of(row.number), [record.get("id") for record in row.records]
        if len(ids) == 1 and type(ids[0]) is int:
            return ids[0] == own
        texts = {str(value) for value in ids}
        return len(texts) == len(ids) and all(text.startswith(f"{own}.") for text in texts)

    def end(self) -> None:
        """Finish the chunk: store what was held back, unless there are too many failures."""
        if len(self._held) >= _TOO_MANY_HELD:
            self._give_up()
        self._store_held()

    def _give_up(self) -> None:
        """Stop without storing the failures, so that a corrected stage does these rows again."""
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
        pieces = [piece for line in lines for piece in line]
        rejects = [
            self._reject_line(row, f) for row, _ in rows if row.failures for f in row.failures
        ]
        self._journal.add(
            rows[0][0].number,
            rows[-1][0].number + 1,
            pieces,
            len(lines),
            rejects=b"".join(rejects),
            num_rejects=len(rejects),
            num_dropped=sum(1 for row, own in rows if not own and not row.failures),
        )
        failed = [row for row, _ in rows if row.failures]
        self._worker.num_stored += len(rows)
        self._worker.num_rejects_stored += len(failed)
        self._worker.rejected_in.update(f.stage for row in failed for f in row.failures)

    def _reject_line(self, row: Row, failure: Failure) -> bytes:
        record = {
            "id": row.id,
            "row": self._row_of(row.number),
            "stage": failure.stage,
            "reason": failure.reason.encode("utf-8", "replace").decode(),
            "traceback": failure.trace.encode("utf-8", "replace").decode(),
        }
        if failure.record is not None:
            record["record"] = _kept_beside(failure.record)
        try:
            return as_json(record, str, _OPTIONS)
        except (TypeError, ValueError):  # of the id: half a character, or a key that is no text
            return as_json({**record, "id": _kept_beside(row.id)}, str, _OPTIONS)


def _kept_beside(record: Any) -> Any:
    """What the stages made, for errors.jsonl: what cannot be written is there as Python shows it,
    so that the work behind the rest is not lost.
    """
    try:
        return orjson.Fragment(json.dumps(record, default=_shown, skipkeys=True))
    except (ValueError, RecursionError):  # it holds itself
        return _shown(record)


def _shown(value: Any) -> Any:
    try:
        return as_plain(value)
    except TypeError:
        pass
    try:
        return repr(value)[:_MOST_SHOWN].encode("utf-8", "backslashreplace").decode()
    except Exception:  # the user's own class
        return f"<{type(value).__name__}>"


def _encoded(batch: list[Row], *, typed: bool = False) -> list[Written]:
    dumps, option = orjson.dumps, _TYPED_OPTIONS if typed else _OPTIONS
    try:
        written: list[Written] = [
            (row, [(dumps(r, option=option),) for r in row.records]) for row in batch
        ]
        is_usual = not any(_MARK_START in line for _, lines in written for (line,) in lines)
    except (TypeError, ValueError):
        is_usual = False
    if not is_usual:
        return [(row, _lines_of(row, row.records, typed=typed)) for row in batch]
    return written


def _typed(batch: list[Row]) -> list[Written]:
    """For an output with types: values keep theirs, and untouched columns are carried over."""
    if all(row.source is None for row in batch):
        return _encoded(batch, typed=True)
    return [written for group in _groups(batch) for written in _packed(group)]


def _groups(batch: list[Row]) -> Iterator[list[Row]]:
    """Rows that follow each other in the journal and in one batch of the input."""
    group: list[Row] = []
    source = None
    for row in batch:
        own = None if row.source is None else row.source.batch
        follows = bool(group) and group[-1].number + 1 == row.number
        if group and (
            not follows or (own is not source and own is not None and source is not None)
        ):
            yield group
            group, source = [], None
        group.append(row)
        source = source if own is None else own
    if group:
        yield group


def _packed(group: list[Row]) -> list[Written]:
    from muster.pipeline.arrow import pieces_of  # pyarrow has read these rows

    written: list[Written] = [(row, []) for row in group]
    made = [
        _Made(lines, row, row.source, record)
        for row, lines in written
        if row.source is not None
        for record in row.records
    ]
    for begin, end in pieces_of([one.source for one in made]):
        _pack(made[begin:end])
    return written


class _Made(NamedTuple):
    """A record of a row; its line goes to ``lines``, those of the row."""

    lines: list[Line]
    row: Row
    source: ArrowRow
    record: dict[str, Any]


def _pack(made: list[_Made]) -> None:
    """Write the lines of records whose columns that stay are kept together."""
    from muster.pipeline.arrow import header, untouched

    kept = untouched([one.source for one in made], [one.record for one in made])
    names = set(kept)
    good: list[_Made] = []
    for one in made:
        rest = {name: value for name, value in one.record.items() if name not in names}
        if lines := _lines_of(one.row, [rest], typed=True):
            one.lines.extend(lines)
            good.append(one)
    if good and kept:
        head, stream = header([one.source for one in good], [one.record for one in good], kept)
        first = good[0].lines
        at = len(first) - sum(1 for one in good if one.lines is first)
        first[at] = with_header(head, stream, first[at])


def _lines_of(row: Row, records: list[dict[str, Any]], *, typed: bool = False) -> list[Line]:
    """The lines of records. One that cannot be written becomes a failure of the row."""
    lines = []
    for record in records:
        try:
            lines.append(_line(record, typed=typed))
        except (TypeError, ValueError, RecursionError) as error:
            failure = failure_of("write", error)
            row.failures.append(dataclasses.replace(failure, record=record))
    return lines


def _check_names(value: Any) -> None:
    """ValueError for a key, at any depth, that reading the line again would take for ours."""
    if isinstance(value, dict):
        for name in (MARK, RAW):
            if name in value:
                raise ValueError(f"the key {name!r} has a meaning in our own files: rename it")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        _check_names(item)


def _line(record: dict[str, Any], *, typed: bool) -> Line:
    """A record as a line: integers of any size as they are, decimals as texts of all digits."""
    _check_names(record)
    marked, option = Marked(), _TYPED_OPTIONS if typed else _OPTIONS
    line = as_json(record, marked if typed else as_plain, option)
    return marked.whole(line)
