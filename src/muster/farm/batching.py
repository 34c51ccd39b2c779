"""Which tasks share a joint call. Pure."""

from __future__ import annotations

import math
from collections import deque

from muster.farm.model import Task


def take_group(
    queue: deque[Task], first: Task, max_batch: int, num_workers: int
) -> tuple[list[Task], deque[Task]]:
    """Tasks of the same shape as ``first``, and the queue without them.

    No more than an even share for all workers, so that none is idle while one has them all.
    """
    limit = first.batch_limit or max_batch
    same = [
        task
        for task in queue
        if task.group == first.group
        and task.target_id == first.target_id
        and task.batch_limit == first.batch_limit
    ]
    if not first.batch_limit:
        limit = min(limit, math.ceil(len(same) / max(1, num_workers)))
    taken = same[: max(1, limit)]
    ids = {task.task_id for task in taken}
    return taken, deque(task for task in queue if task.task_id not in ids)
