"""Reading bars from CSV and Parquet, with errors that name the row."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muster import UsageError
from muster_recipes.clstm_ppo.bar_checks import (
    PRICES,
    Problem,
    check_order,
    check_values,
    refuse,
)
from muster_recipes.clstm_ppo.bars import COLUMNS, Array, Bars

NUMBERS = (*PRICES, "volume")
REQUIRED = ("timestamp", *NUMBERS)
#: Other names of a column, used where its own name is not there.
_SAME = {"timestamp": ("date", "datetime", "time"), "symbol": ("ticker",)}
_DELIMITERS = ",;\t"
#: From which number on a timestamp is in which unit: seconds up to the year 5138, then ms, us, ns.
_EPOCH_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (0.0, 1.0))
#: Whole numbers of eight digits are dates, YYYYMMDD: as seconds they would be days of 1970.
_FIRST_DATE, _LAST_DATE = 10_000_000, 99_999_999

#: The years 1800 to 2200; anything else is a mistake, and not every calendar function takes it.
_EARLIEST_S, _LATEST_S = -5_364_662_400.0, 7_258_118_400.0


class _Table(NamedTuple):
    """``columns``: values as they stand, by name in lower case. ``lines``: of each row."""

    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] | None


def read_bars(path: Path) -> Bars:
    """The bars of a file, sorted by symbol.

    Columns, in any order and case: timestamp (or date, datetime, time), open, high, low, close,
    volume, and optionally symbol (or ticker); without it the file's name is the symbol. Others are
    ignored. A timestamp is an ISO date or date-time, with a zone or in UTC; YYYYMMDD, as text or
    as a number; or another number: seconds, milliseconds, microseconds or nanoseconds since 1970,
    told apart by size.

    Raises:
        UsageError: the file cannot be read, or a row cannot be used: with the first few rows (from
            1) and their lines.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{path} ends in {path.suffix or 'nothing'}: --data must be one of "
            f"{', '.join(sorted(_READERS))}."
        )
    if not path.is_file():
        raise UsageError(
            f"{path} {'is not a file' if path.exists() else 'does not exist'}.",
            hint="--data names one file of bars; without it a market is simulated.",
        )
    try:
        table = reader(path)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from None
    rows = _rows(path, table)
    check_values(rows)
    check_order(rows)
    # Symbols by name, each in time as its rows are.
    order = np.argsort(rows.symbol, kind="stable")
    columns = {name: getattr(rows, name)[order] for name in COLUMNS}
    return dataclasses.replace(rows, **columns, row=order.astype(np.int64))


def _read_csv(path: Path) -> _Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(_DELIMITERS, key=first.count)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(reader, None)
            records: list[list[str]] = []
            lines: list[int] = []
            for record in reader:
                if record:
                    records.append(record)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not text in UTF-8 (byte {error.start}: {error.reason}).",
            hint="save it as a CSV file in UTF-8.",
        ) from None
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}.") from None
    if names is None:
        raise UsageError(f"{path} is empty.")
    width = len(names)
    refuse(
        str(path),
        lines,
        (
            Problem(row, f"{len(record)} values, but the header has {width} columns")
            for row, record in enumerate(records)
            if len(record) != width
        ),
    )
    columns = list(zip(*records, strict=True)) if records else [()] * width
    return _Table(_named(path, names, columns), lines)


def _read_parquet(path: Path) -> _Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, ValueError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"{path} cannot be read as Parquet: {cause}.") from None
    columns = [_plain(column) for column in table.columns]
    return _Table(_named(path, table.column_names, columns), None)


def _plain(column: Any) -> list[Any]:
    """A column as Python values, with moments as seconds since 1970, whatever their unit."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):
        column = column.cast(pyarrow.timestamp("us", tz=column.type.tz), safe=False)
        column = column.cast(pyarrow.int64())
        return [None if value is None else _Seconds(value / 1e6) for value in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


class _Seconds(float):
    """A number that is known to be seconds since 1970, so that its unit is not guessed."""


_READERS: Mapping[str, Callable[[Path], _Table]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
}


def _named(
    path: Path, names: Sequence[str], columns: Sequence[Sequence[Any]]
) -> dict[str, Sequence[Any]]:
    """The columns that are needed, by their proper names."""
    plain = [name.strip().lower() for name in names]
    found: dict[str, Sequence[Any]] = {}
    for wanted in (*REQUIRED, "symbol"):
        here = next((n for n in (wanted, *_SAME.get(wanted, ())) if n in plain), None)
        if here is None:
            continue
        if plain.count(here) > 1:
            raise UsageError(f"{path} has {plain.count(here)} columns that are called {here!r}.")
        found[wanted] = columns[plain.index(here)]
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        near = {name: difflib.get_close_matches(name, plain, n=1) for name in missing}
        proposals = [f"is {match[0]!r} meant as {name!r}?" for name, match in near.items() if match]
        raise UsageError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(repr(name) for name in names) or 'none'}.",
            hint=" ".join([*proposals, f"The first line must name {', '.join(REQUIRED)} and, for "
                           "several symbols, symbol."]),
        )  # fmt: skip
    return found


def _rows(path: Path, table: _Table) -> Bars:
    """Values as numbers, in the order of the file.

    Raises:
        UsageError: there are no rows, or a value is missing or not of its kind.
    """
    columns, lines = table
    if not len(columns["timestamp"]):
        raise UsageError(f"{path} has no rows of data, only column names.")
    problems: list[Problem] = []
    time = _converted("timestamp", columns["timestamp"], _seconds, "no date or time", problems)
    numbers: dict[str, Any] = {
        name: _converted(name, columns[name], _number, "not a number", problems) for name in NUMBERS
    }
    symbol = columns.get("symbol", [path.stem] * len(time))
    names = ["" if value is None else str(value).strip() for value in symbol]
    problems += [Problem(row, "symbol is empty") for row, name in enumerate(names) if not name]
    refuse(str(path), lines, problems)
    symbols, number = np.unique(np.array(names), return_inverse=True)
    return Bars(
        source=str(path),
        lines=lines,
        symbols=tuple(symbols.tolist()),
        symbol=number.astype(np.int64),
        time=np.floor(time).astype(np.int64),
        **numbers,
    )


def _converted(
    name: str,
    values: Sequence[Any],
    convert: Callable[[Any], float],
    otherwise: str,
    problems: list[Problem],
) -> Array:
    """Finite numbers; each value that is none is added to ``problems``."""
    try:  # all at once, which nearly always works
        numbers = np.fromiter(map(convert, values), np.float64, len(values))
        if np.isfinite(numbers).all():
            return numbers
    except (ValueError, TypeError, OverflowError):
        pass
    numbers = np.zeros(len(values))
    for row, value in enumerate(values):
        try:
            number = convert(value)
        except (ValueError, TypeError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            numbers[row] = number
        elif value is None or not str(value).strip():
            problems.append(Problem(row, f"{name} is empty"))
        elif str(value).strip().lower() in ("nan", "na", "n/a", "null", "none"):
            problems.append(Problem(row, f"{name} is missing ({str(value).strip()})"))
        else:
            problems.append(Problem(row, f"{name} is {str(value)[:40]!r}, {otherwise}"))
    return numbers


def _number(value: Any) -> float:
    # Python would take the underscore of 1_000 as nothing; other programs would not.
    if isinstance(value, str) and "_" in value:
        raise ValueError(value)
    return float(value)


def _seconds(value: Any) -> float:
    """Seconds since 1970; ValueError or TypeError where ``value`` is no moment."""
    seconds = _unbounded_seconds(value)
    if not _EARLIEST_S <= seconds < _LATEST_S:
        raise ValueError(value)
    return seconds


def _unbounded_seconds(value: Any) -> float:
    if isinstance(value, _Seconds):
        return float(value)
    if isinstance(value, str):
        text = value.strip()
        if not text.replace(".", "", 1).removeprefix("-").isdecimal():
            return _utc(datetime.fromisoformat(text))
        value = float(text)
    if isinstance(value, datetime):
        return _utc(value)
    if isinstance(value, date):
        return _utc(datetime(value.year, value.month, value.day))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    if _FIRST_DATE <= value <= _LAST_DATE and value == int(value):
        return _utc(datetime.strptime(str(int(value)), "%Y%m%d"))
    per_second = next(unit for least, unit in _EPOCH_UNITS if abs(value) >= least)
    return value / per_second


def _utc(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
