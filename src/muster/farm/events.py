"""What can happen to a sweep, as small records: the scheduler's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from muster.farm.task import Finished, Outcome, Task


class Fetched(NamedTuple):
    """Tasks claimed from the ledger; ``exhausted``: it holds no more now and none will come."""

    tasks: Sequence[Task]
    exhausted: bool


class WorkerReady(NamedTuple):
    """The worker has loaded its targets and waits for work."""

    worker_id: int
    pid: int


class TargetBroken(NamedTuple):
    """A worker could not load what it is to run: no task of the run can succeed."""

    worker_id: int
    message: str
    trace: str


class Results(NamedTuple):
    worker_id: int
    finished: Sequence[Finished]


class Returned(NamedTuple):
    """Tasks a worker hands back unbegun, in answer to a revoke."""

    worker_id: int
    task_ids: Sequence[int]


class Progress(NamedTuple):
    """What a running task reported through ``ctx.report``; shown, never stored. Task 0: what an
    executor says of a worker that has not started, such as why it waits.

    ``numbers`` are sums since the worker started, but for ``left``: how much the task has before
    it, in any unit that all tasks of the run share.
    """

    worker_id: int
    task_id: int
    text: str
    numbers: Mapping[str, float] = MappingProxyType({})


class Divided(NamedTuple):
    """A running task goes on with less: ``kept`` is what it does now, ``given`` are the parameters
    of new tasks that do the rest. Nothing given: it has too little left to share.
    """

    worker_id: int
    task_id: int
    token: int
    kept: Mapping[str, Any]
    given: Sequence[Mapping[str, Any]]


class WorkerDied(NamedTuple):
    """Its process and all its descendants are gone, and every result it sent has been read.

    ``signal``: the signal that ended it, ``None`` after a plain exit. ``host_oom``: the kernel
    says that it ran out of memory then. ``trace``: the end of its log. ``stuck``: why its slot
    cannot be used again although the worker is gone. ``outcome``: how the attempt that it was at
    ended, where that is known: its worker was preempted, its job over, its node lost.
    """

    worker_id: int
    exit_code: int | None
    signal: int | None
    reason: str
    trace: str = ""
    host_oom: bool = False
    log_start: int = 0
    log_end: int = 0
    stuck: str = ""
    outcome: Outcome | None = None


class WorkerLeaving(NamedTuple):
    """Its place is about to be taken: it finishes or saves what it is at and begins nothing more.
    ``WorkerDied`` follows.
    """

    worker_id: int


class Capacity(NamedTuple):
    """How many workers may share a device now (``--per-gpu auto``)."""

    device_key: str
    workers: int


class Drain(NamedTuple):
    """Hand out nothing more; what runs may finish."""


Event = (
    Fetched
    | WorkerReady
    | TargetBroken
    | Results
    | Returned
    | Progress
    | Divided
    | WorkerDied
    | WorkerLeaving
    | Capacity
    | Drain
)
