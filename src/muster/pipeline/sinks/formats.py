"""The formats of an output, written and read again; Parquet has modules of its own.

CSV has one header for all records, RFC 4180 quoting, and values that are not text as JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from muster.base.codec import read_json
from muster.pipeline.sinks.parts import blocks, records
from muster.pipeline.sinks.spec import MANIFEST, Format, Part, SinkSpec

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


class Encoder(Protocol):
    """Made with all parts of an output, so that all of its files have the same columns."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the columns."""

    def write(self, parts: Sequence[Part], file: IO[bytes]) -> None:
        """Write a whole file of these parts. SetupError when one of them is damaged."""


class Lines:
    """JSON lines: the bytes of the parts, one after the other."""

    notes: tuple[str, ...] = ()

    def write(self, parts: Sequence[Part], file: IO[bytes]) -> None:
        for part in parts:
            for block in blocks(part):
                file.write(block)


def encoder_for(spec: SinkSpec, parts: Sequence[Part]) -> Encoder:
    """Reads all parts where the format needs to know all columns."""
    if spec.format == "jsonl":
        return Lines()
    if spec.format == "csv":
        return CsvEncoder(columns_of(parts))
    from muster.pipeline.sinks.columnar import ParquetEncoder
    from muster.pipeline.sinks.survey import survey

    declared = dict(spec.columns)
    num_rows = sum(part.num_rows for part in parts)
    return ParquetEncoder(survey(parts, declared), declared, dict(spec.metadata), num_rows)


_READ_ROWS = 1024


def read_output(spec: SinkSpec) -> Iterator[dict[str, Any]]:
    """All records in order; columns of JSON text and cells of CSV are parsed again.

    Memory does not depend on how many there are. CSV has no types: what looks like JSON is taken
    for it, and an empty cell for null.
    """
    for path in files_of(spec):
        yield from _READERS[spec.format](path)


def files_of(spec: SinkSpec) -> list[Path]:
    """The data files of an output, in order."""
    if not spec.is_folder:
        return [spec.path]
    manifest = read_json(spec.path / MANIFEST, MANIFEST)
    return [spec.path / entry["file"] for entry in manifest["files"]]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield orjson.loads(line)


def _rows_of_csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(MAX_CELL_CHARS)
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        columns = next(rows, [])
        for row in rows:
            yield {name: value_of(cell) for name, cell in zip(columns, row, strict=False)}


def _rows_of_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    from muster.pipeline.arrow import rows_of
    from muster.pipeline.sinks.columnar import is_json_text

    with pq.ParquetFile(path) as file:
        marked = [f.name for f in file.schema_arrow if is_json_text(f)]
        for batch in file.iter_batches(_READ_ROWS):
            for record in rows_of(batch):
                for name in marked:
                    if record[name] is not None:
                        record[name] = orjson.loads(record[name])
                yield record


_READERS: dict[Format, Any] = {
    "jsonl": _lines,
    "csv": _rows_of_csv,
    "parquet": _rows_of_parquet,
}
