"""What the pages hold: a function for each, from a run and a query to values that JSON has; and
what is said where one fails.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from muster.base.errors import MusterError, SetupError, UsageError
from muster.base.shown_text import one_line, without_secrets
from muster.web.content import (
    about,
    compare,
    curves,
    devices,
    download,
    kinds,
    overview,
    runs,
    task,
)
from muster.web.folder import Folder, Folders
from muster.web.query import Query

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
    "about": about.content,
}

#: Of one run, as a file.
FILES: dict[str, Callable[[Folder, Query], download.Rows]] = {
    "tasks": download.tasks,
    "curves": download.curves,
}

#: Of everything that there is.
TOP: dict[str, Callable[[Folders, Query], dict[str, Any]]] = {
    "runs": runs.content,
    "devices": devices.content,
    "compare": compare.content,
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
        text = download.written(FILES[name](folder, query), suffix)
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
        self._tell(one_line(without_secrets(f"A page failed: {kind}: {str(error)[:500]}")))
