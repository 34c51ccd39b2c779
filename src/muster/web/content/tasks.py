"""A part of the table of tasks, sorted and filtered."""

from __future__ import annotations

from typing import Any

from muster.web.folder import Folder
from muster.web.query import Query

MOST_ROWS = 500


def content(folder: Folder, query: Query) -> dict[str, Any]:
    folder.expect_tasks()
    return folder.table.page(
        sort=query.text("sort"),
        descending=query.text("desc") == "1",
        text=query.text("filter"),
        state=query.text("state"),
        offset=query.number("offset", 0, 0, 10**9),
        limit=query.number("limit", 200, 1, MOST_ROWS),
    )
