"""Tasks or runs side by side: in which settings they differ, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from muster.api.report.content import flat
from muster.base.errors import UsageError
from muster.farm import canonical
from muster.farm.canonical import short_key
from muster.farm.ledger.read import LedgerReader
from muster.farm.rows import flattened, metrics_of
from muster.web.content.curves import MOST_SERIES, curves_of, in_order
from muster.web.content.plain import line, plain, settings
from muster.web.folder import Folder, Folders
from muster.web.query import Query


class Compared(NamedTuple):
    column: dict[str, Any]
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    metrics: list[str]


def content(folders: Folders, query: Query) -> dict[str, Any]:
    """``run`` and ``task``, each given several times: tasks of one run, a task of each run, or
    without tasks the runs themselves. At most 50 of them.
    """
    runs, tasks = query.many("run"), query.many("task")
    if tasks and len(runs) not in (1, len(tasks)):
        raise UsageError("To compare tasks of several runs, name a run for each of them.")
    pairs = (
        [(runs[0], task) for task in tasks]
        if len(runs) == 1 and tasks
        else zip_longest(runs, tasks)
    )
    found = [
        _task(folders.find(run), task) if task else _run(folders.find(run))
        for run, task in [*pairs][:MOST_SERIES]
    ]
    return {
        "columns": [one.column for one in found],
        "settings": _side_by_side([one.settings for one in found]),
        "results": _side_by_side([one.results for one in found]),
        "metrics": list(dict.fromkeys(name for one in found for name in one.metrics)),
    }


def _side_by_side(found: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per name; None where one does not have it. What differs comes first."""
    rows = []
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name) for one in found]
        differs = any(name not in one or one[name] != values[0] for one in found)
        rows.append({"name": name, "values": values, "differs": differs})
    return sorted(rows, key=lambda row: not row["differs"])


def _task(folder: Folder, task: str) -> Compared:
    run = folder.expect_tasks()
    with LedgerReader(folder.folder.ledger) as ledger:
        row = ledger.task(run.task_number(ledger, task))
        names = ledger.metric_names(row.task_id)
    results = metrics_of(folder.folder, row)
    label = canonical.task_label(row.task_id, row.payload)
    return Compared(
        _column(folder, short_key(row.key), label, row.state.name.lower()),
        settings(flattened(canonical.decode(row.payload))),
        {line(name): plain(value) for name, value in results.items()},
        [line(name) for name in names],
    )


def _run(folder: Folder) -> Compared:
    run = folder.run
    stored, status = run.stored, run.status()
    given = {**dict(flat("", stored.spec)), **dict(flat("", stored.options))}
    given |= {f"code {name}": digest[:12] for name, digest in stored.code.items() if digest}
    return Compared(
        _column(folder, None, folder.path.name, status.state),
        settings({**given, **stored.environment}),
        {line(name): number for name, number in status.counts.items()},
        in_order(curves_of(folder)) if stored.is_gang else [],
    )


def _column(folder: Folder, task: str | None, label: str, state: str) -> dict[str, Any]:
    return {
        "id": folder.id, "run": line(folder.path.name), "task": task, "label": line(label, 200),
        "state": state,
    }  # fmt: skip
