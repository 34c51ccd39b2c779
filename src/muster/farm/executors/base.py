"""What an executor is: a supplier of workers. It never retries and never writes the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from muster.farm.events import Event
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.task import HeldWorker, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

#: MiB that these processes hold on these devices (by UUID), None when that cannot be known.
HeldMib = Callable[[Collection[int], Collection[str]], int | None]


def nothing_known(pids: Collection[int], uuids: Collection[str]) -> int | None:
    return None


#: Why a device among these (by UUID) cannot be used any more, "" where all answer.
WhyLost = Callable[[Collection[str]], str]


def nothing_lost(uuids: Collection[str]) -> str:
    return ""


class PilotLeft(NamedTuple):
    """A pilot of an earlier coordinator that may be alive: ``heard`` bytes of its outbox are
    settled. ``unwanted``: its worker is to be killed.
    """

    slot_id: int
    job_id: int
    restart: int
    heard: int
    worker: HeldWorker | None = None
    unwanted: int | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every worker of a run is told once.

    ``is_piloted``: a pilot hears SIGTERM and SIGUSR2 and warns its worker, which does not.
    ``left``: what an earlier coordinator of this run has left on a cluster.
    """

    folder: RunFolder
    run_id: str
    targets: Mapping[int, TargetSpec]
    held_mib: HeldMib = nothing_known
    why_lost: WhyLost = nothing_lost
    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    is_piloted: bool = False
    left: Sequence[PilotLeft] = ()


class TakesCommands(Protocol):
    """What can be asked for; the answers are events."""

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        """Begin to start a worker and return the name of its log.

        ``WorkerReady``, ``TargetBroken`` or ``WorkerDied`` follows from ``poll``.
        """

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        """Hand over tasks; each is answered by a result, a return, or the worker's death."""

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        """Ask for part of a running divisible task, for so many others; ``Divided`` follows
        unless the task ends before.
        """

    def revoke(self, worker_id: int) -> None:
        """Ask for the tasks it has not begun; ``Returned`` follows unless it dies first."""

    def end(self, worker_id: int, *, kill: bool) -> None:
        """Let it go after what it holds, or kill it with all its descendants.

        ``WorkerDied`` follows from ``poll`` either way, once nothing of it is left.
        """


class Executor(TakesCommands, Protocol):
    """A supplier of workers. Contract: tests/contract/test_executors.py."""

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened; waits up to ``timeout_s`` for something to happen."""

    def close(self) -> None:
        """End everything at once; afterwards no process is left."""
