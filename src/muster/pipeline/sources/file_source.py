"""A source made of files of one kind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.base.errors import UsageError
from muster.pipeline.sources.columnar import ArrowStream, Parquet
from muster.pipeline.sources.conditions import Condition, matches
from muster.pipeline.sources.cut_index import CutIndex, Piece, cut_index
from muster.pipeline.sources.formats import Cut, DataFile, Format, Row
from muster.pipeline.sources.hub import first_rows
from muster.pipeline.sources.model import Selection, Shard
from muster.pipeline.sources.selecting import permutation, shards_of

DEFAULT_ROWS = 10_000
#: A small input still has work for many workers, in shards that are worth a batch or several.
DEFAULT_SHARDS = 64
LEAST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Made by ``table.open_input``. Without ``folder``, ``shards`` looks for its cuts each time."""

    description: Mapping[str, Any]
    format: Format
    selection: Selection
    conditions: tuple[Condition, ...] = ()
    folder: Path | None = None

    def describe(self) -> Mapping[str, Any]:
        """JSON: kind, columns, selection, and of each file path, size, time and sampled hash."""
        return self.description

    def metadata(self) -> dict[bytes, bytes]:
        """What the schema of its first file carries beside the columns; none for text files."""
        schema = self._schema
        return {} if schema is None else dict(schema.metadata or {})

    def lost_as_text(self) -> list[str]:
        """Sentences about what JSON lines and CSV cannot hold of it."""
        if self._schema is None:
            return []
        from muster.pipeline.sources.arrow_rows import lost_as_text

        return lost_as_text(self._schema)

    @property
    def _schema(self) -> Any:
        if isinstance(self.format, Parquet | ArrowStream) and self._files:
            return self.format.schema(self._files[0])
        return None

    def shards(self, rows_per_shard: int | None) -> Iterator[Shard]:
        """Pieces of ``rows_per_shard`` rows, or of a 64th of the selected rows, from 256 to 10,000;
        of 32 MiB at most. The first call scans the input, up to the last row of ``limit``.
        """
        if self.folder is not None:
            yield from shards_of(self._index(self.folder, rows_per_shard), self.selection)
            return
        with tempfile.TemporaryDirectory() as folder:
            yield from shards_of(self._index(Path(folder), rows_per_shard), self.selection)

    def read(self, shard: Shard, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        """As ``Source.read``; streams, from the shard's place on."""
        place, line, count, begin = shard.place
        cut, file = Cut(count, place, line), self._files[shard.file]
        stop = min(stop, shard.count)
        rows: Iterator[Row]
        if self.selection.shuffle_seed is None:
            rows = self.format.rows(file, cut, begin + start, begin + stop)
        else:
            order = permutation(count, self.selection.shuffle_seed, shard.first - begin)
            rows = self.format.pick(file, cut, order[begin + start : begin + stop])
        if not self.conditions:
            return enumerate(rows, start)
        return self._matching(enumerate(rows, start))

    def row_of(self, shard: Shard) -> Callable[[int], int]:
        """From a row of the shard to the row of the input that it is, both from 0."""
        _, _, count, begin = shard.place
        if self.selection.shuffle_seed is None:
            return lambda number: shard.first + number
        order = permutation(count, self.selection.shuffle_seed, shard.first - begin)
        return lambda number: shard.first - begin + order[begin + number]

    def _matching(self, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        for number, row in rows:
            is_other = isinstance(row, dict) and not matches(self.conditions, row)
            yield number, None if is_other else row

    @cached_property
    def _files(self) -> list[DataFile]:
        return [
            DataFile(Path(file.get("unpacked", file["path"])), Path(file["path"]).name)
            for file in self.description["files"]
        ]

    def _index(self, folder: Path, rows_per_shard: int | None) -> CutIndex:
        if rows_per_shard is not None and rows_per_shard < 1:
            raise UsageError(f"A chunk of {rows_per_shard} rows holds nothing.")
        selection = self.selection
        index = self._cut(folder, rows_per_shard or DEFAULT_ROWS)
        if not index.num_rows and first_rows(selection) != 0:
            names = ", ".join(file.name for file in self._files[:3])
            raise UsageError(f"There are no rows in {names}.")
        if rows_per_shard is not None:
            return index
        num_rows = index.num_rows
        if selection.shuffle_seed is None:  # else one order, whatever is taken of it
            num_rows = max(0, num_rows - selection.skip)
            if selection.limit is not None:
                num_rows = min(num_rows, selection.limit)
        num_shards = min(DEFAULT_SHARDS, max(1, num_rows // LEAST_ROWS))
        rows = max(1, -(-num_rows // num_shards))
        return index if rows >= DEFAULT_ROWS else self._cut(folder, rows)

    def _cut(self, folder: Path, rows: int) -> CutIndex:
        most = first_rows(self.selection)
        files = [
            [file["size"], file["mtime_ns"], file["hash"]] for file in self.description["files"]
        ]
        reading = [self.description[n] for n in ("delimiter", "encoding") if n in self.description]
        key = json.dumps([self.description["kind"], files, rows, most, *reading])
        return cut_index(folder, key, self._pieces(rows, most))

    def _pieces(self, rows: int, most: int | None) -> Iterator[Piece]:
        first = 0
        for number, file in enumerate(self._files):
            if not file.path.stat().st_size:
                continue
            for cut in self.format.cuts(file, rows):
                if most is not None and first >= most:
                    return
                yield Piece(number, first, cut)
                first += cut.num_rows
