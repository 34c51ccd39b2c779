"""Which running task is asked to give away a part of itself. Pure.

A divisible task knows how to go on with less (`Context.divide`). It is asked when a worker has
nothing to do and no task waits, so that a run does not end with one busy worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.farm.model import TargetSpec
from muster.farm.roster import Worker

#: A task that has run for less is not asked: it may be over any moment.
SHARE_AFTER_S = 0.5


def runs_divisible(worker: Worker, targets: Mapping[int, TargetSpec]) -> bool:
    head = next(iter(worker.in_flight.values()), None)
    return head is not None and targets[head.target_id].is_divisible


def divisible(
    workers: Iterable[Worker], targets: Mapping[int, TargetSpec], now: float
) -> list[Worker]:
    """Workers whose running task could be shared, by what is known of it."""
    return [
        worker
        for worker in workers
        if runs_divisible(worker, targets)
        and worker.ready
        and not (worker.has_declined or worker.killing or worker.poisoned)
        and now - worker.head_since > SHARE_AFTER_S
    ]


def whom_to_ask(
    workers: Iterable[Worker], targets: Mapping[int, TargetSpec], now: float
) -> Worker | None:
    """The one with the most before it; None while another has not answered yet."""
    known = list(workers)
    if any(worker.is_asked for worker in known):
        return None
    able = divisible(known, targets, now)
    return max(able, key=lambda worker: worker.left) if able else None
