"""What a report holds, as values: a page of sections, and in them tables, pictures and texts.

Nothing here knows HTML. Texts are plain: whoever writes a page makes them harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

#: A table on the page has no more rows than this.
MOST_ROWS = 300


class Mood(StrEnum):
    """How a run stands, at one look."""

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
    """A PNG. ``alt`` tells who cannot see it what it shows; ``caption`` stands below it."""

    path: Path
    alt: str
    caption: str = ""


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
    mood: Mood
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
    """Nested mappings become dotted names; None where there is nothing to say."""
    pairs = tuple(flat("", values))
    return Facts(caption, pairs, are_given) if pairs else None


def section(title: str, blocks: Sequence[Block | None]) -> list[Section]:
    """A section of the blocks that are there, or none."""
    kept = tuple(block for block in blocks if block is not None)
    return [Section(title, kept)] if kept else []


def flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Names and values, where what is inside of a mapping is called ``outer.inner``."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
