"""Text files: JSON lines, and CSV or TSV with a header.

Blank lines are rows that hold nothing. Integers of JSON stay exact at any size, and NaN and
Infinity, which Python and pandas write, are read. Fields of CSV may hold quoted newlines; all of
their values are texts.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from muster.base.errors import UsageError
from muster.pipeline.sources.source import BLANK, MAX_SHARD_BYTES, BadRow, Cut, DataFile, Row

#: Small enough that memory for one is kept and used again, instead of being cleared anew.
_BLOCK = 1 << 16
#: Blocks that are remembered, in a quarter of a megabyte: half a gigabyte of lines.
_MOST_KNOWN = 1 << 13
#: In fewer bytes lines are looked for one by one.
_STRIDE = 1 << 10
#: Of rows that are read: a chunk may be small, and what is behind it is read in vain.
_ROWS_BLOCK = 1 << 17
_BOM = b"\xef\xbb\xbf"
_FIRST_RECORDS = 1000
#: Turns all digits to "0", so that a number of 19 digits or more is found as a plain substring.
_DIGITS = bytes(48 if 48 <= code <= 57 else 0 for code in range(256))
_LONG_NUMBER = b"0" * 19


def has_long_number(text: bytes) -> bool:
    """Whether there may be an integer that orjson reads as a float."""
    # Where 19 digits stand in a row, so do three of every sixth byte: few texts are read whole.
    return b"000" in text[::6].translate(_DIGITS) and _LONG_NUMBER in text.translate(_DIGITS)


class JsonLines:
    """``cut.place`` is a byte, ``cut.line`` the number of lines before it."""

    def __init__(self) -> None:
        self._known: dict[Path, array[int]] = {}

    def columns(self, file: DataFile) -> list[str]:
        names: dict[str, None] = {}
        for row in self.rows(file, Cut(0, _start(file), 0), 0, _FIRST_RECORDS):
            if isinstance(row, dict):
                names.update(dict.fromkeys(row))
        return list(names)

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        begin, line, count = _start(file), 0, 0
        last = begin
        for block in self._blocks_of(file, begin):
            done, left = 0, block.num_lines
            while left:
                take = min(rows - count, left)
                most = begin + MAX_SHARD_BYTES - block.at
                if most < block.size:
                    take = min(take, block.text().count(b"\n", done, max(most, done)))
                if not take and not count:
                    take = 1  # a line that is larger than a shard is one
                if take:
                    done = block.end if take == left else _behind(block.text(), done, take)
                    count, left, last = count + take, left - take, block.at + done
                if not left and count < rows:
                    break
                yield Cut(count, begin, line)
                begin, line, count = last, line + count, 0
        if count:
            yield Cut(count, begin, line)

    def _blocks_of(self, file: DataFile, begin: int) -> Iterator[_Block]:
        """The blocks of a file. Where they are few they are remembered: cuts of another length then
        read only the blocks that they lie in.
        """
        known = self._known.get(file.path)
        if known is not None:
            for place in range(0, len(known), 4):
                at, size, num_lines, end = known[place : place + 4]
                yield _Block(file.path, at, size, num_lines, end)
            return
        met = array("q")
        for block in _blocks(file.path, begin):
            if len(met) <= 4 * _MOST_KNOWN:
                met.extend(block[1:5])
            yield block
        if len(met) <= 4 * _MOST_KNOWN:
            self._known[file.path] = met

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        # Chained in C: a generator that yields each row costs as much as a third of reading it.
        return chain.from_iterable(self._blocks_of_rows(file, cut, start, stop))

    def _blocks_of_rows(
        self, file: DataFile, cut: Cut, start: int, stop: int
    ) -> Iterator[Iterable[Row]]:
        import orjson

        loads = orjson.loads
        number = 0
        with file.path.open("rb") as stream:
            stream.seek(cut.place)
            for lines, is_plain in _blocks_of_lines(stream):
                begin = max(0, start - number)
                wanted = lines[begin : stop - number]
                try:
                    rows = list(map(loads, wanted)) if is_plain else []
                except ValueError:
                    rows = []
                if set(map(type, rows)) == {dict}:
                    yield rows
                else:
                    read = partial(_read, name=file.name, is_plain=is_plain)
                    yield map(read, wanted, count(cut.line + number + begin + 1))
                number += len(lines)
                if number >= stop:
                    return

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        return _picked(self.rows(file, cut, 0, cut.num_rows), wanted)


def _picked(rows: Iterator[Row], wanted: Sequence[int]) -> Iterator[Row]:
    kept: dict[int, Row] = dict.fromkeys(wanted)
    for number, row in enumerate(rows):
        if number in kept:
            kept[number] = row
    yield from kept.values()


def _start(file: DataFile) -> int:
    with file.path.open("rb") as stream:
        return len(_BOM) if stream.read(len(_BOM)) == _BOM else 0


class _Block(NamedTuple):
    """``size`` bytes from ``at`` on, in which ``num_lines`` lines end, the last one at ``end``."""

    path: Path
    at: int
    size: int
    num_lines: int
    end: int
    held: bytes | None = None

    def text(self) -> bytes:
        if self.held is not None:
            return self.held
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(self.at)
            return stream.read(self.size)


def _blocks(path: Path, at: int) -> Iterator[_Block]:
    """The blocks from ``at`` on, and the newline that the last line lacks."""
    last = b"\n"
    with path.open("rb", buffering=0) as stream:
        stream.seek(at)
        while text := stream.read(_BLOCK):
            yield _Block(path, at, len(text), text.count(b"\n"), text.rfind(b"\n") + 1, text)
            at, last = at + len(text), text[-1:]
    if last != b"\n":
        yield _Block(path, at - 1, 1, 1, 1, b"\n")


def _behind(text: bytes, at: int, take: int) -> int:
    """The place behind the next ``take`` lines that end after ``at``: there are so many."""
    end = len(text)
    while end - at > _STRIDE:  # halving leaves the counting to C
        middle = (at + end) // 2
        found = text.count(b"\n", at, middle)
        if found < take:
            at, take = middle, take - found
        else:
            end = middle
    for _ in range(take):
        at = text.index(b"\n", at) + 1
    return at


def _blocks_of_lines(stream: BinaryIO) -> Iterator[tuple[list[bytes], bool]]:
    """The lines of a block at a time, and whether orjson reads all its numbers exactly."""
    kept: list[bytes] = []
    while block := stream.read(_ROWS_BLOCK):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            kept.append(tail)
            continue
        text = b"".join((*kept, head))
        kept = [tail]
        yield text.split(b"\n"), not has_long_number(text)
    rest = b"".join(kept)
    if rest:
        yield [rest], False


def _read(line: bytes, number: int, *, name: str, is_plain: bool) -> Row:
    import orjson

    with suppress(ValueError):
        row = orjson.loads(line) if is_plain else None
        if type(row) is dict:
            return row
    return _read_slowly(line, name, number)


def _read_slowly(line: bytes, name: str, number: int) -> Row:
    """Read a line that orjson refuses or reads inexactly; says what is wrong with a bad one."""
    if not line.strip():
        return BLANK
    where = f"{name}, line {number:,}"
    try:
        text = line.decode()
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        bad = line[error.start]
        place = f"byte {error.start + 1} of the line is 0x{bad:02x}"
        return BadRow(where, f"not UTF-8: {place} (name another with --encoding)")
    except UnicodeEncodeError:
        return BadRow(where, "not Unicode: half of a surrogate pair stands alone")
    except RecursionError:
        return BadRow(where, "not JSON that can be read: nested too deeply")
    except ValueError as error:
        return BadRow(where, f"not JSON: {error}")
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
        kind = "true or false" if isinstance(value, bool) else kind
        return BadRow(where, f"not a JSON object but {kind}")
    return value


_OTHERS = (";", "\t", "|", ",")


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
                yield _row_of(record, header, file.name)

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        return _picked(self.rows(file, cut, 0, cut.num_rows), wanted)

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


def _row_of(record: _Record, header: list[str], name: str) -> Row:
    where = f"{name}, line {record.line + 1:,}"
    if record.problem:
        return BadRow(where, record.problem)
    if not record.fields:
        return BLANK
    if len(record.fields) != len(header):
        reason = f"{len(record.fields):,} fields where the header has {len(header):,}"
        return BadRow(where, reason)
    return dict(zip(header, record.fields, strict=True))
