"""What each kind of file answers: its columns, where it can be cut, and rows from there on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from muster.pipeline.sources.model import BadRow

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
