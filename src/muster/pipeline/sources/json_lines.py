"""JSON lines: a record per line. Blank lines are rows that hold nothing.

Integers of any size stay exact, NaN and Infinity (which Python and pandas write) are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from muster.pipeline.sources.formats import MAX_SHARD_BYTES, Cut, DataFile, Row
from muster.pipeline.sources.model import BLANK, BadRow

_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_FIRST_RECORDS = 1000
#: All digits become "0", so that a number of 19 digits or more is a plain substring.
_DIGITS = bytes(48 if 48 <= code <= 57 else 0 for code in range(256))
_LONG_NUMBER = b"0" * 19


class JsonLines:
    """``cut.place`` is a byte, ``cut.line`` the number of lines before it."""

    def columns(self, file: DataFile) -> list[str]:
        names: dict[str, None] = {}
        for row in self.rows(file, Cut(0, _start(file), 0), 0, _FIRST_RECORDS):
            if isinstance(row, dict):
                names.update(dict.fromkeys(row))
        return list(names)

    def cuts(self, file: DataFile, rows: int) -> Iterator[Cut]:
        begin, line, count = _start(file), 0, 0
        last = begin
        with file.path.open("rb") as stream:
            for ends in _line_ends(stream, begin):
                at = 0
                while at < len(ends):
                    fits = int(ends.searchsorted(begin + MAX_SHARD_BYTES, side="right"))
                    stop = min(at + rows - count, max(fits, at))
                    if stop == at and count == 0:
                        stop += 1  # a line that is larger than a shard is one
                    if stop > at:
                        count, last = count + stop - at, int(ends[stop - 1])
                    at = stop
                    if at == len(ends) and count < rows:
                        break
                    yield Cut(count, begin, line)
                    begin, line, count = last, line + count, 0
        if count:
            yield Cut(count, begin, line)

    def rows(self, file: DataFile, cut: Cut, start: int, stop: int) -> Iterator[Row]:
        import orjson

        loads = orjson.loads
        number = 0
        with file.path.open("rb") as stream:
            stream.seek(cut.place)
            for lines, is_plain in _blocks_of_lines(stream):
                begin = max(0, start - number)
                for place, line in enumerate(lines[begin : stop - number], number + begin):
                    try:
                        row = loads(line) if is_plain else None
                    except ValueError:
                        row = None
                    if type(row) is dict:
                        yield row
                    else:
                        yield _read_slowly(line, file.name, cut.line + place + 1)
                number += len(lines)
                if number >= stop:
                    return

    def pick(self, file: DataFile, cut: Cut, wanted: Sequence[int]) -> Iterator[Row]:
        starts = _line_starts(file, cut)
        with file.path.open("rb") as stream:
            for row in wanted:
                stream.seek(int(starts[row]))
                line = stream.read(int(starts[row + 1] - starts[row]))
                yield _read_slowly(line, file.name, cut.line + row + 1)


def _start(file: DataFile) -> int:
    with file.path.open("rb") as stream:
        return len(_BOM) if stream.read(len(_BOM)) == _BOM else 0


def _line_ends(stream: BinaryIO, at: int) -> Iterator[Any]:
    """Arrays of the places behind each line from ``at`` on; the last line needs no newline."""
    import numpy as np

    stream.seek(at)
    last = at
    while block := stream.read(_BLOCK):
        found = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        if len(found):
            ends = found + (at + 1)
            last = int(ends[-1])
            yield ends
        at += len(block)
    if at > last:
        yield np.array([at])


def _line_starts(file: DataFile, cut: Cut) -> Any:
    """Where each line of a cut begins, and where the last one ends."""
    import numpy as np

    parts, found = [np.array([cut.place])], 0
    with file.path.open("rb") as stream:
        for ends in _line_ends(stream, cut.place):
            parts.append(ends[: cut.num_rows - found])
            found += len(parts[-1])
            if found == cut.num_rows:
                break
    return np.concatenate(parts)


def _blocks_of_lines(stream: BinaryIO) -> Iterator[tuple[list[bytes], bool]]:
    """The lines of a block at a time, and whether orjson reads all its numbers exactly."""
    kept: list[bytes] = []
    while block := stream.read(_BLOCK):
        head, newline, tail = block.rpartition(b"\n")
        if not newline:
            kept.append(tail)
            continue
        text = b"".join((*kept, head))
        kept = [tail]
        yield text.split(b"\n"), _LONG_NUMBER not in text.translate(_DIGITS)
    rest = b"".join(kept)
    if rest:
        yield [rest], False


def _read_slowly(line: bytes, name: str, number: int) -> Row:
    """What orjson did not take, or not exactly; says what is wrong with a bad line."""
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
