"""CSV of records: one header for all, RFC 4180 quoting, values that are not text as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import IO, Any

import orjson

from muster.pipeline.sinks.model import Part
from muster.pipeline.sinks.parts import records

_CELLS_PER_BLOCK = 1 << 14
#: For csv.field_size_limit: 128 KiB is the default, and documents are longer.
MAX_CELL_CHARS = (1 << 31) - 1


class CsvEncoder:
    """Text as it is, numbers and nested values as JSON; null and a missing key are empty."""

    notes: tuple[str, ...] = ()

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns

    def write(self, parts: Sequence[Part], file: IO[bytes]) -> None:
        file.write(as_csv([self._columns]))
        for block in csv_blocks((r for part in parts for r in records(part)), self._columns):
            file.write(block)


def columns_of(parts: Iterable[Part]) -> list[str]:
    """The keys of all records, in the order in which they first appear."""
    found: dict[str, None] = {}
    for part in parts:
        for record in records(part):
            if not found.keys() >= record.keys():
                found.update(dict.fromkeys(record))
    return list(found)


def csv_blocks(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> Iterable[bytes]:
    """The rows as CSV, without the header."""
    most = max(1, _CELLS_PER_BLOCK // max(1, len(columns)))
    block: list[list[str]] = []
    for record in rows:
        block.append([_cell(record.get(name)) for name in columns])
        if len(block) == most:
            yield as_csv(block)
            block.clear()
    yield as_csv(block)


def as_csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def value_of(cell: str) -> Any:
    """The value a cell was most likely made of. CSV has no types: the text "1" comes back as 1."""
    if not cell:
        return None
    if cell[0] not in "-0123456789tf[{":
        return cell
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()
