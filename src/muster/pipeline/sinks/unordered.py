"""An output that grows as parts are finished, and survives any kind of end."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from muster.base.atomic_files import replacing, sync_folder
from muster.base.errors import SetupError, UsageError
from muster.pipeline.sinks.formats import (
    MAX_CELL_CHARS,
    SinkSpec,
    as_csv,
    columns_of,
    csv_blocks,
    prepare_place,
)
from muster.pipeline.sinks.merge import Merged, explained, merge_errors, sweep
from muster.pipeline.sinks.parts import Part, blocks, by_shard, records


@dataclass(frozen=True)
class _Entry:
    """A part that is in the output whole; its bytes are those before ``end``."""

    order: int
    start: int
    stop: int
    sha256: str
    end: int
    columns: list[str]


class Appender:
    """Appends finished parts to ``NAME.partial``; `finish` gives it its name.

    Guarantees: after kill -9 at any moment a new Appender has every part for which `add` returned,
    once, and nothing else. Not guaranteed: two Appenders of one output at a time. The parts' files
    must stay until `finish` has returned.

    ``NAME.partial.journal`` says where each part ends; what is behind the last end is cut off.
    """

    def __init__(self, spec: SinkSpec) -> None:
        check_growable(spec)
        prepare_place(spec)
        self._spec = spec
        self.partial, self.journal = places(spec.path)
        self._entries: dict[tuple[int, int, int], _Entry] = {}
        with explained(self.partial):
            # Plain descriptors: a buffer would try a write that failed again when it is closed.
            self._data = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666)
            self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)
            self._recover()

    def has(self, part: Part) -> bool:
        """SetupError when those rows are there with other contents, from another run."""
        entry = self._entries.get((part.order, part.start, part.stop))
        if entry is not None and entry.sha256 != part.sha256:
            raise self._foreign()
        return entry is not None

    def add(self, part: Part) -> None:
        """Append a part unless it is there; it is on the disk when this returns."""
        if self.has(part):
            return
        with explained(self.partial):
            columns = self._columns_with(part)
            try:
                for block in self._encoded(part, columns):
                    write_all(self._data, block)
                os.fsync(self._data)
            except BaseException:
                self._cut(self._end)
                raise
            end = os.lseek(self._data, 0, os.SEEK_CUR)
            self._note(_Entry(part.order, part.start, part.stop, part.sha256, end, columns))

    def finish(self, parts: Sequence[Part], *, errors: Path) -> Merged:
        """Rename the output, which must hold exactly ``parts``, and write their errors."""
        by_shard(parts)
        missing = [part for part in parts if not self.has(part)]
        if missing:
            part = missing[0]
            raise SetupError(
                f"{len(missing)} finished parts are not in {self.partial}, first rows "
                f"{part.start} to {part.stop} of shard {part.order}. No output was written.",
                hint="run the same command again.",
            )
        if len(self._entries) > len(parts):
            raise self._foreign()
        path = self._spec.path
        with explained(path):
            merge_errors(parts, errors)
            if self._spec.format == "csv" and self._first_columns != self._columns:
                self._rewrite_csv(path)
                self.partial.unlink()
            else:
                os.replace(self.partial, path)
            sync_folder(path.parent)
            # Last: without its data file a journal counts for nothing.
            self.journal.unlink()
        self.close()
        return Merged(
            num_rows=sum(part.num_rows for part in parts),
            num_errors=sum(part.num_errors for part in parts),
            num_bytes=path.stat().st_size,
        )

    def in_order(self, parts: Sequence[Part]) -> list[Part]:
        """The parts as they stand in the output."""
        places = {key: place for place, key in enumerate(self._entries)}
        return sorted(parts, key=lambda part: places[part.order, part.start, part.stop])

    def close(self) -> None:
        for handle in (self._data, self._log):
            if handle >= 0:
                os.close(handle)
        self._data = self._log = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ contents

    @property
    def _end(self) -> int:
        return next(reversed(self._entries.values())).end if self._entries else 0

    @property
    def _columns(self) -> list[str]:
        return next(reversed(self._entries.values())).columns if self._entries else []

    @property
    def _first_columns(self) -> list[str]:
        return next(iter(self._entries.values())).columns if self._entries else []

    def _columns_with(self, part: Part) -> list[str]:
        """Known columns and behind them the new ones of ``part``: rows only ever get longer."""
        if self._spec.format != "csv":
            return []
        return list(dict.fromkeys((*self._columns, *columns_of([part]))))

    def _encoded(self, part: Part, columns: list[str]) -> Iterator[bytes | memoryview]:
        if self._spec.format == "jsonl":
            yield from blocks(part)
            return
        if not self._entries:
            yield as_csv([columns])
        yield from csv_blocks(records(part), columns)

    def _rewrite_csv(self, path: Path) -> None:
        """All rows as long as the last ones."""
        csv.field_size_limit(MAX_CELL_CHARS)
        sweep(path)
        width = len(self._columns)
        with (
            self.partial.open(newline="", encoding="utf-8") as old,
            replacing(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as new,
        ):
            rows = csv.reader(old)
            next(rows)
            writer = csv.writer(new)
            writer.writerow(self._columns)
            writer.writerows([*row, *[""] * (width - len(row))] for row in rows)

    # ------------------------------------------------------------------ the journal

    def _note(self, entry: _Entry) -> None:
        grown = entry.columns if entry.columns != self._columns else None
        line = [entry.order, entry.start, entry.stop, entry.sha256, entry.end, grown]
        here = os.lseek(self._log, 0, os.SEEK_CUR)
        try:
            write_all(self._log, json.dumps(line).encode() + b"\n")
            os.fsync(self._log)
        except BaseException:
            os.ftruncate(self._log, here)
            os.lseek(self._log, here, os.SEEK_SET)
            self._cut(self._end)
            raise
        self._entries[entry.order, entry.start, entry.stop] = entry

    def _recover(self) -> None:
        """Keep the entries that were written whole and whose bytes are there; cut off the rest."""
        size, kept = os.fstat(self._data).st_size, 0
        with self.journal.open("rb") as log:
            for line in log:
                entry = _entry_of(line, self._columns)
                if entry is None or entry.end > size:
                    break
                self._entries[entry.order, entry.start, entry.stop] = entry
                kept += len(line)
        os.ftruncate(self._log, kept)
        os.lseek(self._log, kept, os.SEEK_SET)
        self._cut(self._end)
        sync_folder(self.partial.parent)

    def _cut(self, end: int) -> None:
        os.ftruncate(self._data, end)
        os.lseek(self._data, end, os.SEEK_SET)

    def _foreign(self) -> SetupError:
        return SetupError(
            f"{self.partial} holds records of another run.",
            hint=f"remove it and {self.journal}, and run the same command again.",
        )


def check_growable(spec: SinkSpec) -> None:
    """UsageError for an output that cannot grow."""
    if spec.is_folder or spec.format == "parquet":
        what = "A folder of parts" if spec.is_folder else "A Parquet file"
        raise UsageError(
            f"{what} cannot grow as chunks become ready.",
            hint="leave --unordered out, or write a .jsonl or .csv file."
            if spec.is_folder
            else "leave --unordered out, or write a folder of parts: --output NAME/ "
            "--format parquet.",
        )


def places(path: Path) -> tuple[Path, Path]:
    """The growing file of an output and its journal."""
    return path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.partial.journal")


def discard(spec: SinkSpec) -> None:
    """Remove what an unfinished Appender has left; nothing when there is nothing."""
    for path in places(spec.path):
        path.unlink(missing_ok=True)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of it: the system may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _entry_of(line: bytes, columns: list[str]) -> _Entry | None:
    """None for a line that was not written whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        order, start, stop, sha256, end, grown = json.loads(line)
    except ValueError:
        return None
    return _Entry(order, start, stop, sha256, end, columns if grown is None else grown)
