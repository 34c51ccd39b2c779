"""One task: its settings, its result, its attempts, why it failed, what it has written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from muster.farm import canonical
from muster.farm.ledger.read import AttemptRow, LedgerReader
from muster.farm.rows import flattened, metrics_of
from muster.run.folder import RunFolder
from muster.web.content.plain import line, plain, settings
from muster.web.folder import Folder
from muster.web.query import Query

_MOST_FILES = 500


def content(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.expect_tasks()
    with LedgerReader(folder.folder.ledger) as ledger:
        row = ledger.task(run.task_number(ledger, query.text("task")))
        attempts = ledger.attempts(row.task_id)
        trace = ledger.trace_of(row.task_id)
        names = sorted(ledger.metric_names(row.task_id))
    key = row.key.hex()
    failed = [one for one in attempts if one.outcome not in ("ok", "stopped")]
    return {
        "key": key[:12],
        "number": row.task_id,
        "name": canonical.task_label(row.task_id, row.payload),
        "target": row.target,
        "state": row.state.name.lower(),
        "settings": settings(flattened(canonical.decode(row.payload))),
        "result": {
            line(name): plain(value) for name, value in metrics_of(folder.folder, row).items()
        },
        "attempts": [_attempt(one) for one in attempts],
        "error": {"text": failed[-1].message or failed[-1].outcome, "trace": trace or ""}
        if failed else None,
        "files": _files(folder.folder, folder.folder.artifact(key), f"/run/{folder.id}/file/")
        if row.has_files else [],
        "peak_mib": row.peak_mib,
        "all_seconds": sum(one.seconds for one in attempts),
        "seconds": row.seconds,
        "command": shlex.join(["muster", "logs", str(folder.path), str(row.task_id)]),
        "metrics": names,
    }  # fmt: skip


def _attempt(one: AttemptRow) -> dict[str, Any]:
    return {
        "token": one.token, "outcome": one.outcome, "message": one.message, "slot": one.slot,
        "host": one.host, "started": one.started_s, "seconds": one.seconds,
        "peak_mib": one.peak_mib,
    }  # fmt: skip


def _files(run: RunFolder, place: Path, front: str) -> list[dict[str, Any]]:
    """The files of a task, without links."""
    found = []
    for folder, inner, names in os.walk(place):
        inner.sort()
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink() or not path.is_file():
                continue
            shown = str(path.relative_to(place)).encode("utf-8", "backslashreplace").decode()
            href = front + quote(os.fsencode(path.relative_to(run.path)))
            found.append({"name": shown, "bytes": path.stat().st_size, "href": href})
            if len(found) == _MOST_FILES:
                return found
    return found
