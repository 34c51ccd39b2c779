"""Tasks: a part of their table; all of one task; what a task or a rank has printed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from muster.api.look.ranks import rank_log
from muster.farm import canonical
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import AttemptRow
from muster.farm.rows import flattened, metrics_of
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.session import is_held
from muster.web.content.plain import line, plain, settings
from muster.web.content.runs import GpuTime, energy_wh, gpus_in, picture
from muster.web.folder import Folder, opened
from muster.web.query import Query

_MOST_FILES = 500
#: Where tasks that run began to print, which takes a scan of all attempts: by task, process and
#: how often it was tried before.
_BEGUN: WeakKeyDictionary[Folder, dict[tuple[object, ...], tuple[str, int]]] = WeakKeyDictionary()
_MOST_BEGUN = 1000
_MOST_ROWS = 500
#: Bytes of a log in an answer.
_LIMIT = 256 * 1024


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
        **_cost(folder.folder, attempts),
        "all_seconds": sum(one.seconds for one in attempts),
        "seconds": row.seconds,
        "command": shlex.join(["muster", "logs", str(folder.path), str(row.task_id)]),
        "metrics": names,
    }  # fmt: skip


def _cost(folder: RunFolder, attempts: Sequence[AttemptRow]) -> dict[str, float | None]:
    """Of all attempts; None where there was no GPU, or where one cannot tell. What tasks that share
    a GPU need of its power is not known."""
    spans = [
        GpuTime(one.host, tuple(f"gpu{n}" for n in gpus_in(one.slot)), one.started_s,
                one.started_s + one.seconds)
        for one in attempts if gpus_in(one.slot)
    ]  # fmt: skip
    is_whole = not any("/" in one.slot for one in attempts)
    return {
        "gpu_seconds": sum(len(one.labels) * (one.end_s - one.begin_s) for one in spans)
        if spans and is_whole else None,
        "energy_wh": energy_wh(folder, spans) if spans and is_whole else None,
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


def table(folder: Folder, query: Query) -> dict[str, Any]:
    folder.expect_tasks()
    offset, limit = query.number("offset", 0, 0, 10**9), query.number("limit", 200, 1, _MOST_ROWS)
    return folder.table.page(**chosen(query), offset=offset, limit=limit)


def chosen(query: Query) -> dict[str, Any]:
    """Which rows of the table are wanted, in which order."""
    return {
        "sort": query.text("sort"), "descending": query.text("desc") == "1",
        "text": query.text("filter"), "state": query.text("state"),
    }  # fmt: skip


def log(folder: Folder, query: Query) -> dict[str, Any]:
    """``offset`` below 0 counts from the end. ``task``: of a run with ranks the rank."""
    parts = _parts(folder, query.text("task"))
    total = sum(stop - start for _, start, stop in parts)
    limit = query.number("limit", 64 * 1024, 1, _LIMIT)
    offset = query.number("offset", -limit, -(10**15), 10**15)
    offset = max(0, total + offset) if offset < 0 else min(offset, total)
    data = _read(folder.path, parts, offset, min(total, offset + limit))
    return {
        "text": data.decode("utf-8", "replace"),
        "offset": offset,
        "end": offset + len(data),
        "total": total,
    }


def _parts(folder: Folder, task: str) -> list[tuple[str, int, int]]:
    """Files below the run's folder, and from where to where in them."""
    run = folder.run
    if run.stored.is_gang:
        _, path = rank_log(folder.folder, task or None)
        with opened(folder.path, f"logs/{path.name}") as file:
            return [(f"logs/{path.name}", 0, os.fstat(file.fileno()).st_size)]
    run.expect_tasks()
    with LedgerReader(folder.folder.ledger) as ledger:
        row = ledger.task(run.task_number(ledger, task))
        found = [
            (f"logs/{part.log}", part.start, max(part.start, part.end))
            for part in ledger.log_parts(row.task_id)
        ]
        if row.state is TaskState.CLAIMED and (
            begun := _begun(folder, ledger, row.task_id, row.attempts)
        ):
            name, start = begun
            with suppress(OSError), opened(folder.path, name) as file:
                found.append((name, start, max(start, os.fstat(file.fileno()).st_size)))
    return found


def _begun(folder: Folder, ledger: LedgerReader, task_id: int, num: int) -> tuple[str, int] | None:
    """In which log a task prints at this moment, and where its part of it begins."""
    if not is_held(folder.folder):
        return None
    for worker in picture(folder).get("workers") or ():
        if worker.get("task", "").partition(" ")[0] == str(task_id):
            where = (task_id, worker.get("pid"), num)
            known = _BEGUN.setdefault(folder, {})
            if where not in known and (log := ledger.open_log(worker["slot"])) is not None:
                while len(known) >= _MOST_BEGUN:
                    known.pop(next(iter(known)), None)
                known[where] = f"logs/{log[0]}", log[1]
            return known.get(where)
    return None


def _read(root: Path, parts: list[tuple[str, int, int]], offset: int, end: int) -> bytes:
    found = b""
    at = 0
    for name, start, stop in parts:
        low, high = max(offset - at, 0), min(end - at, stop - start)
        at += stop - start
        if low < high:
            try:
                with opened(root, name) as file:
                    file.seek(start + low)
                    data = file.read(high - low)
            except PermissionError:
                raise
            except OSError:  # removed, or no file of the run
                data = b""
            found += data.ljust(high - low, b"\n")
    return found
