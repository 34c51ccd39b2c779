"""What can happen to a run of tasks, as small records: the scheduler's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from muster.farm.task import Finished, Outcome, SlotSpec, Task


class Fetched(NamedTuple):
    """Tasks were claimed from the ledger; ``exhausted``: it has no more, and none will come."""

    tasks: Sequence[Task]
    exhausted: bool


class WorkerReady(NamedTuple):
    """The worker has loaded its targets and waits for work."""

    worker_id: int
    pid: int


class TargetBroken(NamedTuple):
    """A worker could not load the target that it is to run, so no task of the run can succeed."""

    worker_id: int
    message: str
    trace: str


class Results(NamedTuple):
    """A worker has ended these attempts, whether well or not."""

    worker_id: int
    finished: Sequence[Finished]


class Returned(NamedTuple):
    """A worker hands back tasks that it has not begun, in answer to a revoke."""

    worker_id: int
    task_ids: Sequence[int]


class Progress(NamedTuple):
    """A running task has reported ``text`` through ``ctx.report``; it is shown and never stored.

    With task 0 an executor speaks of a worker that has not started, such as why it waits.
    ``numbers`` are sums since the worker started, except ``left``: how much of the task remains, in
    any unit that all tasks of the run share.
    """

    worker_id: int
    task_id: int
    text: str
    numbers: Mapping[str, float] = MappingProxyType({})


class Logged(NamedTuple):
    """An attempt has logged numbers; ``body`` holds them as `muster.farm.metrics` encodes them.

    It is recorded in the transaction of its turn, ahead of results that came with it, whatever the
    token: the reader knows what an attempt that has been replaced still counts for. ``serial``
    numbers what a worker sends, so that what is heard twice is recorded once.
    """

    worker_id: int
    task_id: int
    token: int
    serial: int
    body: bytes


class Divided(NamedTuple):
    """A running task has been divided, or has too little left for that (``given`` is empty then).

    ``kept`` are the parameters that it goes on with, ``given`` those of new tasks for the rest.
    """

    worker_id: int
    task_id: int
    token: int
    kept: Mapping[str, Any]
    given: Sequence[Mapping[str, Any]]


class WorkerDied(NamedTuple):
    """A worker and all its descendants are gone, and every result it sent has been read.

    ``signal``: the signal that ended it, ``None`` after a plain exit. ``host_oom``: whether the
    kernel reports that the host ran out of memory then. ``trace``: the end of its log. ``stuck``:
    why its slot cannot be used again although the worker is gone. ``outcome``: how its running
    attempt ended, where that is known: the worker was preempted, its job ended, its node was lost.
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
    """A worker will soon lose its place: it finishes or saves its task and begins no other.

    ``WorkerDied`` follows.
    """

    worker_id: int


class Capacity(NamedTuple):
    """So many workers may share a device from now on (``--per-gpu auto``)."""

    device_key: str
    workers: int


class Slots(NamedTuple):
    """The run has exactly these slots from now on; what runs in others ends and nothing follows.

    ``at_once``: a task there need not end, but only reach its next checkpoint; it goes on
    elsewhere.
    """

    wanted: Sequence[SlotSpec]
    at_once: bool = False


class StopTask(NamedTuple):
    """A task is to end early, on purpose; ``pauses``: it may first reach its next checkpoint.

    ``cancels``: its user wants so, which counts before all that a search says of it. ``saves``: it
    is to end there and nowhere before, so one that loses its worker runs again untold.
    """

    task_id: int
    pauses: bool = False
    cancels: bool = False
    saves: bool = False


class Reopen(NamedTuple):
    """A task that was stopped, or is about to be, is to go on from its checkpoint."""

    task_id: int


class Drain(NamedTuple):
    """The run is asked to hand out no more tasks; what runs may finish."""


class Note(NamedTuple):
    """Something that whoever watches should know and that changes nothing here."""

    kind: str
    text: str


Event = (
    Fetched
    | WorkerReady
    | TargetBroken
    | Results
    | Returned
    | Progress
    | Logged
    | Divided
    | WorkerDied
    | WorkerLeaving
    | Capacity
    | Slots
    | StopTask
    | Reopen
    | Drain
    | Note
)
