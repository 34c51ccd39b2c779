"""Samples in files: the three formats, what a killed monitor has left, and sums of many samples."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from muster.base.errors import SetupError, UsageError
from muster.monitor.sample import COLUMNS, Row, rounded

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


def last_rows(path: Path, most_bytes: int) -> Iterator[Row]:
    """The rows in the last ``most_bytes`` of a CSV log; raises as `read_rows`."""
    try:
        with path.open("rb") as file:
            header = file.readline()
            size = file.seek(0, io.SEEK_END)
            file.seek(max(len(header), size - most_bytes))
            if file.tell() > len(header):
                file.readline()  # the rest of a row
            whole = io.BytesIO(header + file.read())
    except OSError as error:
        raise SetupError(f"Cannot read {path}: {error.strerror or error}.") from None
    yield from _read_csv(whole, path)


def tail_files(parquet: Path) -> dict[int, Path]:
    """Number → the rows that are not in ``parquet`` yet, the oldest first."""
    pattern = f".{glob.escape(parquet.name)}.tail-*.jsonl"
    found = {int(p.name.split("tail-")[1].split(".")[0]): p for p in parquet.parent.glob(pattern)}
    return dict(sorted(found.items()))


def tail_file(parquet: Path, number: int) -> Path:
    return parquet.with_name(f".{parquet.name}.tail-{number}.jsonl")


#: In its metadata a Parquet file says which tail file, by its number, was the last that went in.
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


def _read_csv(file: BinaryIO, path: Path) -> Iterator[Row]:
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


#: What every sample has.
_ALWAYS = ("time_utc", "elapsed_s", "host", "device")


def _row(record: Mapping[str, Any]) -> Row:
    if missing := [name for name in _ALWAYS if record.get(name) is None]:
        raise SetupError(f"A row of the log is not a sample: it has no {missing[0]}.")
    try:
        values: dict[str, Any] = {
            name: None if record.get(name) is None else kind(record[name])
            for name, kind in COLUMNS.items()
        }
        return Row(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise SetupError(f"A row of the log is not a sample: {error}.") from None


def _csv_line(fields: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()


#: Reasons why clocks are held down on purpose, which does not count as throttling.
_WANTED = {"none", "clocks set by user", "sync boost", "display clocks"}


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """One device of one machine; None: never known.

    ``energy_wh``: power over time by the trapezoid rule, without the times between two monitors.
    ``throttled_percent``: of the samples that know, those with clocks held down by power, heat or
    hardware.
    ``num_lost``: samples in which the GPU gave no figures.
    """

    host: str
    device: str
    name: str | None
    num_samples: int
    num_lost: int
    duration_s: float
    mean_utilisation_percent: float | None
    max_utilisation_percent: float | None
    max_memory_used_mib: int | None
    memory_total_mib: int | None
    mean_power_w: float | None
    energy_wh: float | None
    max_temperature_c: int | None
    throttled_percent: float | None


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0
    highest: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.highest = value if self.highest is None else max(self.highest, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Device:
    name: str | None = None
    num_samples: int = 0
    num_lost: int = 0
    duration_s: float = 0.0
    energy_ws: float = 0.0
    utilisation: _Mean = field(default_factory=_Mean)
    memory: _Mean = field(default_factory=_Mean)
    power: _Mean = field(default_factory=_Mean)
    temperature: _Mean = field(default_factory=_Mean)
    throttled: _Mean = field(default_factory=_Mean)
    memory_total_mib: int | None = None
    before: tuple[float, float | None] | None = None  # elapsed_s and power_w of the row before


class Summary:
    """Means, peaks and energy per device. Rows are added as they come."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._devices: dict[tuple[str, str], _Device] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        device = self._devices.setdefault((row.host, row.device), _Device())
        device.name = row.name or device.name
        device.num_samples += 1
        device.num_lost += row.lost is not None
        device.memory_total_mib = row.memory_total_mib or device.memory_total_mib
        device.utilisation.add(row.utilisation_percent)
        device.memory.add(row.memory_used_mib)
        device.power.add(row.power_w)
        device.temperature.add(row.temperature_c)
        if row.throttle is not None:
            device.throttled.add(100.0 * bool(set(row.throttle.split("+")) - _WANTED))
        self._add_time(device, row)

    def _add_time(self, device: _Device, row: Row) -> None:
        before, device.before = device.before, (row.elapsed_s, row.power_w)
        if before is None or row.elapsed_s <= before[0]:
            return  # the first row of another monitor: nothing is known of the time between
        seconds = row.elapsed_s - before[0]
        device.duration_s += seconds
        if before[1] is not None and row.power_w is not None:
            device.energy_ws += seconds * (before[1] + row.power_w) / 2

    def devices(self) -> tuple[DeviceSummary, ...]:
        """In the order in which devices were first seen."""
        return tuple(_summed(host, name, d) for (host, name), d in self._devices.items())


def _summed(host: str, label: str, device: _Device) -> DeviceSummary:
    return DeviceSummary(
        host=host,
        device=label,
        name=device.name,
        num_samples=device.num_samples,
        num_lost=device.num_lost,
        duration_s=round(device.duration_s, 3),
        mean_utilisation_percent=rounded(device.utilisation.mean),
        max_utilisation_percent=device.utilisation.highest,
        max_memory_used_mib=_whole(device.memory.highest),
        memory_total_mib=device.memory_total_mib,
        mean_power_w=rounded(device.power.mean),
        energy_wh=round(device.energy_ws / 3600, 4) if device.power.count > 1 else None,
        max_temperature_c=_whole(device.temperature.highest),
        throttled_percent=rounded(device.throttled.mean),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
