"""Where rows go: a CSV, JSON Lines or Parquet file, safe against kill -9 at any moment.

Guarantees: what a sample wrote stays; a file holds whole rows and at most a torn piece of the last
one, which the next start removes; there is one header; two writers of one file are refused.
Not guaranteed: that the last samples survive a power cut, because nothing waits for the disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from muster.base.atomic_files import replacing, write_all
from muster.base.errors import SetupError, UsageError
from muster.monitor.files import (
    FOLDED,
    check_suffix,
    csv_header,
    folded_number,
    read_jsonl,
    tail_file,
    tail_files,
    to_csv,
    to_jsonl,
    to_jsonl_start,
)
from muster.monitor.sample import COLUMNS, Row

if sys.platform != "win32":
    import fcntl

#: Windows would make two bytes of each line break.
_BINARY = getattr(os, "O_BINARY", 0)
#: Samples after which those in the tail go into the Parquet file: a minute at 5 s.
_FOLD_AFTER = 12
#: A long file is rewritten less often, so that this stays a small share of the work.
_ROWS_PER_SAMPLE_WAITED = 10_000


class Sink(Protocol):
    def write(self, rows: Sequence[Row]) -> None:
        """Append the rows of one sample; raises OSError and leaves the file as it was."""

    def close(self) -> None: ...


def open_sink(path: Path) -> Sink:
    """The file at ``path``, new or continued.

    Raises UsageError for an unknown format or a file that holds something else, SetupError when
    another process writes it, OSError when it cannot be opened.
    """
    form = check_suffix(path, "--output")
    if form == ".csv":
        return LineSink(path, to_csv, header=csv_header())
    if form == ".jsonl":
        return LineSink(path, to_jsonl, first=to_jsonl_start())
    return ParquetSink(path)


class LineSink:
    """One line per row, each sample in one write at the end of the file.

    ``header``: the first line; ``first``: what the file begins with where it has no header.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Sequence[Row]], bytes],
        *,
        header: bytes = b"",
        first: bytes = b"",
    ) -> None:
        self._encode = encode
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
        try:
            _hold(self._file, path)
            _refuse_other(self._file, path, header or first)
            cut_torn_line(self._file)
            if header and os.fstat(self._file).st_size == 0:
                self._append(header)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, rows: Sequence[Row]) -> None:
        self._append(self._encode(rows))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            write_all(self._file, data)
        except OSError:  # a full disk has taken a part of it
            os.ftruncate(self._file, size)
            raise


class ParquetSink:
    """A Parquet file cannot be appended to, so new rows wait in a tail beside it.

    The tail (JSON Lines) goes into the file when it is long enough, at the end and at the next
    start. Tails are numbered and the file says which are in it: a kill between replacing the file
    and removing a tail loses nothing and doubles nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _hold(self._lock, path)
            self._number, self._num_rows = self._recover()
        except BaseException:
            os.close(self._lock)
            raise
        self._num_waiting = 0
        self._tail = self._open_tail()

    def write(self, rows: Sequence[Row]) -> None:
        self._tail.write(rows)
        self._num_waiting += 1
        if self._num_waiting >= max(_FOLD_AFTER, self._num_rows // _ROWS_PER_SAMPLE_WAITED):
            self._fold()
            self._tail = self._open_tail()

    def close(self) -> None:
        try:
            self._fold()
            self._path.with_name(f".{self._path.name}.lock").unlink(missing_ok=True)
        finally:
            self._tail.close()
            os.close(self._lock)

    def _open_tail(self) -> LineSink:
        return LineSink(tail_file(self._path, self._number), to_jsonl)

    def _fold(self) -> None:
        tail = tail_file(self._path, self._number)
        self._num_rows = write_parquet(self._path, read_jsonl(tail), self._number)
        self._tail.close()  # only now: where the disk was full, the tail is still written to
        tail.unlink()
        self._number += 1
        self._num_waiting = 0

    def _recover(self) -> tuple[int, int]:
        """Add what a killed monitor left; returns the next tail's number and the count of rows."""
        folded, num_rows = _state(self._path)
        for number, tail in tail_files(self._path).items():
            if number > folded:
                num_rows = write_parquet(self._path, read_jsonl(tail), number)
                folded = number
            tail.unlink()
        return folded + 1, num_rows


def write_parquet(path: Path, new: Sequence[Row], number: int) -> int:
    """Replace ``path`` by itself with ``new`` appended; returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    table = pa.Table.from_pylist([row.values() for row in new], schema=schema)
    if path.exists():
        table = pa.concat_tables([pq.read_table(path).cast(schema), table])
    table = table.replace_schema_metadata({FOLDED: str(number).encode()})
    with replacing(path) as beside:
        pq.write_table(table, beside, compression="zstd")
    return int(table.num_rows)


def cut_torn_line(descriptor: int) -> None:
    """Remove what follows the last line break: a kill or a full disk has torn that line."""
    size = os.fstat(descriptor).st_size
    position = size
    while position > 0:
        start = max(0, position - 4096)
        block = _read_at(descriptor, start, position - start)
        end = block.rfind(b"\n")
        if end >= 0:
            position = start + end + 1
            break
        position = start
    if position < size:
        os.ftruncate(descriptor, position)


def _read_at(descriptor: int, start: int, size: int) -> bytes:
    """Read bytes. It moves the position, which does no harm: writes go to the end in any case."""
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, size)


def _state(path: Path) -> tuple[int, int]:
    """The number of the last folded tail, and the rows of the file; 0, 0 for a new one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return 0, 0
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError):
        raise _other_file(path) from None
    with file:
        if file.schema_arrow.names != list(COLUMNS):
            raise _other_file(path)
        return folded_number(file.schema_arrow.metadata), file.metadata.num_rows


def _refuse_other(descriptor: int, path: Path, begin: bytes) -> None:
    """Raise UsageError unless the file begins as ours does, whole or torn; it stays as it is."""
    found = _read_at(descriptor, 0, len(begin))
    if found != begin[: len(found)]:
        raise _other_file(path)


def _other_file(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists and is not a log of samples of this version of muster.",
        hint="choose another name; nothing was written.",
    )


def _hold(descriptor: int, path: Path) -> None:
    """Refuse a second writer, where the system has locks of files."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SetupError(
            f"Another monitor is writing {path}.", hint="choose another --output, or end it first."
        ) from None
    except OSError:
        return  # a file system without locks
