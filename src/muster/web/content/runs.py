"""How a run stands, as the first page and its own say it: counts, progress, a verdict."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from muster.api.runs import Status
from muster.api.why import verdict
from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.run.record import RunRecord
from muster.web.folder import Folder, Folders
from muster.web.query import Query

_TABS = {
    "sweep": ("overview", "tasks", "errors", "about"),
    "map": ("overview", "map", "tasks", "errors", "about"),
    "train": ("overview", "training", "errors", "about"),
    "agent": ("overview", "training", "errors", "about"),
    "run": ("overview", "training", "errors", "about"),
}


def content(folders: Folders, query: Query) -> dict[str, Any]:
    return {"runs": [_row(folder) for folder in folders.all()]}


def _row(folder: Folder) -> dict[str, Any]:
    """A run that cannot be read says why; it does not hide the others."""
    row: dict[str, Any] = {
        "id": folder.id, "name": folder.path.name, "path": str(folder.path), "kind": None,
        "state": "unreadable", "level": "bad", "verdict": "", "counts": None, "progress": None,
        "eta_s": None, "started": None, "changed": None,
    }  # fmt: skip
    try:
        run = folder.run
        stored, status = run.stored, run.status()
        level, sentence = verdict(run, status)
        row |= {
            "kind": kind(stored),
            "state": status.state,
            "level": level,
            "verdict": sentence,
            "counts": counts(status),
            "progress": progress(status),
            "eta_s": eta_s(picture(folder)) if status.is_running else None,
            "started": stored.created_s,
            "changed": folder.changed_s(),
        }
    except MusterError as error:
        row["verdict"] = str(error)
    except OSError as error:
        row["verdict"] = f"Cannot read {error.filename or folder.path}: {error.strerror or error}."
    return row


def tabs(stored: RunRecord) -> list[str]:
    """The pages that say something about a run of this kind."""
    found = list(_TABS[stored.kind])
    if stored.is_search:
        found.insert(1, "search")
    return found


def kind(stored: RunRecord) -> str:
    """A search is a sweep of its own kind."""
    return "search" if stored.is_search else stored.kind


def counts(status: Status) -> dict[str, int]:
    found = dict.fromkeys(("done", "failed", "running", "waiting", "stopped", "cancelled"), 0)
    found |= status.counts
    return {**found, "total": status.total}


def progress(status: Status) -> float | None:
    """From 0 to 1; None where nothing is counted."""
    ended = status.num_done
    if ended is None or not status.num_total:
        return 1.0 if status.state == "done" else None
    ended += status.counts["failed"] + status.counts["cancelled"]
    return min(1.0, ended / status.num_total)


def picture(folder: Folder) -> dict[str, Any]:
    """The last picture that the run's own process has drawn of it; empty where there is none."""
    with suppress(MusterError):
        found = read_json(folder.folder.status_json, "status")
        if isinstance(found, dict):
            return found
    return {}


def eta_s(live: dict[str, Any]) -> list[float] | None:
    """The least and the most that is left; None where that is not known."""
    found = live.get("eta") or live.get("eta_s")
    if isinstance(found, int | float):
        return [float(found), float(found)]
    if isinstance(found, list | tuple) and len(found) == 2:
        return [float(found[0]), float(found[1])]
    return None
