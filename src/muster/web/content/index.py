"""What the pages hold: a function for each, from a run and a query to values that JSON has; the
table of tasks and the curves as files, whole, written while they are read; and what is said where
one fails.
"""

from __future__ import annotations

import csv
import io
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from muster.api.trackers.metrics import Series
from muster.base.errors import MusterError, SetupError, UsageError
from muster.base.shown_text import safe_line
from muster.farm.canonical import csv_cell
from muster.web.content import (
    curves,
    kinds,
    overview,
    runs,
    task,
)
from muster.web.content.curves import series
from muster.web.content.plain import line, to_json
from muster.web.folder import Folder, Folders
from muster.web.query import Query

#: What comes first names the columns; then rows, some at a time.
Rows = Iterator[Sequence[Sequence[Any]]]
_POINTS = 10_000


def task_rows(folder: Folder, query: Query) -> Rows:
    """The rows of the table, with the filter and in the order of the page."""
    folder.expect_tasks()
    return folder.table.parts(**task.chosen(query))


def curve_rows(folder: Folder, query: Query) -> Rows:
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


#: Of one run, by the name of the page.
PAGES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "overview": overview.content,
    "tasks": task.table,
    "task": task.content,
    "log": task.log,
    "curves": curves.content,
    "search": kinds.of_search,
    "training": kinds.of_training,
    "map": kinds.of_map,
    "errors": overview.errors,
    "about": overview.about,
}

#: Of one run, as a file.
FILES: dict[str, Callable[[Folder, Query], Rows]] = {
    "tasks": task_rows,
    "curves": curve_rows,
}

#: Of everything that there is.
TOP: dict[str, Callable[[Folders, Query], dict[str, Any]]] = {
    "runs": runs.content,
    "devices": runs.of_devices,
    "compare": curves.compared,
}
_MOST_SAID = 50


def data_of(folders: Folders, name: str, run: str | None, query: Query) -> dict[str, Any]:
    """The data of a page. Raises MusterError for what is not there, or cannot be read."""
    with explained(run):
        if run is None:
            if name not in TOP:
                raise UsageError(f"There is no page {name[:40]!r}.")
            return TOP[name](folders, query)
        folder = folders.find(run)
        if name == "head":
            return overview.head(folder)
        if name not in PAGES:
            raise UsageError(f"A run has no page {name[:40]!r}.")
        return PAGES[name](folder, query)


def file_of(
    folders: Folders, name: str, suffix: str, run: str, query: Query
) -> tuple[str, Iterator[bytes]]:
    """A table as a file: its name and its text. Raises MusterError as `data_of` does."""
    with explained(run):
        folder = folders.find(run)
        if name not in FILES:
            raise UsageError(f"A run has no table {name[:40]!r}.")
        text = written(FILES[name](folder, query), suffix)
        return f"{folder.path.name}-{name}.{suffix}", chain([next(text)], text)


@contextmanager
def explained(run: str | None) -> Iterator[None]:
    """Whatever goes wrong with a page as MusterError: a run may go, or be half written, at any
    moment; and what a run has recorded may be damaged in any way.
    """
    try:
        yield
    except MusterError:
        raise
    except OSError as error:
        text = f"Cannot read {error.filename or run}: {error.strerror or error}."
        raise SetupError(text) from error
    except Exception as error:
        raise SetupError(
            f"This page cannot be made: what the run has recorded is damaged or not whole "
            f"({type(error).__name__}: {str(error)[:200]}).",
            hint="the other pages of the run may still be read.",
        ) from error


class Defects:
    """Methods may be called from any thread."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def note(self, error: BaseException | None) -> None:
        """Say it, unless it is a sentence of ours, a file that cannot be read, or was said."""
        if error is None or isinstance(error, MusterError | OSError):
            return
        steps = traceback.extract_tb(error.__traceback__)
        ours = [step for step in steps if "muster" in Path(step.filename).parts] or steps
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        kind = f"{type(error).__name__} at {where}"
        with self._lock:
            if kind in self._said or len(self._said) >= _MOST_SAID:
                return
            self._said.add(kind)
        self._tell(safe_line(f"A page failed: {kind}: {str(error)[:500]}"))
