"""What a report holds, as values: a page of sections, and in them tables, pictures and texts.

Nothing here knows HTML. Texts are plain: whoever writes a page makes them harmless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

#: A table on the page has no more rows than this.
MOST_ROWS = 300


class Health(StrEnum):
    """How a run stands, at a glance."""

    GOOD = "good"
    OPEN = "open"
    BAD = "bad"


class Text(NamedTuple):
    """A sentence or a few."""

    text: str


class Listing(NamedTuple):
    """Lines to be shown as they are: a traceback, a command. ``summary``: what it is about."""

    summary: str
    text: str


class Table(NamedTuple):
    """``rows`` are as long as ``columns``; None is a value that is not there.

    ``note`` says what is not seen, such as rows that were left out.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""


class Facts(NamedTuple):
    """Names and values, one below the other. ``are_given``: settings, with all of their digits."""

    caption: str
    pairs: tuple[tuple[str, Any], ...]
    are_given: bool = False


class Picture(NamedTuple):
    """A PNG. ``alt`` tells those who cannot see it what it shows; ``caption`` stands below it. Two
    that are ``is_small`` stand side by side where there is room."""

    path: Path
    alt: str
    caption: str = ""
    is_small: bool = False


Block = Text | Listing | Table | Facts | Picture


class Section(NamedTuple):
    title: str
    blocks: tuple[Block, ...]


class Page(NamedTuple):
    """``lead`` says in a sentence what the run is; ``state`` how it stands, with counts."""

    title: str
    lead: str
    command: str
    state: str
    health: Health
    sections: tuple[Section, ...]


def table_of(
    caption: str, rows: Iterable[Mapping[str, Any]], *, whole: Path | None = None, which: str = ""
) -> Table | None:
    """A table from records, a column per name; None where there are no records.

    Columns without any value are left out, and so are rows beyond ``MOST_ROWS``; the note then
    says how many there are and that ``whole`` has them all. ``which``: what the first rows are,
    such as those with the lowest loss.
    """
    records = list(rows)
    if not records:
        return None
    shown = records[:MOST_ROWS]
    names = list(dict.fromkeys(name for record in records for name in record))
    known = [name for name in names if any(record.get(name) is not None for record in records)]
    cells = tuple(tuple(record.get(name) for name in known) for record in shown)
    notes = []
    if len(records) > len(shown):
        first = f"{len(shown):,} of {len(records):,} rows"
        notes.append(f"{first}: {which}." if which else f"The first {first}.")
        if whole is not None:
            notes.append(f"All of them are in {whole.name}.")
    if len(known) < len(names):
        empty = ", ".join(name for name in names if name not in known)
        notes.append(f"Columns without any value: {empty}.")
    return Table(caption, tuple(known), cells, " ".join(notes))


def facts_of(caption: str, values: Mapping[str, Any], *, are_given: bool = False) -> Facts | None:
    """Facts from values by name, with dotted names for nested mappings; None without a value."""
    pairs = tuple(flat("", values))
    return Facts(caption, pairs, are_given) if pairs else None


def section(title: str, blocks: Sequence[Block | None]) -> list[Section]:
    """A section of the blocks that are not None; no section where there are none."""
    kept = tuple(block for block in blocks if block is not None)
    return [Section(title, kept)] if kept else []


def flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Names and values, where what is inside a mapping is called ``outer.inner``."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


MISSING = "–"
_MOST_CHARS = 200
_MOST_LIST_CHARS = 60


class Spread(NamedTuple):
    """A mean over ``num`` of ``num_runs`` results, and their standard deviation if there is one."""

    mean: float
    sd: float | None
    num: int
    num_runs: int


class Given(NamedTuple):
    """A setting, to be shown with all of its digits."""

    value: Any


def in_words(value: Any) -> str:
    """A result as people read it: four digits of a number that is not whole.

    >>> [in_words(value) for value in (None, 0.123456, 1234567, 51234.56, 1e-7, True, float("nan"))]
    ['–', '0.1235', '1,234,567', '51,235', '1e-07', 'yes', 'not a number']
    """
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else _cut(str(value))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Given):
        return as_given(value.value)
    if isinstance(value, Spread):
        fewer = f" (n = {value.num:,})" if value.num < value.num_runs else ""
        return with_spread(value.mean, value.sd) + fewer
    if isinstance(value, list | tuple | dict):
        return _cut(_plain(value), _MOST_LIST_CHARS)
    return _cut(str(value))


def as_given(value: Any, most: int = _MOST_CHARS) -> str:
    """A setting as it was given, with all its digits and no commas; at most ``most`` characters.

    >>> [as_given(value) for value in (1e-05, 42000, None, (1, 2.5), True)]
    ['1e-05', '42000', '–', '[1, 2.5]', 'yes']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _cut(repr(value), most)
    if isinstance(value, list | tuple | dict):
        return _cut(json.dumps(value, ensure_ascii=False, default=str), most)
    return _cut(value, most) if isinstance(value, str) and value else in_words(value)


def with_spread(mean: float, sd: float | None) -> str:
    """A mean and the standard deviation beside it, to two digits of the latter.

    >>> with_spread(0.91234, 0.01349), with_spread(12345.6, 210.0), with_spread(0.5, None)
    ('0.912 ± 0.013', '12,350 ± 210', '0.5')
    """
    if sd is None or not (math.isfinite(mean) and math.isfinite(sd)):
        return in_words(mean)
    if sd == 0:
        return f"{in_words(mean)} ± 0"
    decimals = 1 - math.floor(math.log10(sd))
    if decimals > 6 or max(abs(mean), sd) >= 1e7:
        return f"{mean:.4g} ± {sd:.2g}"
    places = max(0, decimals)
    return f"{round(mean, decimals):,.{places}f} ± {round(sd, decimals):,.{places}f}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return in_words(value)


def _cut(text: str, most: int = _MOST_CHARS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
