"""What tasks or ranks have logged over time, as few points as a screen can show; and tasks or runs
side by side: in which settings they differ, and what came of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from muster.api.report.content import flat
from muster.api.report.figures import COUNTERS
from muster.api.trackers.metrics import RankLog, Series, series_of
from muster.base.errors import UsageError
from muster.farm import canonical
from muster.farm.canonical import short_key
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import Curve
from muster.farm.rows import flattened, metrics_of
from muster.web.content.plain import line, plain, settings
from muster.web.folder import Folder, Folders
from muster.web.query import Query

#: More lines than this in one picture tell nobody anything.
MOST_SERIES = 50
_LOGS: WeakKeyDictionary[Folder, tuple[Lock, RankLog]] = WeakKeyDictionary()


def content(folder: Folder, query: Query) -> dict[str, Any]:
    """``task``: of these tasks; without one those that logged first. ``name``: these metrics, or
    the first there is. ``x``: step or time."""
    px = query.number("px", 1200, 2, 10_000)
    low, high, by_time = query.maybe("from"), query.maybe("to"), query.text("x") == "time"
    found = [one for part in series(folder, query.many("task")) for one in part]
    names = in_order(one.name for one in found)
    wanted = query.many("name") or names[:1]
    chosen = [one for one in found if line(one.name) in wanted]
    return {
        "names": names,
        "series": [_drawn(one, px, low, high, by_time) for one in chosen[:MOST_SERIES]],
        "left_out": max(0, len(chosen) - MOST_SERIES),
    }


def in_order(names: Iterable[str]) -> list[str]:
    """In the order in which they were logged, but what only counts comes last."""
    known = map(line, dict.fromkeys(names))
    return sorted(known, key=lambda name: name.rpartition("/")[2] in COUNTERS)


def curves_of(folder: Folder) -> dict[str, Curve]:
    """What a run with ranks has logged, or how a map got on, by name."""
    lock, log = _LOGS.setdefault(folder, (Lock(), RankLog(folder.folder.metrics)))
    with lock:
        return log.curves()


def series(folder: Folder, tasks: list[str]) -> Iterator[list[Series]]:
    """What these tasks have logged, or the first ones that did, task by task; of ranks, and of a
    map as a whole, all there is. Raises UsageError at once where there is no such task. Any thread
    may ask for the next part.
    """
    run, path = folder.run, folder.folder.ledger
    whole: list[Series] = []
    if run.stored.is_gang or (run.stored.is_map and not tasks):
        whole = [Series("", "", name, curve) for name, curve in curves_of(folder).items()]
    if run.stored.is_gang or not path.exists():
        return iter([whole])
    with LedgerReader(path) as ledger:
        if tasks:
            numbers = [run.task_number(ledger, text) for text in tasks[:MOST_SERIES]]
        else:
            numbers = sorted(ledger.tasks_with_metrics())[:MOST_SERIES]
    return chain([whole], (_of_task(path, number) for number in dict.fromkeys(numbers)))


def _of_task(path: Path, number: int) -> list[Series]:
    """With a connection of its own: SQLite's serve only the thread that has opened them."""
    with LedgerReader(path) as ledger:
        return [*series_of(ledger, ledger.task(number))]


def _drawn(
    one: Series, px: int, low: float | None, high: float | None, by_time: bool
) -> dict[str, Any]:
    x, y = _ascending(one.curve.time_s if by_time else one.curve.step, one.curve.value)
    part = between(x, low, high)
    drawn = decimate(x[part], y[part], px)
    return {
        "task": one.task,
        "label": line(one.label, 200),
        "name": line(one.name),
        "x": drawn.x,
        "y": drawn.y,
        "points": len(x),
        "not_finite": int((~np.isfinite(y)).sum()),
    }


Column = NDArray[Any]


class Drawn(NamedTuple):
    """Points to draw, x ascending; y is None where a value is not finite: a gap."""

    x: list[float]
    y: list[float | None]


def decimate(x: Column, y: Column, px: int) -> Drawn:
    """At most ``2 * px`` of these points: the first, the last, and of each of ``px - 1`` columns of
    pixels between them the lowest and the highest. ``px`` is 2 at least.

    Every point of the result is one of those given; a point without an x is left out. A column
    that holds no finite value at all keeps one point, so that a gap stays a gap.
    """
    known = np.isfinite(x)
    if not known.all():
        x, y = x[known], y[known]
    x, y = _ascending(x, y)
    if len(x) > 2 * px:
        kept = _kept(x.astype(float), y.astype(float), px)
        x, y = x[kept], y[kept]
    return Drawn(x.tolist(), [v if math.isfinite(v) else None for v in y.tolist()])


def _kept(x: Column, y: Column, px: int) -> Column:
    """The positions that stay, ascending."""
    inner = np.arange(1, len(x) - 1)
    span = x[-1] - x[0]
    column = np.zeros(len(inner), np.int64)
    if span > 0 and math.isfinite(span):
        share = (x[inner] - x[0]) / span
        column = np.minimum((share * (px - 1)).astype(np.int64), px - 2)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    which = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(inner)))
    is_known = np.isfinite(y[inner])
    lowest = _chosen(np.minimum, np.where(is_known, y[inner], np.inf), starts, which)
    highest = _chosen(np.maximum, np.where(is_known, y[inner], -np.inf), starts, which)
    return np.unique(np.concatenate([[0], inner[lowest], inner[highest], [len(x) - 1]]))


def _chosen(choose: np.ufunc, values: Column, starts: Column, which: Column) -> Column:
    """For every column of pixels the position of the first of its values that is chosen."""
    best = choose.reduceat(values, starts)
    places = np.where(values == best[which], np.arange(len(values)), len(values))
    return np.minimum.reduceat(places, starts)


def between(x: Column, low: float | None, high: float | None) -> slice:
    """Where ``x``, which ascends, lies from ``low`` to ``high``, with a neighbour on each side, so
    that lines reach the edges."""
    first = 0 if low is None else int(np.searchsorted(x, low, "left")) - 1
    last = len(x) if high is None else int(np.searchsorted(x, high, "right")) + 1
    return slice(max(0, first), last)


def _ascending(x: Column, y: Column) -> tuple[Column, Column]:
    if len(x) < 2 or not (np.diff(x) < 0).any():
        return x, y
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


class Compared(NamedTuple):
    column: dict[str, Any]
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    metrics: list[str]


def compared(folders: Folders, query: Query) -> dict[str, Any]:
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
