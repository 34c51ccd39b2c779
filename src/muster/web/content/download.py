"""The table of tasks and the curves as CSV and JSON, whole, written while they are read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from muster.api.trackers.metrics import Series
from muster.base.errors import UsageError
from muster.farm.canonical import csv_cell
from muster.web.content.curves import series
from muster.web.content.plain import line, to_json
from muster.web.folder import Folder
from muster.web.query import Query

#: What comes first names the columns; then rows, some at a time.
Rows = Iterator[Sequence[Sequence[Any]]]
_POINTS = 10_000


def tasks(folder: Folder, query: Query) -> Rows:
    """The rows of the table, with the filter and in the order of the page."""
    folder.expect_tasks()
    return folder.table.parts(
        sort=query.text("sort"),
        descending=query.text("desc") == "1",
        text=query.text("filter"),
        state=query.text("state"),
    )


def curves(folder: Folder, query: Query) -> Rows:
    """Every point: of these tasks, or of the first ones that logged; of these metrics, or all."""
    parts = series(folder, query.many("task"))
    return _points(parts, set(query.many("name")))


def _points(parts: Iterator[list[Series]], wanted: set[str]) -> Rows:
    yield [["task", "name", "step", "time", "value"]]
    for one in chain.from_iterable(parts):
        if wanted and line(one.name) not in wanted:
            continue
        columns = (one.curve.step, one.curve.time_s, one.curve.value)
        for begin in range(0, len(one.curve.step), _POINTS):
            some = [column[begin : begin + _POINTS].tolist() for column in columns]
            yield [(one.task, one.name, *point) for point in zip(*some, strict=True)]


def written(rows: Rows, suffix: str) -> Iterator[bytes]:
    """As text of this kind. Raises UsageError for another one."""
    if suffix not in _WRITERS:
        raise UsageError(f"Nothing is saved as {suffix[:10]!r}.", hint="ask for .csv or .json.")
    return _WRITERS[suffix](rows)


def _as_csv(rows: Rows) -> Iterator[bytes]:
    """A text that a spreadsheet would take for a formula gets an apostrophe in front, as in what
    `muster export` writes: whoever opens the file runs nothing that a task has returned.
    """
    for some in rows:
        text = io.StringIO()
        # With \r\n, as the standard has it: else some Pythons leave a lone \r without quotes.
        csv.writer(text, lineterminator="\r\n").writerows(map(_csv_cells, some))
        yield text.getvalue().encode("utf-8", "backslashreplace")


def _csv_cells(row: Iterable[Any]) -> list[Any]:
    words = {True: "true", False: "false"}
    return [
        csv_cell(cell) if isinstance(cell, str) else words[cell] if type(cell) is bool else cell
        for cell in row
    ]


def _as_json(rows: Rows) -> Iterator[bytes]:
    """A list with an object for each row; what is not finite is null."""
    names = next(rows)[0]
    front = b"["
    for some in rows:
        if some:
            found = (to_json(dict(zip(names, _finite(row), strict=True))) for row in some)
            yield front + b"\n" + b",\n".join(found)
            front = b","
    yield b"\n]\n" if front == b"," else b"[]\n"


def _finite(row: Iterable[Any]) -> Iterator[Any]:
    return (None if type(one) is float and not math.isfinite(one) else one for one in row)


_WRITERS: dict[str, Callable[[Rows], Iterator[bytes]]] = {"csv": _as_csv, "json": _as_json}
