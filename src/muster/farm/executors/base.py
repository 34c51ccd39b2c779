"""What an executor is: a supplier of workers, which never retries and never writes the ledger; and
which there are: a table of name → "module:attribute", imported on use, and those of others.

``file.py:Class`` names one of the user's, and packages offer theirs by entry points of the group
``muster.executors``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from muster.base.errors import TargetError, UnknownNameError
from muster.base.modules import CLASS, load_plugin, plugins
from muster.base.target import load_value, parse_target
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.task import HeldWorker, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    from muster.farm.events import Event
    from muster.farm.executors.head_start import HeadStart

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
    workers, where it is another than this one. ``head_start``: processes for workers of this
    machine that are there already.
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
    head_start: HeadStart | None = None


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


EXECUTORS: dict[str, str] = {
    "local": "muster.farm.executors.local:LocalExecutor",
    "inline": "muster.farm.executors.inline:InlineExecutor",
    "slurm": "muster.farm.executors.slurm:SlurmExecutor",
    "ray": "muster.farm.executors.ray:RayExecutor",
}
_METHODS = ("start", "send", "share", "stop_task", "revoke", "confirm", "end", "poll", "close")


def is_executor(name: str) -> bool:
    """Whether ``name`` is in the table, in a file, or offered by an installed package."""
    return name in EXECUTORS or ":" in name or name in plugins("executor")


def check_executor(name: str) -> None:
    """UnknownNameError or TargetError for a name that means no executor, or a class that is none.

    Only what muster does not bring itself is imported.
    """
    if not is_executor(name):
        raise UnknownNameError("executor", name, {*EXECUTORS, *plugins("executor")})
    if name not in EXECUTORS:
        class_of(name)


def class_of(name: str) -> type[Any]:
    """The user's class; TargetError where it is none, or does not answer what is asked of it."""
    found: Any = (
        load_value(parse_target(name), kind=CLASS) if ":" in name else load_plugin("executor", name)
    )
    if not isinstance(found, type):
        raise TargetError(
            f"The executor {name} is not a class but of type {type(found).__name__}.",
            hint="write class MyExecutor with the methods of muster.executors.Executor.",
        )
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing and not hasattr(found, "__getattr__"):  # one that hands on what it does not do
        raise TargetError(
            f"The executor {name} has no method {', '.join(missing)}.",
            hint="docs/executors.md describes each one.",
        )
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise TargetError(
            f"The executor {name} cannot be made with an Assignment alone: {error}.",
            hint="write def __init__(self, assignment: muster.executors.Assignment) -> None.",
        ) from None
    except ValueError:
        pass  # nothing is known of what its constructor takes
    return found
