"""What a turn of the coordinator was about, one message per worker and attempt, for --log-level
debug."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from muster.base.journal import EVENTS
from muster.farm.decisions import Decisions
from muster.farm.events import Event, WorkerDied, WorkerLeaving, WorkerReady
from muster.farm.model import AttemptRecord


def tell(events: Sequence[Event], decisions: Decisions) -> None:
    """Costs nothing where nobody listens."""
    if not EVENTS.isEnabledFor(logging.DEBUG):
        return
    for event in events:
        match event:
            case WorkerReady():
                EVENTS.debug("worker %d is ready, pid %d", event.worker_id, event.pid)
            case WorkerLeaving():
                EVENTS.debug("worker %d is about to lose its place", event.worker_id)
            case WorkerDied():
                EVENTS.debug("worker %d ended: %s", event.worker_id, event.reason)
            case _:
                continue
    for record in [*decisions.done, *decisions.failed]:
        EVENTS.debug(_ended(record))
    for record, _ in decisions.tried:
        EVENTS.debug("%s; it will run again", _ended(record))
    for slot_id, worker_id in decisions.starts:
        EVENTS.debug("worker %d starts in slot %d", worker_id, slot_id)
    for worker_id, tasks, _ in decisions.sends:
        numbers = ", ".join(str(task.task_id) for task in tasks)
        EVENTS.debug("worker %d is sent task %s", worker_id, numbers)
    for worker_id, reason in decisions.kills:
        EVENTS.debug("worker %d is killed: %s", worker_id, reason)


def _ended(record: AttemptRecord) -> str:
    finished = record.finished
    message = f": {finished.message}" if finished.message else ""
    return (
        f"task {record.task_id}, attempt {record.token}, on worker {record.worker_id}: "
        f"{finished.outcome.value} after {finished.seconds:.3g} s{message}"
    )
