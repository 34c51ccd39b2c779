"""A map: where its records went, the state of its chunks, and what was rejected and why."""

from __future__ import annotations

from typing import Any

from muster.api.maps.publish import Tally, read_published, tally
from muster.api.report.about import rejects
from muster.api.report.map import stage_folders
from muster.base.errors import UsageError
from muster.farm.ledger.read import LedgerReader
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.web.content.curves import curves_of, in_order
from muster.web.content.plain import line, listing
from muster.web.folder import Folder
from muster.web.query import Query

_MOST_CELLS, _MOST_REJECTS = 2000, 50
#: What a cell is that stands for chunks in different states: the first of these.
_WORST = ("failed", "running", "waiting", "cancelled", "stopped", "done")


def content(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    if not run.stored.is_map:
        raise UsageError(f"{folder.path} is {run.stored.kind_name}: it has no records.")
    folders = stage_folders(folder.folder)
    status = run.status()
    published = read_published(folder.folder)
    return {
        "stages": [_stage(each, tally(each)) for each in folders],
        "curves": in_order(curves_of(folder)),
        "chunks": _chunks(folder.folder, (status.live or {}).get("num_running", 0)),
        "rejects": [
            {"stage": line(cause.stage), "reason": line(cause.reason), "count": cause.num,
             "sample": listing(cause.example)}
            for each in folders for cause in rejects(each)[:_MOST_REJECTS]
        ],
        "output": published and {
            "path": published.output, "bytes": published.size, "rows": published.rows,
            "notes": [line(note) for note in published.notes],
        },
    }  # fmt: skip


def _stage(folder: RunFolder, counts: Tally) -> dict[str, Any]:
    return {
        "name": line(" → ".join(map(str, read_run(folder).spec.get("stages", ())))),
        "in": counts.num_in,
        "out": counts.num_out,
        "rejected": counts.num_rejected,
        "dropped": counts.num_dropped,
        "lost": counts.num_lost,
        "waiting": counts.num_open,
    }


def _chunks(folder: RunFolder, num_running: int) -> list[dict[str, Any]]:
    """Cells in the order of the input: of many chunks a cell stands for several."""
    if not folder.ledger.exists():
        return []
    with LedgerReader(folder.ledger) as ledger:
        states = ledger.states()
    words = {TaskState.READY: "waiting", TaskState.CLAIMED: "running" if num_running else "waiting"}
    named = [words.get(state) or state.name.lower() for state in states]
    size = -(-len(named) // _MOST_CELLS) or 1
    return [
        {
            "index": at,
            "count": len(named[at : at + size]),
            "state": min(named[at : at + size], key=_WORST.index),
        }
        for at in range(0, len(named), size)
    ]
