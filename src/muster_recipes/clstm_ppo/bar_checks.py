"""Finds what is wrong with bars and names the rows; nothing is repaired silently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster import UsageError
from muster_recipes.clstm_ppo.bars import Array, Bars, Calendar, Integers

_SHOWN = 5
PRICES = ("open", "high", "low", "close")


class Problem(NamedTuple):
    """``row``: which row of data, from 0."""

    row: int
    what: str


def refuse(
    source: str,
    lines: Sequence[int] | None,
    problems: Iterable[Problem],
    hint: str | None = None,
) -> None:
    """Raise if there are any problems, with the first few of them and how many there are.

    Raises:
        UsageError: with row numbers from 1 and, where there are lines, line numbers.
    """
    ordered = sorted(problems)
    if not ordered:
        return
    shown = [f"  {place(problem.row, lines)}: {problem.what}" for problem in ordered[:_SHOWN]]
    more = len(ordered) - len(shown)
    if more:
        shown.append(f"  and {more} more")
    number = "a problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    raise UsageError("\n".join([f"{source} has {number}:", *shown]), hint=hint)


def place(row: int, lines: Sequence[int] | None) -> str:
    """``row 7 (line 8)``."""
    return f"row {row + 1}" if lines is None else f"row {row + 1} (line {lines[row]})"


def check_values(rows: Bars) -> None:
    """Check that prices are above 0, that low and high bound them, and that no volume is negative.

    Raises:
        UsageError: a row breaks one of these rules.
    """
    problems: list[Problem] = []
    for name in PRICES:
        values: Array = getattr(rows, name)
        problems += [
            Problem(row, f"{name} is {values[row]:g}, but a price must be greater than 0")
            for row in _where(values <= 0.0)
        ]
    problems += [
        Problem(row, f"high {rows.high[row]:g} is below low {rows.low[row]:g}")
        for row in _where(rows.high < rows.low)
    ]
    for name in ("open", "close"):
        values = getattr(rows, name)
        outside = ((values < rows.low) | (values > rows.high)) & (rows.low <= rows.high)
        outside &= values > 0.0  # told already
        problems += [
            Problem(row, f"{name} {values[row]:g} is outside low {rows.low[row]:g} to high "
                    f"{rows.high[row]:g}")
            for row in _where(outside)
        ]  # fmt: skip
    problems += [
        Problem(row, f"volume is {rows.volume[row]:g}, but it cannot be negative")
        for row in _where(rows.volume < 0.0)
    ]
    refuse(rows.source, rows.lines, problems)


def check_order(rows: Bars) -> None:
    """Check that the rows of a symbol are in time, each time once. Symbols may be mixed.

    Raises:
        UsageError: a row is not later than the one of its symbol before it.
    """
    problems: list[Problem] = []
    grouped = np.argsort(rows.symbol, kind="stable")
    ends = np.cumsum(np.bincount(rows.symbol))
    for symbol, members in zip(rows.symbols, np.split(grouped, ends[:-1]), strict=True):
        time = rows.time[members]
        first = _first_places(time)
        for at in _where((first != np.arange(len(time))) | (np.diff(time, prepend=time[0]) < 0)):
            is_repeated = first[at] != at
            other = place(int(members[first[at] if is_repeated else at - 1]), rows.lines)
            what = (
                f"{stamp(time[at])} of {symbol} is there already in {other}"
                if is_repeated
                else f"{stamp(time[at])} of {symbol} comes after {stamp(time[at - 1])} in {other}"
            )
            problems.append(Problem(int(members[at]), what))
    refuse(
        rows.source,
        rows.lines,
        problems,
        hint="each symbol's rows must be sorted by timestamp, without repetition; several symbols "
        "are told apart by a column called symbol.",
    )


def check_gaps(bars: Bars, calendar: Calendar, max_gap_bars: float) -> None:
    """Check that no symbol misses more than ``max_gap_bars`` bars in a row.

    Raises:
        UsageError: with every gap's two ends: dates and, of a file, rows.
    """
    gaps: list[str] = []
    for part in bars.ranges():
        time = bars.time[part]
        missing = calendar.missing(time[:-1], time[1:])
        gaps += [
            f"  {bars.symbols[bars.symbol[part.start]]}: about {missing[at]:.0f} bars are missing "
            f"between {_moment(bars, part.start + at)} and {_moment(bars, part.start + at + 1)}"
            for at in _where(missing > max_gap_bars + 1e-9)
        ]
    if not gaps:
        return
    more = [f"  and {len(gaps) - _SHOWN} more"] if len(gaps) > _SHOWN else []
    number = "a gap" if len(gaps) == 1 else f"{len(gaps)} gaps"
    raise UsageError(
        "\n".join([f"{bars.source} has {number} of more than {max_gap_bars:g} bars, over which "
                   "returns and indicators would be wrong:", *gaps[:_SHOWN], *more]),
        hint="fill or cut the data, or allow it with --max-gap-bars.",
    )  # fmt: skip


def _moment(bars: Bars, at: int) -> str:
    """``2024-01-02 in row 7 (line 8)``."""
    when = stamp(bars.time[at])
    return when if bars.row is None else f"{when} in {place(int(bars.row[at]), bars.lines)}"


def stamp(time_s: int | np.int64) -> str:
    """A date, or a date and a time (UTC)."""
    text = str(np.datetime64(int(time_s), "s")).replace("T", " ")
    return text.removesuffix(" 00:00:00")


def _first_places(time: Integers) -> Integers:
    """For each entry, the first place at which its time stands."""
    _, first, inverse = np.unique(time, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)


def _where(condition: NDArray[np.bool_]) -> list[int]:
    found: list[int] = np.flatnonzero(condition).tolist()
    return found
