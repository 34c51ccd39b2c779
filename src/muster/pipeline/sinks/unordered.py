"""An output that grows as parts are finished, and survives any kind of end."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from muster.base.atomic_files import replacing, sweep, sync_folder, write_all
from muster.base.errors import SetupError, UsageError
from muster.pipeline.sinks.formats import (
    MAX_CELL_CHARS,
    SinkSpec,
    TextEncoder,
    columns_of,
    prepare_place,
)
from muster.pipeline.sinks.merge import Merged, explained, merge_errors
from muster.pipeline.sinks.parts import Part, by_shard


class Appender:
    """Appends finished parts to ``NAME.partial``, which `finish` renames to ``NAME``.

    Guarantees: after kill -9 at any moment a new Appender has every part for which `add` returned,
    once, and nothing else. Not guaranteed: two Appenders of one output at a time. The parts' files
    must stay until `finish` has returned.

    ``NAME.partial.journal`` has a line for each part: which one, where it ends, and the columns of
    CSV where there are more of them now. What is behind the last end is cut off.
    """

    def __init__(self, spec: SinkSpec) -> None:
        check_growable(spec)
        prepare_place(spec)
        self._spec = spec
        self.partial, self.journal = places(spec.path)
        self._sha256: dict[tuple[int, ...], str] = {}  # of the parts that are in it whole
        self._columns: list[str] = []
        self._header: list[str] = []  # the columns that were known at the first part
        self._ends = 0, 0  # of the output and of the journal
        with explained(self.partial):
            # Plain descriptors: a buffer would try a write that failed again when it is closed.
            self._data = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666)
            self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)
            self._recover()

    def has(self, part: Part) -> bool:
        """Whether a part is in it. Raises SetupError where its rows are of another run."""
        if self._sha256.get(part[:3], part.sha256) != part.sha256:
            raise self._foreign()
        return part[:3] in self._sha256

    def add(self, part: Part) -> None:
        """Append a part unless it is there; it is on the disk when this returns."""
        if self.has(part):
            return
        with explained(self.partial):
            columns = None
            if self._spec.format == "csv":  # new ones come last: rows only ever get longer
                columns = list(dict.fromkeys((*self._columns, *columns_of([part]))))
            encoder = TextEncoder(columns)
            try:
                if not self._sha256:
                    write_all(self._data, encoder.head)
                for block in encoder.encoded(part):
                    write_all(self._data, block)
                os.fsync(self._data)
                end = os.lseek(self._data, 0, os.SEEK_CUR)
                grown = columns if columns != self._columns else None
                line = json.dumps([*part[:3], part.sha256, end, grown]).encode() + b"\n"
                write_all(self._log, line)
                os.fsync(self._log)
            except BaseException:
                self._cut()
                raise
        self._take(line)

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
        if len(self._sha256) > len(parts):
            raise self._foreign()
        path = self._spec.path
        with explained(path):
            merge_errors(parts, errors)
            if self._header != self._columns:
                self._rewrite_csv(path)
                self.partial.unlink()
            else:
                os.replace(self.partial, path)
            sync_folder(path.parent)
            # Last: without its data file a journal counts for nothing.
            self.journal.unlink()
        self.close()
        return Merged.of(parts, path.stat().st_size)

    def in_order(self, parts: Sequence[Part]) -> list[Part]:
        """The parts as they stand in the output."""
        places = {key: place for place, key in enumerate(self._sha256)}
        return sorted(parts, key=lambda part: places[part[:3]])

    def close(self) -> None:
        for handle in (self._data, self._log):
            if handle >= 0:
                os.close(handle)
        self._data = self._log = -1

    # ------------------------------------------------------------------ contents

    def _rewrite_csv(self, path: Path) -> None:
        """Make all rows as long as the last ones."""
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

    def _recover(self) -> None:
        """Keep the parts that were noted whole and whose bytes are there; cut off the rest."""
        size = os.fstat(self._data).st_size
        with self.journal.open("rb") as log:
            for line in log:
                if not line.endswith(b"\n") or not self._take(line, size):
                    break
        self._cut()
        sync_folder(self.partial.parent)

    def _take(self, line: bytes, size: float = math.inf) -> bool:
        """Count the part of a line of the journal. False for a torn line, and where the output
        ends at ``size``, before that part does.
        """
        try:
            order, start, stop, sha256, end, grown = json.loads(line)
        except ValueError:
            return False
        if end > size:
            return False
        if grown is not None:
            self._columns = grown
        if not self._sha256:
            self._header = self._columns
        self._sha256[order, start, stop] = sha256
        self._ends = end, self._ends[1] + len(line)
        return True

    def _cut(self) -> None:
        for handle, end in zip((self._data, self._log), self._ends, strict=True):
            os.ftruncate(handle, end)
            os.lseek(handle, end, os.SEEK_SET)

    def _foreign(self) -> SetupError:
        return SetupError(
            f"{self.partial} holds records of another run.",
            hint=f"remove it and {self.journal}, and run the same command again.",
        )


def check_growable(spec: SinkSpec) -> None:
    """UsageError for an output that cannot grow."""
    if spec.is_folder or spec.format == "parquet":
        what, other = "A Parquet file", "a folder of parts: --output NAME/ --format parquet"
        if spec.is_folder:
            what, other = "A folder of parts", "a .jsonl or .csv file"
        raise UsageError(
            f"{what} cannot grow as chunks become ready.",
            hint=f"leave --unordered out, or write {other}.",
        )


def places(path: Path) -> tuple[Path, Path]:
    """The growing file of an output and its journal."""
    return path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.partial.journal")


def discard(spec: SinkSpec) -> None:
    """Remove what an unfinished Appender has left; nothing when there is nothing."""
    for path in places(spec.path):
        path.unlink(missing_ok=True)
