"""CSV and TSV with a header. Fields may hold quoted newlines; all values are texts."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from muster.base.errors import UsageError
from muster.pipeline.sources.formats import MAX_SHARD_BYTES, Cut, DataFile, Row
from muster.pipeline.sources.model import BLANK, BadRow

_OTHERS = (";", "\t", "|", ",")
_BOM = b"\xef\xbb\xbf"


class _Record(NamedTuple):
    """``begin`` and ``end`` in bytes; ``line`` and ``next_line`` count lines before them."""

    fields: list[str]
    problem: str
    begin: int
    end: int
    line: int
    next_line: int


@dataclass(frozen=True)
class Delimited:
    """``cut.place`` is a byte, ``cut.line`` the number of lines before it."""

    delimiter: str
    is_given: bool = False  # by the user, who knows

    def columns(self, file: DataFile) -> list[str]:
        names = self._header(file).fields
        if (
            len(names) == 1
            and not self.is_given
            and (other := next((c for c in _OTHERS if c in names[0]), None))
        ):
            shown = "tab" if other == "\t" else other
            raise UsageError(
                f"{file.name} has one column as it is read, {names[0]!r}: its header has no "
                f"{'tab' if self.delimiter == chr(9) else self.delimiter!r} but {shown!r}.",
                hint=f"say --delimiter '{shown}' (or --delimiter '{self.delimiter}' if this is "
                "the name of the only column).",
            )
        return names

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        header = self._header(file)
        begin, line, count = header.end, header.next_line, 0
        for record in self._records(file, begin, line):
            if count and (count == rows or record.end - begin > MAX_SHARD_BYTES):
                yield Cut(count, begin, line)
                begin, line, count = record.begin, record.line, 0
            count += 1
        if count:
            yield Cut(count, begin, line)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        header = self._header(file).fields
        for number, record in enumerate(self._records(file, cut.place, cut.line)):
            if number >= stop:
                return
            if number >= start:
                yield _row(record, header, file.name)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        header = self._header(file).fields
        places: list[tuple[int, int]] = []
        for record in self._records(file, cut.place, cut.line):
            places.append((record.begin, record.line))
            if len(places) == cut.num_rows:
                break
        for row in wanted:
            record = next(self._records(file, *places[row]))
            yield _row(record, header, file.name)

    def _header(self, file: DataFile) -> _Record:
        record = next(self._records(file, 0, 0), None)
        if record is None:
            raise UsageError(f"{file.name} is empty: it has no header.")
        names = record.fields
        if record.problem:
            raise UsageError(f"The header of {file.name} cannot be read: {record.problem}.")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            what = f"names {twice[0]!r} twice" if twice else "is a blank line"
            raise UsageError(f"The header of {file.name} {what}.", hint="give each column a name.")
        return record

    def _records(self, file: DataFile, begin: int, line: int) -> Iterator[_Record]:
        # Python refuses fields over 128 KiB by default; documents are longer.
        csv.field_size_limit(MAX_SHARD_BYTES)
        with file.path.open("rb") as stream:
            stream.seek(begin)
            lines = _Lines(stream, is_first=begin == 0)
            reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
            while True:
                start, number, lines.problem = lines.size, lines.count, ""
                try:
                    fields = next(reader, None)
                except csv.Error as error:
                    fields, lines.problem = [], f"not CSV: {error}"
                if fields is None:
                    return
                yield _Record(
                    fields, lines.problem,
                    begin + start, begin + lines.size, line + number, line + lines.count,
                )  # fmt: skip


class _Lines:
    """Decoded lines of a stream; counts their bytes and remembers the first wrong one."""

    def __init__(self, stream: BinaryIO, *, is_first: bool) -> None:
        self._stream = stream
        self._is_first = is_first
        self.size = self.count = 0
        self.problem = ""

    def __iter__(self) -> Iterator[str]:
        for raw in self._stream:
            self.size += len(raw)
            self.count += 1
            line = raw
            if self._is_first:
                line, self._is_first = raw.removeprefix(_BOM), False
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                bad = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
                self.problem = self.problem or f"not UTF-8: {bad} (name another with --encoding)"
                yield line.decode(errors="replace")


def _row(record: _Record, header: list[str], name: str) -> Row:
    where = f"{name}, line {record.line + 1:,}"
    if record.problem:
        return BadRow(where, record.problem)
    if not record.fields:
        return BLANK
    if len(record.fields) != len(header):
        reason = f"{len(record.fields):,} fields where the header has {len(header):,}"
        return BadRow(where, reason)
    return dict(zip(header, record.fields, strict=True))
