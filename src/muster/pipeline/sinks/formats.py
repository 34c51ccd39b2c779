"""The formats of an output: what a path means, and how records are written and read again.

CSV has one header for all records, RFC 4180 quoting, and values that are not text as JSON. Parquet
has modules of its own.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from muster.base.codec import read_json
from muster.base.errors import SetupError, UnknownNameError, UsageError
from muster.pipeline.sinks.lines import as_json
from muster.pipeline.sinks.parts import Part, blocks, exact_json, records
from muster.pipeline.sources.columnar import Again
from muster.pipeline.sources.source import DataFile

#: In a folder of parts: its files with rows, bytes and sha256.
MANIFEST = "manifest.json"
Format = Literal["jsonl", "parquet", "csv"]


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """``path`` is a file, or a folder of parts (one per shard) when ``is_folder``.

    ``columns``: declared types of some columns, such as ``{"embedding": "float32[384]"}``; others
    are inferred from all parts, so that a late record cannot break the output. ``metadata``: of
    the schema of the input, and ``inputs``, its files, for an output that has types.
    """

    path: Path
    format: Format
    is_folder: bool = False
    columns: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[bytes, bytes], ...] = ()
    inputs: tuple[DataFile, ...] = ()


_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
}


def spec_of(text: str, format: str | None = None) -> SinkSpec:
    """The sink that ``--output`` and ``--format`` name.

    A path that ends with a slash or has no suffix is a folder of parts, in ``format`` (default
    jsonl). The suffix of a file decides its format. UsageError says what does not fit together.
    Nothing is written; see `prepare_place`.
    """
    if not text:
        raise UsageError("The output is an empty path.", hint="write --output out.jsonl.")
    asked = None if format is None else _format_named(format)
    path = Path(os.path.expanduser(text))  # noqa: PTH111 Path.expanduser raises for ~nobody
    if path.name in ("", ".."):
        raise UsageError(
            f"The output {text!r} has no name of its own.",
            hint="write --output NAME/ or out.jsonl.",
        )
    if text.endswith(("/", os.sep)) or not path.suffix:
        _check_no_file(path)
        return SinkSpec(path=path, format=asked or "jsonl", is_folder=True)
    found = _FORMATS.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"Cannot write {text}: {path.suffix!r} is not a format of an output.",
            hint="end it with .jsonl, .parquet or .csv, or with a slash for a folder of parts.",
        )
    if asked is not None and asked != found:
        raise UsageError(
            f"--output {text} is {found} by its suffix, and --format asks for {asked}.",
            hint=f"leave --format out, or write --output {path.with_suffix('.' + asked)}.",
        )
    if path.is_dir():
        raise UsageError(
            f"Cannot write the file {text}: there is a folder of that name.",
            hint=f"choose another name, or write {text}/ for a folder of parts.",
        )
    return SinkSpec(path=path, format=found)


def prepare_place(spec: SinkSpec) -> None:
    """Make the folder that the output will be in. SetupError when that cannot be done."""
    try:
        spec.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot make the folder {spec.path.parent} of the output: {error.strerror or error}.",
            hint="choose another --output.",
        ) from error


def check_place(spec: SinkSpec) -> None:
    """SetupError before any work when the output could not be written at its end."""
    prepare_place(spec)
    if not os.access(spec.path.parent, os.W_OK | os.X_OK):
        raise SetupError(
            f"You may not write to {spec.path.parent.absolute()}, where the output is to be.",
            hint="choose another --output.",
        )


def _format_named(name: str) -> Format:
    found = _FORMATS.get(f".{name}")
    if found is None or name == "ndjson":
        raise UnknownNameError("format", name, dict.fromkeys(_FORMATS.values()))
    return found


def _check_no_file(path: Path) -> None:
    if path.is_file():
        raise UsageError(
            f"Cannot write a folder of parts to {path}: there is a file of that name.",
            hint=f"choose another name, or give it a suffix: {path}.jsonl.",
        )


_CELLS_PER_BLOCK = 1 << 14
#: For csv.field_size_limit: 128 KiB is the default, and documents are longer.
MAX_CELL_CHARS = (1 << 31) - 1


class Encoder(Protocol):
    """Writes files of one format. It is made with all parts, so that all files have the same
    columns.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the columns."""

    def write(self, parts: Iterable[Part], file: IO[bytes]) -> None:
        """Write a whole file of these parts. SetupError when one of them is damaged."""


class TextEncoder:
    """JSON lines, the bytes of the parts one after the other; with ``columns`` CSV.

    Its text is written as it is, numbers and nested values as JSON; null and a missing key are
    empty cells.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns
        self.head = b"" if columns is None else as_csv([columns])

    def write(self, parts: Iterable[Part], file: IO[bytes]) -> None:
        file.write(self.head)
        for part in parts:
            for block in self.encoded(part):
                file.write(block)

    def encoded(self, part: Part) -> Iterator[bytes]:
        """The bytes of a part, without a header."""
        columns = self._columns
        if columns is None:
            yield from blocks(part)
            return
        most = max(1, _CELLS_PER_BLOCK // max(1, len(columns)))
        rows = ([_cell(record.get(name)) for name in columns] for record in records(part))
        while block := list(islice(rows, most)):
            yield as_csv(block)


def columns_of(parts: Iterable[Part]) -> list[str]:
    """The keys of all records, in the order in which they first appear."""
    found: dict[str, None] = {}
    for part in parts:
        for record in records(part):
            if not found.keys() >= record.keys():
                found.update(dict.fromkeys(record))
    return list(found)


def as_csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def value_of(cell: str) -> Any:
    """The most likely value of a cell. CSV has no types: the text "1" is read as 1."""
    if not cell:
        return None
    if cell[0] not in "-0123456789tf[{":
        return cell
    try:
        return exact_json(cell.encode())
    except ValueError:
        return cell


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value).decode()


def encoder_for(spec: SinkSpec, parts: Sequence[Part]) -> Encoder:
    """Make the encoder of an output; it reads all parts where the format must know all columns."""
    if spec.format == "jsonl":
        return TextEncoder()
    if spec.format == "csv":
        return TextEncoder(columns_of(parts))
    from muster.pipeline.sinks.columnar import ParquetEncoder
    from muster.pipeline.sinks.survey import survey

    declared = dict(spec.columns)
    num_rows = sum(part.num_rows for part in parts)
    again = Again(spec.inputs)
    seen = survey(parts, declared, again)
    return ParquetEncoder(seen, declared, dict(spec.metadata), num_rows, again)


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
            yield exact_json(line)


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
                        record[name] = exact_json(record[name].encode())
                yield record


_READERS: dict[Format, Any] = {
    "jsonl": _lines,
    "csv": _rows_of_csv,
    "parquet": _rows_of_parquet,
}
