"""What an executor is: a supplier of workers. It never retries and never writes the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from muster.farm.events import Event
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.task import HeldWorker, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

#: Called with process ids and UUIDs of devices: the MiB that the processes hold on the devices,
#: or None where that cannot be known.
HeldMib = Callable[[Collection[int], Collection[str]], int | None]


def nothing_known(pids: Collection[int], uuids: Collection[str]) -> int | None:
    return None


#: Called with UUIDs of devices: why one of them cannot be used any more, "" where all answer.
WhyLost = Callable[[Collection[str]], str]


def nothing_lost(uuids: Collection[str]) -> str:
    return ""


class PilotLeft(NamedTuple):
    """A pilot of an earlier coordinator that may be alive.

    ``heard``: how many bytes of its outbox have been recorded. ``worker``: the worker to go on
    with. ``unwanted``: the id of a worker to kill instead.
    """

    slot_id: int
    job_id: int
    restart: int
    heard: int
    worker: HeldWorker | None = None
    unwanted: int | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What an executor is made for: the run, its targets, and what is asked of a cluster.

    ``targets`` are by the ledger's number of the target. ``is_piloted``: the executor runs in a
    pilot, which receives SIGTERM and SIGUSR2 in place of its worker and warns it. ``left``: pilots
    that an earlier coordinator of this run has left on a cluster. ``python``: the interpreter of
    workers, where it is another than this one.
    """

    folder: RunFolder
    run_id: str
    targets: Mapping[int, TargetSpec]
    held_mib: HeldMib = nothing_known
    why_lost: WhyLost = nothing_lost
    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    is_piloted: bool = False
    left: Sequence[PilotLeft] = ()
    python: Path | None = None


class TakesCommands(Protocol):
    """The commands of a coordinator. They return at once; the answers are events of ``poll``."""

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        """Begin to start a worker in ``slot`` and return the name of its log.

        ``poll`` returns ``WorkerReady``, ``TargetBroken`` or ``WorkerDied`` for it later.
        """

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        """Hand tasks to a worker; a result, a return, or the worker's death answers each.

        ``together``: they are one call of a batched target. Otherwise they run one after another.
        """

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        """Ask a running divisible task for parts that ``others`` more workers can do.

        ``Divided`` follows unless the task ends before.
        """

    def revoke(self, worker_id: int) -> None:
        """Ask a worker for the tasks that it has not begun; ``Returned`` follows unless it dies."""

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        """Tell a running task to end early, at once or (``pauses``) at its next checkpoint.

        Its result or the worker's death answers; the worker goes on with its other tasks.
        """

    def confirm(self, worker_id: int, serial: int) -> None:
        """Tell a worker that what it has logged is durable, up to the frame of this number."""

    def end(self, worker_id: int, *, kill: bool) -> None:
        """Let a worker end after the tasks it holds, or kill it with all its descendants.

        ``poll`` returns ``WorkerDied`` either way, once no process of it is left.
        """


class Executor(TakesCommands, Protocol):
    """A supplier of workers. Contract: tests/contract/test_executors.py."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what has happened; wait up to ``timeout_s`` seconds where nothing has."""

    def close(self) -> None:
        """End everything at once; afterwards no process is left."""
