"""The farm's words as values: task, attempt, outcome, worker.

A *task* is a target name plus JSON parameters. An *attempt* is one try at it by one worker,
named by the task's *token*, which every claim raises. A *worker* is a long-lived process in a
*slot*; a slot is a GPU, a share of one, several, or a CPU core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any, NamedTuple, cast


class TaskState(IntEnum):
    """Where a task is. The numbers are stored in the ledger: never renumber."""

    READY = 0
    CLAIMED = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    STOPPED = 5  # ended early on purpose; a promotion opens it again

    @property
    def is_final(self) -> bool:
        return self not in (TaskState.READY, TaskState.CLAIMED)


class Outcome(StrEnum):
    """How an attempt ended. Each has its own limit of retries (see ``policy``)."""

    OK = "ok"
    EXCEPTION = "exception"
    BAD_RESULT = "bad_result"
    DEVICE_OOM = "device_oom"
    DEVICE_FAULT = "device_fault"
    BROKEN_CONTEXT = "broken_context"
    HOST_OOM = "host_oom"
    MEMORY_LIMIT = "memory_limit"
    CRASH = "crash"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    JOB_TIMEOUT = "job_timeout"
    LOST = "lost"
    STOPPED = "stopped"

    @property
    def ends_worker(self) -> bool:
        """The task, or the device that it had, left nothing to its worker to go on with."""
        return self in (Outcome.CRASH, Outcome.BROKEN_CONTEXT)

    @property
    def is_blameless(self) -> bool:
        """Whether neither the task nor its device is the reason why the attempt ended."""
        return self in (Outcome.PREEMPTED, Outcome.JOB_TIMEOUT, Outcome.LOST)


class NewTask(NamedTuple):
    """A task that is to be listed."""

    key: bytes
    target_id: int
    payload: bytes
    group: int = 0
    priority: int = 0


class Task(NamedTuple):
    """A claimed task in the coordinator's hands.

    ``tries`` counts attempts that were the task's own fault; ``solo`` asks for a device of its
    own; ``avoid`` names the device of the last crash; ``batch_limit`` bounds how many tasks may
    share a call after such a call was lost (0: no bound); ``losses`` counts attempts that ended
    for no fault of the task; ``priority``: a higher one goes first; ``fresh`` asks for a worker
    that has done nothing yet.
    """

    task_id: int
    key: bytes
    target_id: int
    payload: bytes
    group: int
    token: int
    tries: int = 0
    solo: bool = False
    avoid: str = ""
    batch_limit: int = 0
    losses: int = 0
    priority: int = 0
    fresh: bool = False


class Order(NamedTuple):
    """A task as it reaches a worker; ``key`` is in hexadecimal."""

    task_id: int
    token: int
    target_id: int
    key: str
    attempt: int
    payload: bytes
    tries: int = 0


class HeldWorker(NamedTuple):
    """A worker that goes on although its coordinator has ended; its tasks in their order."""

    worker_id: int
    tasks: Sequence[Task]
    is_together: bool = False
    is_ready: bool = True
    is_ending: bool = False


class Finished(NamedTuple):
    """What a worker says about an attempt.

    ``value`` is the encoded result of an OK attempt and is stored as it is. For any other
    outcome ``message`` is one line and ``trace`` the traceback or the end of the log.
    ``poisoned``: the worker's device context can no longer be trusted; replace the worker.
    ``on_device``: ``peak_mib`` is memory of the device, not of the host.
    """

    task_id: int
    token: int
    outcome: Outcome
    started_s: float
    seconds: float
    log_start: int
    log_end: int
    peak_mib: float | None
    value: bytes = b"{}"
    message: str = ""
    trace: str = ""
    signal: int | None = None
    poisoned: bool = False
    files: bool = False
    on_device: bool = False


#: An attempt and an order of all of their fields, without a look at each.
FINISHED = cast("Callable[[tuple[Any, ...]], Finished]", partial(tuple.__new__, Finished))
ORDER = cast("Callable[[tuple[Any, ...]], Order]", partial(tuple.__new__, Order))


def end_of(finished: Sequence[Finished]) -> float:
    """When the last of them ended, in Unix time. Those of a joint call began at once, and share its
    time.
    """
    began_s = max(one.started_s for one in finished)
    return began_s + sum(one.seconds for one in finished if one.started_s == began_s)


class AttemptRecord(NamedTuple):
    """A finished attempt as the ledger keeps it."""

    task_id: int
    token: int
    worker_id: int
    finished: Finished


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What a worker runs: a function by name, or a command as a list of argument templates."""

    name: str
    kind: str = "function"  # "function" | "command"
    location: str = ""
    attribute: str = ""
    base_folder: str = ""
    argv: tuple[str, ...] = ()
    shell: bool = False
    max_batch: int = 0  # 0: not batched
    max_batch_on_cpu: int | None = None  # None: as many
    is_divisible: bool = False  # a running task may hand a part of itself to others
    static: tuple[str, ...] = ()
    metrics_from: str = ""  # of a command: see `muster.farm.metrics`
    goal: str = ""  # of a search that ends tasks early: the metric by which it decides,
    rungs: tuple[float, ...] = ()  # and the steps at which it may

    @property
    def is_batched(self) -> bool:
        return self.max_batch > 0

    def batch_on(self, kind: str) -> int:
        """How many tasks a call on a slot of this kind takes at most."""
        on_cpu = self.max_batch if self.max_batch_on_cpu is None else self.max_batch_on_cpu
        return on_cpu if kind == "cpu" else self.max_batch


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """A place where a worker runs, as the farm sees it.

    ``memory_mib``: its share of its devices' memory. ``most_host_mib``: what its worker, with all
    that it starts, may hold of the host's memory; None sets no limit.
    """

    slot_id: int
    label: str
    devices: tuple[str, ...]  # UUIDs; empty on a CPU slot
    kind: str = "cpu"
    visible_devices: str | None = None
    num_threads: int = 1
    memory_mib: int | None = None
    num_sharing: int = 1  # workers on the same devices
    most_host_mib: float | None = None

    @property
    def device_key(self) -> str:
        """Names the device(s) for quarantine and sharing; a CPU slot stands for itself."""
        return "+".join(self.devices) if self.devices else self.label
