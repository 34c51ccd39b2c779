"""What the scheduler asks of the coordinator, and the policy it decides by. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from muster.farm.lifecycle import RetryPolicy
from muster.farm.task import AttemptRecord, Finished, Task


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user has chosen about failures, and how far ahead of a worker tasks are sent."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_s: float | None = None
    keep_going: bool = False
    same_failure_limit: int = 5
    device_failure_limit: int = 3
    start_failure_limit: int = 3
    alike_failure_limit: int = (
        8  # plain failures of one cause in a row, of a device that has worked
    )
    lead_s: float = 0.03  # work kept ready in a worker, to hide the commit
    max_lead: int = 512
    asks_ahead: bool = True  # claims tasks before a worker is free for them
    # How long a task that is told to end early may take before its worker is killed: a function,
    # a function that may first reach its next checkpoint, and a command after SIGTERM.
    stop_grace_s: float = 0.5
    pause_grace_s: float = 60.0
    command_grace_s: float = 10.0


class Division(NamedTuple):
    """``task`` as it goes on, with a smaller payload; ``given``: payload and key of new tasks."""

    task: Task
    given: Sequence[tuple[bytes, bytes]]


class Stopped(NamedTuple):
    """A task that has ended early on purpose; ``record``: None where it was not running."""

    task: Task
    record: AttemptRecord | None


class Send(NamedTuple):
    """``together``: one call of a batched target, else tasks to be run one after another."""

    worker_id: int
    tasks: list[Task]
    together: bool


@dataclass
class Decisions:
    """What the coordinator has to do, in the order of the fields."""

    done: list[AttemptRecord] = field(default_factory=list)
    failed: list[AttemptRecord] = field(default_factory=list)
    tried: list[tuple[AttemptRecord, Task]] = field(default_factory=list)  # will run again
    retokened: list[Task] = field(default_factory=list)  # were handed out and are not to blame
    reopened: list[Task] = field(default_factory=list)  # failed because of their device
    stopped: list[Stopped] = field(default_factory=list)
    cancelled: list[Stopped] = field(default_factory=list)  # one by one, by the user
    promoted: list[int] = field(default_factory=list)  # were stopped: to be claimed again
    divided: list[Division] = field(default_factory=list)
    late: list[tuple[int, Finished]] = field(default_factory=list)
    fetch: int = 0
    sends: list[Send] = field(default_factory=list)
    #: worker, task, for how many others
    shares: list[tuple[int, int, int]] = field(default_factory=list)
    #: worker, task, whether it may first reach its next checkpoint
    halts: list[tuple[int, int, bool]] = field(default_factory=list)
    revokes: list[int] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)  # slot id, worker id
    stops: list[int] = field(default_factory=list)
    kills: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, later: Decisions) -> None:
        """Do also what was decided in the same turn, a moment later."""
        self.fetch += later.fetch
        for one in fields(self):
            if one.name != "fetch":
                getattr(self, one.name).extend(getattr(later, one.name))
