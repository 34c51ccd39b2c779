"""Whether the counts of a run add up, asked before anything of it is published. Pure.

A sweep: tasks of the plan = done + failed + cancelled + stopped + waiting, and every done or
stopped one has a result.
A map: rows of the source = rows out + dropped + rejected + blank lines, chunk by chunk and without
a gap. Where a stage makes several records of a row, and for a row that is rejected twice, the right
side may be larger; it is never smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muster.farm.task import TaskState


class ChunkCounts(NamedTuple):
    """What a finished chunk says of rows ``start`` to ``stop`` of its shard."""

    order: int
    start: int
    stop: int
    rows_in: int
    rows_out: int
    dropped: int
    rejected: int
    blank: int = 0


def imbalance_of_tasks(
    planned: int, counts: Mapping[TaskState, int], num_results: int
) -> str | None:
    """Say what is wrong, in a sentence without its full stop; None when the counts balance.

    ``planned``: tasks of the plan, 0 while they have not all been listed. There may be more of
    them than planned, from earlier seeds or divided tasks, and never fewer.
    """
    known, stopped = sum(counts.values()), counts.get(TaskState.STOPPED, 0)
    waiting = counts[TaskState.READY] + counts[TaskState.CLAIMED]
    if known < planned:
        parts = (
            f"{counts[TaskState.DONE]:,} done + {counts[TaskState.FAILED]:,} failed + "
            f"{counts[TaskState.CANCELLED]:,} cancelled + {waiting:,} waiting"
            + (f" + {stopped:,} stopped" if stopped else "")
        )
        return f"the plan has {planned:,} tasks, and the ledger knows {known:,} ({parts})"
    if counts[TaskState.DONE] + stopped != num_results:
        more = f" and {stopped:,} stopped" if stopped else ""
        return (
            f"{counts[TaskState.DONE]:,} tasks are done{more}, and the ledger holds "
            f"{num_results:,} results"
        )
    return None


def imbalance_of_rows(shards: Sequence[int], chunks: Sequence[ChunkCounts]) -> str | None:
    """What is wrong with the rows of a map, as `imbalance_of_tasks` says it of a sweep's tasks.

    ``shards`` holds the number of rows of each shard, ``chunks`` all chunks that are finished.
    """
    sums = [sum(column) for column in zip(*(chunk[3:] for chunk in chunks), strict=True)]
    rows_in, rows_out, dropped, rejected, blank = sums or (0, 0, 0, 0, 0)
    why = _misfit(shards, sorted(chunks))
    if why is None and rows_in == sum(shards):
        return None
    return (
        f"the source has {sum(shards):,} rows, and the finished chunks account for {rows_in:,} "
        f"({rows_out:,} records out, {dropped:,} rows dropped, {rejected:,} rejected"
        + (f", {blank:,} blank lines)" if blank else ")")
        + ("" if why is None else f": {why}")
    )


def _misfit(shards: Sequence[int], chunks: Sequence[ChunkCounts]) -> str | None:
    """The first hole, overlap or chunk that does not add up."""
    at = [0] * len(shards)
    for chunk in chunks:
        name = f"rows {chunk.start:,} to {chunk.stop:,} of shard {chunk.order:,}"
        if not 0 <= chunk.order < len(shards):
            return f"there is no shard {chunk.order:,}"
        if chunk.start > at[chunk.order]:
            missing = f"rows {at[chunk.order]:,} to {chunk.start:,} of shard {chunk.order:,}"
            return f"{missing} are missing"
        if chunk.start < at[chunk.order]:
            return f"{name} are there twice"
        at[chunk.order] = chunk.stop
        accounted = chunk.rows_out + chunk.dropped + chunk.rejected + chunk.blank
        is_whole = chunk.rows_in == chunk.stop - chunk.start
        if not is_whole or chunk.rows_in > accounted or chunk.dropped > chunk.rows_in:
            return (
                f"{name} are {chunk.rows_in:,} in, {chunk.rows_out:,} out, {chunk.dropped:,} "
                f"dropped and {chunk.rejected:,} rejected"
            )
    for order, (end, count) in enumerate(zip(at, shards, strict=True)):
        if end != count:
            return f"shard {order:,} ends at row {end:,} of {count:,}"
    return None
