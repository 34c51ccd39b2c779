"""A part of what a task or a rank has printed, and the lines that hold a word."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from muster.api.ranks import rank_log
from muster.web.folder import Folder, opened
from muster.web.query import Query

_LIMIT = 256 * 1024
_MOST_MATCHES = 1000
_MOST_SEARCHED = 64 * 1024 * 1024


def content(folder: Folder, query: Query) -> dict[str, Any]:
    """``offset`` below 0 counts from the end. ``task``: of a run with ranks the rank."""
    parts = _parts(folder, query.text("task"))
    total = sum(stop - start for _, start, stop in parts)
    limit = query.number("limit", 64 * 1024, 1, _LIMIT)
    offset = query.number("offset", -limit, -(10**15), 10**15)
    offset = max(0, total + offset) if offset < 0 else min(offset, total)
    data = _read(folder.path, parts, offset, min(total, offset + limit))
    search = query.text("search")
    return {
        "text": data.decode("utf-8", "replace"),
        "offset": offset,
        "end": offset + len(data),
        "total": total,
        "matches": _matches(_read(folder.path, parts, 0, min(total, _MOST_SEARCHED)), search)
        if search
        else [],
    }


def _parts(folder: Folder, task: str) -> list[tuple[str, int, int]]:
    """Files below the run's folder, and from where to where in them."""
    run = folder.run
    if run.stored.is_gang:
        _, path = rank_log(folder.folder, task or None)
        with opened(folder.path, f"logs/{path.name}") as file:
            return [(f"logs/{path.name}", 0, os.fstat(file.fileno()).st_size)]
    return [
        (f"logs/{part.log}", part.start, max(part.start, part.end)) for part in run.log_parts(task)
    ]


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
            except OSError:
                data = b""
            found += data.ljust(high - low, b"\n")
    return found


def _matches(data: bytes, search: str) -> list[int]:
    """The numbers of the lines, from 1, that hold ``search`` in whatever case."""
    wanted = search.casefold()
    found = []
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if wanted in line.casefold():
            found.append(number)
            if len(found) == _MOST_MATCHES:
                break
    return found
