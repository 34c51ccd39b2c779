"""The three formats as text and back, and reading what a killed monitor has left."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.monitor.sample import COLUMNS, Row

SUFFIXES = (".csv", ".jsonl", ".parquet")


def check_suffix(path: Path, flag: str) -> str:
    """The format of ``path``; UsageError for one that is not written here."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{flag} {path}: the format {path.suffix or 'without a suffix'} is not known.",
            hint=f"name it {path.stem}.csv, {path.stem}.jsonl or {path.stem}.parquet.",
        )
    return path.suffix.lower()


def csv_header() -> bytes:
    return _csv_line(list(COLUMNS))


def to_csv(rows: Sequence[Row]) -> bytes:
    return b"".join(_csv_line(["" if v is None else v for v in r.values().values()]) for r in rows)


def to_jsonl(rows: Sequence[Row]) -> bytes:
    return b"".join(json.dumps(row.values(), ensure_ascii=False).encode() + b"\n" for row in rows)


def to_jsonl_start() -> bytes:
    """What a log in JSON Lines begins with."""
    return f'{{"{next(iter(COLUMNS))}": '.encode()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a log in their order; a torn last line is left out.

    Raises SetupError when there is no such file or it is not a log of the monitor.
    """
    form = check_suffix(path, "the log")
    # A Parquet log that has just begun is its tail only.
    if not path.exists() and not (form == ".parquet" and tail_files(path)):
        raise SetupError(f"There is no log of samples at {path}.")
    try:
        if form == ".parquet":
            yield from _read_parquet(path)
            return
        with path.open("rb") as file:
            yield from _read_csv(file, path) if form == ".csv" else _read_jsonl(file)
    except OSError as error:
        raise SetupError(f"Cannot read {path}: {error.strerror or error}.") from None


def tail_files(parquet: Path) -> dict[int, Path]:
    """Number → the rows that are not in ``parquet`` yet, the oldest first."""
    pattern = f".{glob.escape(parquet.name)}.tail-*.jsonl"
    found = {int(p.name.split("tail-")[1].split(".")[0]): p for p in parquet.parent.glob(pattern)}
    return dict(sorted(found.items()))


def tail_file(parquet: Path, number: int) -> Path:
    return parquet.with_name(f".{parquet.name}.tail-{number}.jsonl")


#: Where a Parquet file says up to which number the tail files are in it.
FOLDED = b"muster.folded"


def folded_number(metadata: Mapping[bytes, bytes] | None) -> int:
    return int((metadata or {}).get(FOLDED, b"0"))


def read_jsonl(path: Path) -> list[Row]:
    """The whole lines of a JSON Lines log; none where it does not exist."""
    try:
        with path.open("rb") as file:
            return list(_read_jsonl(file))
    except FileNotFoundError:
        return []


def _read_csv(file: io.BufferedReader, path: Path) -> Iterator[Row]:
    header = file.readline()
    if not csv_header().startswith(header):  # a torn one may be the beginning of ours
        raise SetupError(
            f"{path} is not a log of samples of this version of muster: its columns differ.",
            hint="it is still a plain CSV file; a spreadsheet or pandas reads it.",
        )
    whole = (line.decode("utf-8", "replace") for line in file if line.endswith(b"\n"))
    for fields in csv.reader(whole):
        if len(fields) == len(COLUMNS):  # what a disk has left after a power cut may be anything
            yield _row({k: v or None for k, v in zip(COLUMNS, fields, strict=True)})


def _read_jsonl(file: io.BufferedReader) -> Iterator[Row]:
    for line in file:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and line.endswith(b"\n"):
            yield _row(record)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folded = 0
    if path.exists():
        try:
            table = pq.read_table(path)
        except pa.ArrowInvalid as error:
            raise SetupError(f"{path} is not a Parquet file: {error}.") from None
        for record in table.to_pylist():
            yield _row(record)
        folded = folded_number(table.schema.metadata)
    for number, tail in tail_files(path).items():
        if number > folded:
            yield from read_jsonl(tail)


def _row(record: Mapping[str, Any]) -> Row:
    try:
        values: dict[str, Any] = {
            name: None if record.get(name) is None else kind(record[name])
            for name, kind in COLUMNS.items()
        }
        return Row(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise SetupError(f"A row of the log holds what is no sample: {error}.") from None


def _csv_line(fields: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()
