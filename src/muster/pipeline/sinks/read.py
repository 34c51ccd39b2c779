"""The records of an output that was written, as a stream: for summaries and figures."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from muster.base.codec import read_json
from muster.pipeline.sinks.delimited import MAX_CELL_CHARS, value_of
from muster.pipeline.sinks.folder import MANIFEST
from muster.pipeline.sinks.model import Format, SinkSpec

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

    from muster.pipeline.sinks.columnar import is_json_text
    from muster.pipeline.sources.arrow_rows import rows_of

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
