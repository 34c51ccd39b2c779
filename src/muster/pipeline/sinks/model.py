"""What a finished shard left behind, and how the output is to be made of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """The output of rows ``start`` to ``stop`` of shard ``order``: JSON lines in ``rows`` (and of
    rejected records in ``errors``; None where there are none), as the ledger knows them.
    """

    order: int
    start: int
    stop: int
    rows: Path
    num_rows: int
    num_bytes: int
    sha256: str
    errors: Path | None
    num_errors: int


Format = Literal["jsonl", "parquet", "csv"]


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """``path`` is a file, or a folder of parts (one per shard) when ``is_folder``.

    ``columns``: declared types of some columns, such as ``{"embedding": "float32[384]"}``; others
    are inferred from all parts, so that a late record cannot break the output. ``metadata``: of
    the schema of the input, for an output that has one.
    """

    path: Path
    format: Format
    is_folder: bool = False
    columns: tuple[tuple[str, str], ...] = ()
    metadata: tuple[tuple[bytes, bytes], ...] = ()
