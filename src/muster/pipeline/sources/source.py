"""A source is made of files of one kind: cuts in them, shards of rows that tasks read, and rows."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from muster.base.atomic_files import replacing
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.pipeline.sources.conditions import Condition, matches


class Shard(NamedTuple):
    """A piece of the input that one task reads. ``count`` rows from row ``first`` on.

    ``first`` counts rows over the whole input (all files, in order), from 0; it is also where the
    ids of records come from. ``file`` is the place in ``Source.describe()["files"]``. ``place`` is
    where to begin reading in that file, in the source's own terms (a byte offset and a line
    number, a row group and a row in it), JSON values only.
    """

    order: int
    first: int
    count: int  # type: ignore[assignment]
    file: int
    place: tuple[int, ...]


class Origin(NamedTuple):
    """Where a batch lies: in ``file`` of the source's files, in row group ``group`` from ``row``
    on.
    """

    file: int
    group: int
    row: int


class ArrowRow(dict[str, Any]):
    """A record that is row ``index`` of the Arrow ``batch``. A copy of it is a plain dict.

    ``origin`` of the batch; None where its rows cannot be found again by a range.
    """

    __slots__ = ("batch", "index", "origin")

    batch: Any
    index: int
    origin: Origin | None


@dataclass(frozen=True)
class BadRow:
    """A row that is no record: malformed JSON, wrong encoding, too many fields.

    ``where`` names file and line, ``reason`` says what is wrong with it.
    """

    where: str
    reason: str


#: A blank line: it counts as a row of the file and holds no record.
BLANK = BadRow("", "a blank line")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows are read, and in which order.

    ``skip`` and ``limit`` count rows of the source (of its shuffled order when ``shuffle_seed`` is
    given); ``where`` then drops those that do not match.

    ``where``: conditions ``column OP value`` with OP one of == != < <= > >= in; all must hold.
    """

    skip: Annotated[int, Flag(aliases=("start-from",))] = 0
    """Leave out this many records at the beginning."""
    limit: Annotated[int | None, Flag(aliases=("num-examples",))] = None
    """Read at most this many records."""
    shuffle_seed: int | None = None
    """Read in an order that this seed fixes: shards shuffled, and records inside them."""
    where: Annotated[tuple[str, ...], Flag(metavar="'COLUMN OP VALUE'")] = ()
    """Only records with COLUMN OP VALUE, such as 'level>=3'; several must all hold."""

    @property
    def first_rows(self) -> int | None:
        """How many rows of an input are needed at most; None: all."""
        if self.limit is None or self.shuffle_seed is not None:
            return None
        return self.skip + self.limit


#: A shard holds no more of a text file than this (one row may be larger).
MAX_SHARD_BYTES = 32 << 20

Row = dict[str, Any] | BadRow | None


class Cut(NamedTuple):
    """``num_rows`` rows that begin at (``place``, ``line``), in the format's own terms."""

    num_rows: int
    place: int
    line: int


@dataclass(frozen=True)
class DataFile:
    """``path`` is what is read; ``name`` is what the user knows it by.

    ``number`` among the files of the source; ``stamp``: its bytes, its time and its hash when
    the run was started.
    """

    path: Path
    name: str
    number: int = 0
    stamp: tuple[int, int, str] | None = None


class Format(Protocol):
    """A kind of file. All methods stream; ``rows`` and ``pick`` count rows from the cut on."""

    def columns(self, file: DataFile) -> list[str]:
        """Names of the columns, from the schema or the first records. UsageError: no such file."""

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        """The whole file in pieces of at most ``rows`` rows."""

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        """Rows ``start`` to ``stop`` of the cut, in order."""

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        """These rows of the cut, in this order."""


_PIECE = struct.Struct("<5q")


class Piece(NamedTuple):
    """A cut of file number ``file``; ``first`` counts rows over all files."""

    file: int
    first: int
    cut: Cut


class CutIndex:
    """The pieces of an input; memory does not depend on how many there are."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size // _PIECE.size
            # Of an empty file there is no map.
            self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        self.num_rows = 0
        if self._size:
            last = self._piece(self._size - 1)
            self.num_rows = last.first + last.cut.num_rows

    def pieces(self, seed: int | None) -> Iterator[Piece]:
        """The pieces in the order of the input, or in one that the seed decides."""
        order = range(self._size) if seed is None else permutation(self._size, seed)
        return map(self._piece, order)

    def _piece(self, number: int) -> Piece:
        file, first, *cut = _PIECE.unpack_from(self._rows, number * _PIECE.size)
        return Piece(file, first, Cut(*cut))


def cut_index(folder: Path, identity: str, pieces: Iterable[Piece]) -> CutIndex:
    """The index for ``identity``; ``pieces`` are only asked for when it is not there yet."""
    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    path = folder / f"cuts-{name}.bin"
    if path.exists():
        return CutIndex(path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as stream:
        for piece in pieces:
            stream.write(_PIECE.pack(piece.file, piece.first, *piece.cut))
    return CutIndex(path)


def shards_of(index: CutIndex, selection: Selection) -> Iterator[Shard]:
    """The selected rows. ``place`` is (place, line, count) of the whole piece and the row in it,
    in its shuffled order where there is one, with which the shard begins.
    """
    start = selection.skip
    stop = None if selection.limit is None else start + selection.limit
    seen = order = 0
    for piece in index.pieces(selection.shuffle_seed):
        count = piece.cut.num_rows
        begin = min(max(0, start - seen), count)
        end = count if stop is None else min(count, stop - seen)
        seen += count
        if begin < end:
            place = (piece.cut.place, piece.cut.line, count, begin)
            yield Shard(order, piece.first + begin, end - begin, piece.file, place)
            order += 1
        if stop is not None and seen >= stop:
            return


def permutation(count: int, *key: int) -> list[int]:
    """The numbers below ``count`` in an order that only ``key`` decides, on every machine."""
    import numpy as np

    seed = ",".join(map(str, (count, *key))).encode()
    keys = np.frombuffer(hashlib.shake_128(seed).digest(8 * count), "<u8")
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


DEFAULT_ROWS = 10_000
#: A small input still has work for many workers, in shards that are worth a batch or several.
DEFAULT_SHARDS = 64
#: For fewer workers fewer: each shard costs some milliseconds, and the last ones are divided.
SHARDS_PER_WORKER = 8
LEAST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Source:
    """Made by ``table.open_input``; opened again from ``describe()`` it is the same.

    Without ``folder``, ``shards`` looks for its cuts each time. ``left_out``: of the files that
    were named, in words, where it has just been opened. ``num_shards``: into how many an input is
    cut whose shards are neither too small nor too large then.
    """

    description: Mapping[str, Any]
    format: Format
    selection: Selection
    conditions: tuple[Condition, ...] = ()
    folder: Path | None = None
    left_out: str = ""
    num_shards: int = DEFAULT_SHARDS

    def describe(self) -> Mapping[str, Any]:
        """JSON: kind, columns, selection, and of each file path, size, time and sampled hash."""
        return self.description

    def metadata(self) -> dict[bytes, bytes]:
        """What the schema of its first file carries beside the columns; none for text files."""
        return {} if self._footer is None else dict(self._footer.metadata)

    def lost_as_text(self) -> list[str]:
        """Sentences about what JSON lines and CSV cannot hold of it."""
        return [] if self._footer is None else list(self._footer.lost)

    @property
    def _footer(self) -> Any:
        footer = getattr(self.format, "footer", None)  # text files have none
        return None if footer is None or not self.files else footer(self.files[0])

    def shards(self, rows_per_shard: int | None) -> Iterator[Shard]:
        """Shards of ``rows_per_shard`` rows, by default the selected rows by ``num_shards`` but 256
        to 10,000, and of 32 MiB at most. The first call scans the input, up to the last row of
        ``limit``.
        """
        if self.folder is not None:
            yield from shards_of(self._index(self.folder, rows_per_shard), self.selection)
            return
        import tempfile  # here: no worker needs it

        with tempfile.TemporaryDirectory() as folder:
            yield from shards_of(self._index(Path(folder), rows_per_shard), self.selection)

    def read(self, shard: Shard, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        """Rows ``start`` to ``stop`` (counted in the shard from 0) as (row in the shard, record).

        Streams. None is a row that ``where`` leaves out, `BLANK` a blank line.
        """
        place, line, count, begin = shard.place
        cut, file = Cut(count, place, line), self.files[shard.file]
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
        """A function from a row of the shard to its row of the input, both from 0."""
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
    def files(self) -> list[DataFile]:
        return [
            DataFile(
                Path(file.get("unpacked", file["path"])),
                Path(file["path"]).name,
                number,
                (file["size"], file["mtime_ns"], file["hash"]),
            )
            for number, file in enumerate(self.description["files"])
        ]

    def _index(self, folder: Path, rows_per_shard: int | None) -> CutIndex:
        if rows_per_shard is not None and rows_per_shard < 1:
            raise UsageError(f"A chunk of {rows_per_shard} rows holds nothing.")
        selection = self.selection
        index = self._cut(folder, rows_per_shard or DEFAULT_ROWS)
        if not index.num_rows and selection.first_rows != 0:
            names = ", ".join(file.name for file in self.files[:3])
            raise UsageError(f"There are no rows in {names}.")
        if rows_per_shard is not None:
            return index
        num_rows = index.num_rows
        if selection.shuffle_seed is None:  # else one order, whatever is taken of it
            num_rows = max(0, num_rows - selection.skip)
            if selection.limit is not None:
                num_rows = min(num_rows, selection.limit)
        num_shards = min(self.num_shards, max(1, num_rows // LEAST_ROWS))
        rows = max(1, -(-num_rows // num_shards))
        return index if rows >= DEFAULT_ROWS else self._cut(folder, rows)

    def _cut(self, folder: Path, rows: int) -> CutIndex:
        most = self.selection.first_rows
        files = [
            [file["size"], file["mtime_ns"], file["hash"]] for file in self.description["files"]
        ]
        reading = [self.description[n] for n in ("delimiter", "encoding") if n in self.description]
        key = json.dumps([self.description["kind"], files, rows, most, *reading])
        return cut_index(folder, key, self._pieces(rows, most))

    def _pieces(self, rows: int, most: int | None) -> Iterator[Piece]:
        first = 0
        for number, file in enumerate(self.files):
            if not file.path.stat().st_size:
                continue
            for cut in self.format.cuts(file, rows):
                if most is not None and first >= most:
                    return
                yield Piece(number, first, cut)
                first += cut.num_rows
