"""What a source is made of: files, cuts in them, shards of rows, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from muster.base.flags import Flag


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


class ArrowRow(dict[str, Any]):
    """A record that is row ``index`` of the Arrow ``batch``. A copy of it is a plain dict."""

    __slots__ = ("batch", "index")

    batch: Any
    index: int


@dataclass(frozen=True)
class BadRow:
    """A row that is no record: malformed JSON, wrong encoding, too many fields.

    ``where`` names file and line, ``reason`` says what is wrong with it.
    """

    where: str
    reason: str


#: A line without anything in it: a row by its place in the file, and no record.
BLANK = BadRow("", "a blank line")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows, in which order. ``skip`` and ``limit`` count rows of the source (of its shuffled
    order when ``shuffle_seed`` is given); ``where`` then drops those that do not match.

    ``where``: conditions ``column OP value`` with OP one of == != < <= > >= in; all must hold.
    """

    skip: Annotated[int, Flag(aliases=("start-from",))] = 0
    """Leave out this many records at the beginning."""
    limit: Annotated[int | None, Flag(aliases=("num-examples",))] = None
    """Read at most this many records."""
    shuffle_seed: int | None = None
    """Read in an order that this seed fixes: shards shuffled, and records inside them."""
    where: Annotated[tuple[str, ...], Flag(metavar="'COLUMN OP VALUE'", repeats=True)] = ()
    """Only records with COLUMN OP VALUE, such as 'level>=3'; several must all hold."""


class Source(Protocol):
    """An input that has been looked at. Opening one again from ``describe()`` gives the same."""

    def describe(self) -> Mapping[str, Any]:
        """JSON: kind, files with size, time and a sampled hash, selection, columns."""

    def metadata(self) -> Mapping[bytes, bytes]:
        """What its schema carries beside the columns, if it has one."""

    def lost_as_text(self) -> list[str]:
        """Sentences about what JSON lines and CSV cannot hold of it."""

    def shards(self, rows_per_shard: int | None) -> Iterator[Shard]:
        """The shards in output order; the same for the same input and selection, always."""

    def row_of(self, shard: Shard) -> Callable[[int], int]:
        """From a row of the shard to the row of the input that it is, both from 0."""

    def read(
        self, shard: Shard, start: int, stop: int
    ) -> Iterator[tuple[int, dict[str, Any] | BadRow | None]]:
        """Rows ``start`` to ``stop`` (counted in the shard from 0) as (row in the shard, record).

        None stands for a row that ``where`` leaves out, `BLANK` for a blank line.
        """


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
    """``path`` is what is read; ``name`` is what the user knows it by."""

    path: Path
    name: str


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
