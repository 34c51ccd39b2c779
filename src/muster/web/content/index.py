"""What the pages hold: a function for each, from a run and a query to values that JSON has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.web.content import log, overview, runs, task, tasks
from muster.web.folder import Folder, Folders
from muster.web.query import Query

#: Of one run, by the name of the page.
PAGES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "overview": overview.content,
    "tasks": tasks.content,
    "task": task.content,
    "log": log.content,
}

#: Of everything that there is.
TOP: dict[str, Callable[[Folders, Query], dict[str, Any]]] = {
    "runs": runs.content,
}


def head(folder: Folder) -> dict[str, Any]:
    """What every page of a run shows at its top."""
    found = overview.content(folder, Query())
    return {name: value for name, value in found.items() if name not in _BELOW}


#: Of the overview, what is below the head.
_BELOW = ("slots", "devices", "alerts", "recent")
