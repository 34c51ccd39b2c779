"""The table of a run's tasks, kept to be sorted and filtered."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from muster.farm import rows
from muster.run.folder import RunFolder

_GROUPS = {"param": "setting", "metric": "result", "system": "system"}


class TaskTable:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def page(
        self, *, sort: str, descending: bool, text: str, state: str, offset: int, limit: int
    ) -> dict[str, Any]:
        table = rows.columns(self._folder)
        columns = [
            {"key": name, "label": name, "group": _GROUPS[part],
             "numeric": pa.types.is_integer(kind) or pa.types.is_floating(kind)}
            for name, (part, _, kind) in table.items()
        ]  # fmt: skip
        sources = [(rows.PARTS[part], name) for part, name, _ in table.values()]
        names = list(table)
        every = [[row[part].get(name) for part, name in sources] for row in rows.rows(self._folder)]
        if state:
            at = names.index("state")
            every = [row for row in every if row[at] == state]
        return {"columns": columns, "total": len(every), "offset": offset,
                "rows": [{"key": row[names.index("task")], "cells": row}
                         for row in every[offset : offset + limit]]}  # fmt: skip
