"""What the pages hold: a function for each, from a run and a query to values that JSON has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.web.content import (
    about,
    compare,
    curves,
    devices,
    errors,
    log,
    map,
    overview,
    runs,
    search,
    task,
    tasks,
    training,
)
from muster.web.folder import Folder, Folders
from muster.web.query import Query

#: Of one run, by the name of the page.
PAGES: dict[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "overview": overview.content,
    "tasks": tasks.content,
    "task": task.content,
    "log": log.content,
    "curves": curves.content,
    "search": search.content,
    "training": training.content,
    "map": map.content,
    "errors": errors.content,
    "about": about.content,
}

#: Of everything that there is.
TOP: dict[str, Callable[[Folders, Query], dict[str, Any]]] = {
    "runs": runs.content,
    "devices": devices.content,
    "compare": compare.content,
}
