"""Parquet, and the Arrow files of Hugging Face data sets: rows by ranges, never a whole file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.base.errors import UsageError
from muster.pipeline.sources.conditions import Condition, matches
from muster.pipeline.sources.source import MAX_SHARD_BYTES, ArrowRow, Cut, DataFile, Row

_BATCH = 1024


@dataclass(frozen=True)
class Parquet:
    """``cut.place`` is a row group, ``cut.line`` a row in it.

    Row groups whose statistics rule out ``conditions`` are not read, and other columns than
    theirs only where a row of the batch matches: such rows are None.
    """

    conditions: tuple[Condition, ...] = ()
    _open: dict[str, _Cursor] = field(default_factory=dict, compare=False, repr=False)

    def columns(self, file: DataFile) -> list[str]:
        return list(_parquet(file).schema_arrow.names)

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        with _parquet(file) as parquet:
            metadata = parquet.metadata
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                if group.num_rows:
                    per_row = group.total_byte_size / group.num_rows
                    most = max(1, min(rows, int(MAX_SHARD_BYTES / max(per_row, 1e-9))))
                    for row in range(0, group.num_rows, most):
                        yield Cut(min(most, group.num_rows - row), number, row)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        stop = min(stop, cut.num_rows)
        if start < stop:
            yield from self._cursor(file, cut.place).rows(cut.line + start, cut.line + stop)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        table = self._cursor(file, cut.place).table(cut.line, cut.line + cut.num_rows)
        for begin in range(0, len(wanted), _BATCH):
            yield from _rows(table.take(wanted[begin : begin + _BATCH]))

    def schema(self, file: DataFile) -> Any:
        with _parquet(file) as parquet:
            return parquet.schema_arrow

    def _cursor(self, file: DataFile, group: int) -> _Cursor:
        """The open cursor if it is in this group, as chunks mostly come in order; or a new one."""
        key = str(file.path)
        found = self._open.get(key)
        if found is None or found.group != group:
            for cursor in self._open.values():
                cursor.close()
            self._open.clear()
            found = self._open[key] = _Cursor(file, group, self.conditions)
        return found


class _Cursor:
    """Goes forward through a row group, so that many small reads of it decode it once.

    Parquet has no way to begin in the middle of a row group; what is before is decoded and left.
    """

    def __init__(self, file: DataFile, group: int, conditions: tuple[Condition, ...]) -> None:
        self.group = group
        self._file = _parquet(file)
        self._size = self._file.metadata.row_group(group).num_rows
        self._conditions = conditions
        self._can_match = all(self._may_hold(condition) for condition in conditions)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._at = self._size  # the row at which the batch begins
        self._next = self._size  # the row behind it

    def close(self) -> None:
        self._file.close()

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        if not self._can_match:
            yield from (None for _ in range(stop - start))
            return
        for batch in self._pieces(start, stop):
            yield from self._matching(batch)

    def table(self, start: int, stop: int) -> Any:
        import pyarrow as pa

        return pa.Table.from_batches(list(self._pieces(start, stop)))

    def _pieces(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            if start < self._at or self._batch is None:
                self._batches = self._file.iter_batches(_BATCH, row_groups=[self.group])
                self._batch = next(self._batches)
                self._at, self._next = 0, self._batch.num_rows
            while self._next <= start:
                self._at = self._next
                self._batch = next(self._batches)
                self._next += self._batch.num_rows
            size = min(stop, self._next) - start
            piece = self._batch.slice(start - self._at, size)
            start += size
            yield piece

    def _matching(self, batch: Any) -> Iterator[Row]:
        if self._conditions:
            names = list(dict.fromkeys(condition.column for condition in self._conditions))
            checked = list(_rows(batch.select(names)))
            if not any(matches(self._conditions, row) for row in checked):
                yield from (None for _ in checked)
                return
        yield from _rows(batch)

    def _may_hold(self, condition: Condition) -> bool:
        group = self._file.metadata.row_group(self.group)
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema == condition.column:
                found = column.statistics
                if found is None or not found.has_min_max:
                    return True
                return condition.may_hold(found.min, found.max)
        return True


class ArrowStream:
    """Memory-mapped: a row range costs no more than its rows. ``cut.place`` is a row."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}

    def columns(self, file: DataFile) -> list[str]:
        return list(self._table(file).column_names)

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        table = self._table(file)
        per_row = table.nbytes / max(table.num_rows, 1)
        most = max(1, min(rows, int(MAX_SHARD_BYTES / max(per_row, 1e-9))))
        for row in range(0, table.num_rows, most):
            yield Cut(min(most, table.num_rows - row), row, 0)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        table, stop = self._table(file), min(stop, cut.num_rows)
        for begin in range(start, stop, _BATCH):
            piece = table.slice(cut.place + begin, min(_BATCH, stop - begin))
            yield from _rows(piece)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        shard = self._table(file).slice(cut.place, cut.num_rows)
        for begin in range(0, len(wanted), _BATCH):
            yield from _rows(shard.take(wanted[begin : begin + _BATCH]))

    def schema(self, file: DataFile) -> Any:
        return self._table(file).schema

    def _table(self, file: DataFile) -> Any:
        import pyarrow as pa

        key = str(file.path)
        if key not in self._tables:
            try:
                with pa.memory_map(key) as mapped:
                    self._tables[key] = pa.ipc.open_stream(mapped).read_all()
            except (OSError, pa.ArrowInvalid) as error:
                raise UsageError(f"Cannot read {file.name} as Arrow: {error}.") from None
        return self._tables[key]


def _rows(piece: Any) -> Iterator[ArrowRow]:
    """Records of a batch, or of a table, that know where they come from."""
    import pyarrow as pa

    from muster.pipeline.arrow import rows_of

    if isinstance(piece, pa.RecordBatch):
        yield from rows_of(piece)
        return
    for batch in piece.combine_chunks().to_batches():
        yield from rows_of(batch)


def _parquet(file: DataFile) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file.path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UsageError(f"Cannot read {file.name} as Parquet: {error}.") from None
