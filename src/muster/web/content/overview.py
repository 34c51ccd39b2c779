"""The page of a run: its verdict first, then how far it is and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from muster.api.runs import Run, Status
from muster.api.search_state import read_search
from muster.base.clock import SystemClock
from muster.base.journal import read_journal
from muster.farm.ledger.read import LedgerReader
from muster.run.folder import RunFolder
from muster.run.lock import is_held
from muster.web.content import history, standing
from muster.web.content.plain import finite, line
from muster.web.content.slots import slots
from muster.web.folder import Folder
from muster.web.query import Query

_NUM_RECENT, _MOST_ALERTS = 10, 20
#: What happens in a run without anything being wrong.
_QUIET = ("start", "end", "enqueued")
_Stamps = tuple[bool | None, list[tuple[int, int]]]
#: Slots of a run that goes on are as old as this at most, however many look at them.
_SLOTS_S = 3.0
#: The slots of a run's attempts, when they were read, and whether it went on and its ledger's
#: size and time then.
_SLOTS: WeakKeyDictionary[Folder, tuple[list[dict[str, Any]], float, _Stamps]] = WeakKeyDictionary()


def head(folder: Folder) -> dict[str, Any]:
    """What every page of a run shows at its top."""
    run = folder.run
    stored, status = run.stored, run.status()
    live = standing.picture(folder) if status.is_running else {}
    ended_s = SystemClock().wall_s() if status.is_running else folder.changed_s()
    level, verdict = standing.verdict(run, status)
    return {
        "id": folder.id,
        "name": line(folder.path.name),
        "path": line(str(folder.path)),
        "kind": standing.kind(stored),
        "state": status.state,
        "tabs": standing.tabs(stored),
        "verdict": {
            "level": level,
            "text": verdict,
            "causes": _causes(run),
        },
        "counts": standing.counts(status),
        "progress": standing.progress(status),
        "rate": live.get("rate"),
        "eta_s": standing.eta_s(live),
        "seconds": ended_s - stored.created_s,
        "best": _best(folder.folder, status),
    }


def content(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    has_tasks = not run.stored.is_gang and folder.folder.ledger.exists()
    return {
        **head(folder),
        # The picture of a process that was killed would say for ever that its tasks run.
        "slots": _slots(folder, standing.picture(folder) if is_held(folder.folder) else {})
        if has_tasks else [],
        "devices": history.devices(folder.folder),
        "alerts": _alerts(folder.folder),
        "recent": _recent(folder.folder) if has_tasks else [],
    }  # fmt: skip


def _causes(run: Run) -> list[dict[str, Any]]:
    if run.stored.is_gang or not run.folder.ledger.exists():
        return []
    return [
        {"text": line(group.message or group.outcome), "count": group.num_failed,
         "task": group.tasks[0]}
        for group in run.failures()[:5] if group.num_failed
    ]  # fmt: skip


def _best(folder: RunFolder, status: Status) -> dict[str, Any] | None:
    """Of a search the best trial, of a training the best evaluation."""
    if status.kind == "sweep" and (state := read_search(folder)) is not None:
        for standing_of in state.search.best():
            task = next(iter(state.tasks.get(standing_of.trial, ())), None)
            goal = state.spec.objectives[0].name
            return {"name": line(goal), "value": finite(standing_of.values[0]), "task": task}
    best = (status.training or {}).get("best")
    if isinstance(best, Mapping) and finite(best.get("value")) is not None:
        return {"name": line(str(best.get("metric"))), "value": best["value"], "task": None}
    return None


def _slots(folder: Folder, live: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read again when the ledger has changed, and of a run that goes on after some seconds."""
    now_s = SystemClock().wall_s()
    paths = (folder.folder.ledger, folder.folder.ledger.with_name("ledger.sqlite-wal"))
    stamps = (
        bool(live),
        [(at.st_size, at.st_mtime_ns) for path in paths if path.exists() for at in [path.stat()]],
    )
    found, read_s, before = _SLOTS.get(folder, ([], 0.0, (None, [])))
    if before[0] == bool(live) and (0 <= now_s - read_s < _SLOTS_S if live else before == stamps):
        return found
    with LedgerReader(folder.folder.ledger) as ledger:
        found = slots(ledger, live, now_s)
    _SLOTS[folder] = found, now_s, stamps
    return found


def _alerts(folder: RunFolder) -> list[dict[str, str]]:
    """What happened beside the work: a device in quarantine, a job that was cancelled, a stall."""
    found = []
    for event in read_journal(folder.events):
        if event.get("stall"):
            found.append({"level": "bad", "text": line(str(event["stall"]))})
        elif event.get("event") not in _QUIET and event.get("text"):
            found.append({"level": "paused", "text": line(str(event["text"]))})
    return found[-_MOST_ALERTS:]


def _recent(folder: RunFolder) -> list[dict[str, Any]]:
    with LedgerReader(folder.ledger) as ledger:
        return [
            {"key": one.key, "name": line(one.name, 200), "state": one.state,
             "seconds": one.seconds, "ended": one.ended_s}
            for one in ledger.recent(_NUM_RECENT)
        ]  # fmt: skip
