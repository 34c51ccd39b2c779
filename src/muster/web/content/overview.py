"""The page of a run: its verdict first, then how far it is and where it runs."""

from __future__ import annotations

from typing import Any

from muster.api.runs import Run
from muster.base.clock import SystemClock
from muster.web.content import standing
from muster.web.folder import Folder
from muster.web.query import Query


def content(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    stored, status = run.stored, run.status()
    live = standing.picture(folder) if status.is_running else {}
    return {
        "id": folder.id,
        "name": folder.path.name,
        "path": str(folder.path),
        "kind": stored.kind,
        "state": status.state,
        "tabs": standing.tabs(stored),
        "verdict": {
            "level": standing.level(status),
            "text": standing.verdict(run, status),
            "causes": _causes(run),
        },
        "counts": standing.counts(status),
        "progress": standing.progress(status),
        "rate": live.get("rate"),
        "eta_s": standing.eta_s(live),
        "seconds": (SystemClock().wall_s() if status.is_running else folder.changed_s())
        - stored.created_s,
        "best": None,
        "slots": [],
        "devices": [],
        "alerts": [],
        "recent": [],
    }


def _causes(run: Run) -> list[dict[str, Any]]:
    if run.stored.is_gang or not run.folder.ledger.exists():
        return []
    return [
        {"text": group.message or group.outcome, "count": group.num_failed, "task": group.tasks[0]}
        for group in run.failures()[:5]
        if group.num_failed
    ]
