"""The first page: every run there is, how it stands, how far it is."""

from __future__ import annotations

from typing import Any

from muster.base.errors import MusterError
from muster.web.content import standing
from muster.web.folder import Folder, Folders
from muster.web.query import Query


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
        level, verdict = standing.verdict(run, status)
        row |= {
            "kind": standing.kind(stored),
            "state": status.state,
            "level": level,
            "verdict": verdict,
            "counts": standing.counts(status),
            "progress": standing.progress(status),
            "eta_s": standing.eta_s(standing.picture(folder)) if status.is_running else None,
            "started": stored.created_s,
            "changed": folder.changed_s(),
        }
    except MusterError as error:
        row["verdict"] = str(error)
    except OSError as error:
        row["verdict"] = f"Cannot read {folder.path}: {error.strerror or error}."
    return row
