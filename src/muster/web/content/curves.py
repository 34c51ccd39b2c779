"""What tasks or ranks have logged over time, as few points as a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from muster.api.metrics import Series, series_of
from muster.api.rank_points import RankLog
from muster.api.report.figures import COUNTERS
from muster.base.errors import UsageError
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import Curve
from muster.web.content.decimate import between, decimate
from muster.web.content.plain import line
from muster.web.folder import Folder
from muster.web.query import Query

#: More lines than this in one picture tell nobody anything.
MOST_SERIES = 50
_LOGS: WeakKeyDictionary[Folder, tuple[Lock, RankLog]] = WeakKeyDictionary()


def content(folder: Folder, query: Query) -> dict[str, Any]:
    """``task``: of these tasks; without one those that logged first. ``name``: these metrics, or
    the first there is. ``x``: step or time."""
    px = query.number("px", 1200, 2, 10_000)
    low, high, by_time = query.maybe("from"), query.maybe("to"), query.text("x") == "time"
    found = [*_series(folder, query.many("task"))]
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
    """What a run with ranks has logged, by name."""
    lock, log = _LOGS.setdefault(folder, (Lock(), RankLog(folder.folder.metrics)))
    with lock:
        return log.curves()


def _series(folder: Folder, tasks: list[str]) -> Iterator[Series]:
    if not folder.run.stored.is_gang:
        return _of_tasks(folder, tasks)
    return (Series("", "", name, curve) for name, curve in curves_of(folder).items())


def _of_tasks(folder: Folder, tasks: list[str]) -> Iterator[Series]:
    if not folder.folder.ledger.exists():
        return
    with LedgerReader(folder.folder.ledger) as ledger:
        if tasks:
            numbers = [task_number(ledger, text) for text in tasks[:MOST_SERIES]]
        else:
            numbers = sorted(ledger.tasks_with_metrics())[:MOST_SERIES]
        for number in dict.fromkeys(numbers):
            yield from series_of(ledger, ledger.task(number))


def task_number(ledger: LedgerReader, text: str) -> int:
    """Raises UsageError where ``text`` names no task, or several."""
    found = ledger.find(text)
    if len(found) != 1:
        raise UsageError(f"There is no task {text[:40]!r}, or more than one.")
    return found[0][0]


def _drawn(
    one: Series, px: int, low: float | None, high: float | None, by_time: bool
) -> dict[str, Any]:
    x, y = one.curve.time_s if by_time else one.curve.step, one.curve.value
    if len(x) > 1 and (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
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
