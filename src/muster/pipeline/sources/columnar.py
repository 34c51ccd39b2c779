"""Parquet, and the Arrow files of Hugging Face data sets: rows by ranges, never a whole file."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.errors import MusterError, UsageError
from muster.pipeline.sources.conditions import Condition, matches
from muster.pipeline.sources.files import fingerprint
from muster.pipeline.sources.source import (
    MAX_SHARD_BYTES,
    ArrowRow,
    Cut,
    DataFile,
    Origin,
    Row,
)

_BATCH = 1024
#: A batch of large values has fewer rows.
_BATCH_BYTES = 16 << 20


class Footer(NamedTuple):
    """What a file says of its rows. ``pieces``: rows and bytes of each row group, one after the
    other. ``metadata`` of its schema and ``lost``, sentences about what text cannot hold of it,
    are those of the first file alone.
    """

    columns: list[str]
    pieces: array[int]
    metadata: Mapping[bytes, bytes]
    lost: list[str]

    def cuts(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Pieces of at most ``rows`` rows and `MAX_SHARD_BYTES`: the number of the row group, the
        row in it, and the number of rows.
        """
        for number in range(0, len(self.pieces), 2):
            count, size = self.pieces[number : number + 2]
            per_row = size / max(count, 1)
            most = max(1, min(rows, int(MAX_SHARD_BYTES / max(per_row, 1e-9))))
            for row in range(0, count, most):
                yield number // 2, row, min(most, count - row)


def footers_of(kind: str, files: Sequence[DataFile]) -> dict[str, Footer]:
    """The footers of all files, by path; none of text. Arrow is not brought into this process,
    which may be a coordinator, and lives as long as its map.
    """
    if kind not in _READ or not files:
        return {}
    if "pyarrow" in sys.modules:
        return read_footers(kind, files)
    from muster.pipeline.apart import apart  # here, because no worker needs it

    return apart(read_footers, kind, files)


def read_footers(kind: str, files: Sequence[DataFile]) -> dict[str, Footer]:
    from muster.pipeline.arrow import lost_as_text

    found: dict[str, Footer] = {}
    for file in files:
        schema, pieces = _READ[kind](file)
        is_first = not found
        found[str(file.path)] = Footer(
            list(schema.names),
            pieces,
            dict(schema.metadata or {}) if is_first else {},
            lost_as_text(schema) if is_first else [],
        )
    return found


def _ends_of_parquet(file: DataFile) -> tuple[Any, array[int]]:
    with _parquet(file) as parquet:
        metadata, pieces = parquet.metadata, array("q")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            pieces.extend((group.num_rows, group.total_byte_size))
        return parquet.schema_arrow, pieces


def _ends_of_stream(file: DataFile) -> tuple[Any, array[int]]:
    table = _mapped(file)
    return table.schema, array("q", (table.num_rows, table.nbytes))


_READ = {"parquet": _ends_of_parquet, "arrow": _ends_of_stream}


@dataclass(frozen=True)
class Parquet:
    """``cut.place`` is a row group, ``cut.line`` a row in it.

    Row groups whose statistics rule out ``conditions`` are not read, and other columns than
    theirs only where a row of the batch matches: such rows are None.
    """

    conditions: tuple[Condition, ...] = ()
    footers: dict[str, Footer] = field(default_factory=dict, compare=False, repr=False)
    _open: dict[str, _Cursor] = field(default_factory=dict, compare=False, repr=False)

    def columns(self, file: DataFile) -> list[str]:
        return self.footer(file).columns

    def footer(self, file: DataFile) -> Footer:
        key = str(file.path)
        if key not in self.footers:
            self.footers.update(read_footers("parquet", [file]))
        return self.footers[key]

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        for group, row, count in self.footer(file).cuts(rows):
            yield Cut(count, group, row)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        stop = min(stop, cut.num_rows)
        if start < stop:
            yield from self._cursor(file, cut.place).rows(cut.line + start, cut.line + stop)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        table = self._cursor(file, cut.place).table(cut.line, cut.line + cut.num_rows)
        for begin in range(0, len(wanted), _BATCH):
            yield from _rows(table.take(wanted[begin : begin + _BATCH]))

    def _cursor(self, file: DataFile, group: int) -> _Cursor:
        """The open cursor if it is in this group, as chunks mostly come in order; or a new one."""
        key = str(file.path)
        found = self._open.get(key)
        if found is None or found.group != group:
            parquet = None if found is None else found.parquet
            if parquet is None:
                for cursor in self._open.values():
                    cursor.parquet.close()
                parquet = _parquet(file)
            self._open.clear()
            found = self._open[key] = _Cursor(parquet, file, group, self.conditions)
        return found


class _Cursor:
    """Goes forward through a row group, so that many small reads of it decode it once.

    Parquet has no way to begin in the middle of a row group; what is before is decoded and left.
    """

    def __init__(
        self,
        parquet: Any,
        file: DataFile,
        group: int,
        conditions: tuple[Condition, ...] = (),
        columns: Sequence[str] | None = None,
    ) -> None:
        self.parquet, self.group = parquet, group
        self._file, self._columns = file, columns
        about = parquet.metadata.row_group(group)
        self._size = about.num_rows
        per_row = about.total_byte_size / max(1, about.num_rows)
        self._most = max(1, min(_BATCH, int(_BATCH_BYTES / max(per_row, 1e-9))))
        self._conditions = conditions
        self._can_match = all(self._may_hold(condition) for condition in conditions)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._at = self._size  # the row at which the batch begins
        self._next = self._size  # the row behind it

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        if not self._can_match:
            yield from (None for _ in range(stop - start))
            return
        for batch in self._pieces(start, stop):
            yield from self._matching(batch, Origin(self._file.number, self.group, start))
            start += batch.num_rows

    def table(self, start: int, stop: int) -> Any:
        import pyarrow as pa

        return pa.Table.from_batches(list(self._pieces(start, stop)))

    def _pieces(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            if start < self._at or self._batch is None:
                self._batches = self.parquet.iter_batches(
                    self._most, row_groups=[self.group], columns=self._columns
                )
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

    def _matching(self, batch: Any, origin: Origin) -> Iterator[Row]:
        if self._conditions:
            names = list(dict.fromkeys(condition.column for condition in self._conditions))
            checked = list(_rows(batch.select(names)))
            if not any(matches(self._conditions, row) for row in checked):
                yield from (None for _ in checked)
                return
        yield from _rows(batch, origin)

    def _may_hold(self, condition: Condition) -> bool:
        group = self.parquet.metadata.row_group(self.group)
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

    def __init__(self, footers: dict[str, Footer] | None = None) -> None:
        self._footers = {} if footers is None else footers
        self._tables: dict[str, Any] = {}

    def columns(self, file: DataFile) -> list[str]:
        return self.footer(file).columns

    def footer(self, file: DataFile) -> Footer:
        key = str(file.path)
        if key not in self._footers:
            self._footers.update(read_footers("arrow", [file]))
        return self._footers[key]

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        for _, row, count in self.footer(file).cuts(rows):
            yield Cut(count, row, 0)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        table, stop = self._table(file), min(stop, cut.num_rows)
        for begin in range(start, stop, _BATCH):
            piece = table.slice(cut.place + begin, min(_BATCH, stop - begin))
            yield from _rows(piece)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        shard = self._table(file).slice(cut.place, cut.num_rows)
        for begin in range(0, len(wanted), _BATCH):
            yield from _rows(shard.take(wanted[begin : begin + _BATCH]))

    def _table(self, file: DataFile) -> Any:
        key = str(file.path)
        if key not in self._tables:
            self._tables[key] = _mapped(file)
        return self._tables[key]


def _mapped(file: DataFile) -> Any:
    import pyarrow as pa

    try:
        with pa.memory_map(str(file.path)) as mapped:
            return pa.ipc.open_stream(mapped).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise UsageError(f"Cannot read {file.name} as Arrow: {error}.") from None


class Again:
    """Reads columns again that a map has left in its input, of rows that mostly follow each other.

    ``files`` of the source.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = files
        self._read: dict[int, DataFile] = {}
        self._columns: dict[str, None] = {}
        self._parquet: tuple[int, Any] | None = None
        self._cursor: _Cursor | None = None
        self._at: tuple[int, int, int] | None = None

    def fields(self, held: Mapping[str, Any]) -> list[Any]:
        """The fields of `batch`; no row is read for them."""
        from muster.pipeline.arrow import field_of

        with self._blaming_the_input(held["file"]):
            schema = self._opened(held["file"]).schema_arrow
            return [
                field_of(schema, name, has_gaps=isinstance(index, list) and None in index)
                for name, index, _ in held["columns"]
            ]

    def batch(self, held: Mapping[str, Any]) -> Any:
        """The columns of which ``held``, written by `muster.pipeline.arrow.header`, tells."""
        with self._blaming_the_input(held["file"]):
            return self._batch(held)

    def _batch(self, held: Mapping[str, Any]) -> Any:
        from muster.pipeline.arrow import batch_of, whole

        names = dict.fromkeys(name for name, _, _ in held["columns"])
        self._columns |= names  # only more: a row group is begun anew once per column at most
        at = held["file"], held["group"], len(self._columns)
        if self._cursor is None or self._at != at:
            parquet, file = self._opened(held["file"]), self._files[held["file"]]
            self._cursor = _Cursor(parquet, file, held["group"], columns=list(self._columns))
            self._at = at
        begin = held["row"]
        table = self._cursor.table(begin, begin + held["num_rows"]).combine_chunks()
        (source,) = table.to_batches()
        taken = [(name, whole(index, held["length"])) for name, index, _ in held["columns"]]
        return batch_of(source, taken)

    @contextmanager
    def _blaming_the_input(self, number: int) -> Iterator[None]:
        """Raise what goes wrong inside as UsageError: what is read was whole when the run began."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            self.check_unchanged()
            if isinstance(error, MusterError):
                raise
            name = self._files[number].path if number < len(self._files) else "the input"
            raise UsageError(
                f"Cannot read the columns of {name} again that no stage has changed: {error}. No "
                "output was written.",
                hint="look whether that file is whole and the disk sound, and run the same command "
                "again; nothing finished is lost.",
            ) from error

    def _opened(self, number: int) -> Any:
        if self._parquet is None or self._parquet[0] != number:
            file = self._read[number] = self._files[number]
            self._parquet = number, _parquet(file)
        return self._parquet[1]

    def check_unchanged(self) -> None:
        """UsageError where a file that was read since the last call is not as it was when the run
        was started.
        """
        files, self._read = self._read, {}
        if self._parquet is not None:  # more may be read of it
            self._read[self._parquet[0]] = self._files[self._parquet[0]]
        for file in files.values():
            try:
                is_same = file.stamp is None or _is_as_it_was(file.path, file.stamp)
            except OSError:
                is_same = False
            if not is_same:
                raise UsageError(
                    f"{file.path} has changed since this run was started, and the columns that no "
                    "stage has changed are taken from it. No output was written.",
                    hint="put the old one back and run the same command again, or begin anew with "
                    "--restart.",
                )


def _is_as_it_was(path: Path, stamp: tuple[int, int, str]) -> bool:
    """A file that was merely touched is; OSError where it cannot be read."""
    size, mtime_ns, known = stamp
    stat = path.stat()
    if stat.st_size != size:
        return False
    return stat.st_mtime_ns == mtime_ns or fingerprint(path)["hash"] == known


def _rows(piece: Any, origin: Origin | None = None) -> Iterator[ArrowRow]:
    """Records of a batch, or of a table, that know where they come from."""
    import pyarrow as pa

    from muster.pipeline.arrow import rows_of

    if isinstance(piece, pa.RecordBatch):
        yield from rows_of(piece, origin)
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
