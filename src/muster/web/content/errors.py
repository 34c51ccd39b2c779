"""What failed, by cause: tasks, records of a map, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muster.api.ranks import rank_failures
from muster.api.report.about import rejects
from muster.web.content.plain import line, listing
from muster.web.folder import Folder
from muster.web.query import Query

_MOST_GROUPS = 200


def content(folder: Folder, query: Query) -> dict[str, Any]:
    """``count``: attempts, records or ranks; ``failed``: tasks that stay failed."""
    groups = [*_groups(folder)]
    return {"groups": groups[:_MOST_GROUPS], "left_out": max(0, len(groups) - _MOST_GROUPS)}


def _groups(folder: Folder) -> Iterator[dict[str, Any]]:
    run = folder.run
    if run.stored.is_gang:
        yield from _of_ranks(folder)
        return
    if folder.folder.ledger.exists():
        for group in run.failures():
            text = (group.message or group.outcome).splitlines()[0]
            yield _group(
                text, group.num_attempts, group.trace or group.message, group.tasks, "attempts",
                failed=group.num_failed, first=group.first_s, last=group.last_s,
            )  # fmt: skip
    for cause in rejects(folder.folder):
        where = f" in the stage {cause.stage}" if cause.stage else ""
        yield _group(f"{cause.reason}{where}", cause.num, cause.example, (), "records")


def _of_ranks(folder: Folder) -> Iterator[dict[str, Any]]:
    found = rank_failures(folder.folder)
    if found.report:
        yield _group(found.report[0], 1, "\n".join(found.report), (), "starts")
    for rank, error in found.errors.items():
        text = f"Rank {rank}: {error.type}: {error.message}"
        trace = "\n".join((*error.frames, f"{error.type}: {error.message}"))
        yield _group(text, 1, trace, (), "ranks", first=error.time_s, last=error.time_s)


def _group(
    text: str, count: int, trace: str, tasks: tuple[str, ...], unit: str, *,
    failed: int = 0, first: float | None = None, last: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "text": line(text),
        "count": count,
        "unit": unit,
        "failed": failed,
        "first": first,
        "last": last,
        "tasks": list(tasks),
        "trace": listing(trace),
    }
