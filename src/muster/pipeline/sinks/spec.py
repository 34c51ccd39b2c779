"""What an output path means, and the finished parts that an output is made of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from muster.base.errors import SetupError, UnknownNameError, UsageError


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


#: In a folder of parts: its files with rows, bytes and sha256.
MANIFEST = "manifest.json"
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
    path = Path(text)
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
            f"Cannot write {text}: {path.suffix!r} is no format of an output.",
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
