"""What a failed attempt decides about its task, the policy that the scheduler decides by, and what
it asks of the coordinator. Values and pure functions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from muster.farm.outcomes import REASONS
from muster.farm.task import AttemptRecord, Finished, Outcome, Task

if TYPE_CHECKING:
    from muster.farm.events import WorkerDied
    from muster.farm.roster import Worker


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often each failure class is tried again, and after which pause.

    ``retries`` bounds crashes, broken contexts and host out-of-memory; a device out-of-memory is
    tried once more alone when it shared its device; a task above its memory limit is nobody's fault
    unless it was the first of its worker; ``device_fault_retries`` bounds attempts that a
    broken device ended; a lost or preempted attempt is nobody's fault, counts apart and is only
    bounded against loops. ``breaks_in_a_row``: how many contexts may break on a GPU that does
    nothing between them.
    """

    retries: int = 1
    exception_retries: int = 0
    timeout_retries: int = 0
    device_fault_retries: int = 5
    breaks_in_a_row: int = 16
    lost_limit: int = 20
    backoff_s: float = 0.5
    backoff_cap_s: float = 60.0
    by_outcome: dict[Outcome, int] = field(default_factory=dict)

    def limit(self, outcome: Outcome) -> int:
        if outcome in self.by_outcome:
            return self.by_outcome[outcome]
        return {
            Outcome.EXCEPTION: self.exception_retries,
            Outcome.BAD_RESULT: 0,
            Outcome.DEVICE_OOM: 0,
            Outcome.DEVICE_FAULT: self.device_fault_retries,
            Outcome.BROKEN_CONTEXT: self.retries,
            Outcome.HOST_OOM: self.retries,
            Outcome.MEMORY_LIMIT: 0,
            Outcome.CRASH: self.retries,
            Outcome.TIMEOUT: self.timeout_retries,
            Outcome.PREEMPTED: self.lost_limit,
            Outcome.JOB_TIMEOUT: self.lost_limit,
            Outcome.LOST: self.lost_limit,
            Outcome.STOPPED: 0,
        }[outcome]

    def pause_s(self, tries: int, jitter: float) -> float:
        """Exponential in ``tries`` (1, 2, …), capped, times a jitter factor in [0.5, 1]."""
        return min(self.backoff_cap_s, self.backoff_s * 2.0 ** (tries - 1)) * (0.5 + jitter / 2)


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def fingerprint(finished: Finished) -> str:
    """Equal for failures with the same cause: the frames and the error's type, not its values.

    Addresses are dropped everywhere and numbers in the message, so ``loss is 0.31`` and
    ``loss is 0.29`` at the same line are one group.
    """
    frames = [line for line in finished.trace.splitlines() if line.startswith("  ")]
    message = _NUMBER.sub("#", _ADDRESS.sub("0x", finished.message))
    text = "\n".join([finished.outcome.value, *(_ADDRESS.sub("0x", f) for f in frames), message])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def death_as_finished(event: WorkerDied, killing: Outcome | None, seconds: float) -> Finished:
    """The attempt that was running when its worker died; the caller fills in whose it was."""
    if killing is not None:
        outcome = killing
    elif event.outcome is not None:
        outcome = event.outcome
    elif event.host_oom:
        outcome = Outcome.HOST_OOM
    else:
        outcome = Outcome.CRASH
    return Finished(
        task_id=0,
        token=0,
        outcome=outcome,
        started_s=0.0,
        seconds=seconds,
        log_start=event.log_start,
        log_end=event.log_end,
        peak_mib=None,
        message=event.reason if killing is None else f"it {REASONS[killing]}",
        trace=event.trace,
        signal=event.signal,
    )


def cause_of(event: WorkerDied) -> str:
    """Why a worker died, with the last it printed, which stands nowhere else if it never began."""
    words = "; ".join([line.strip() for line in event.trace.splitlines() if line.strip()][-3:])
    return f"{event.reason} (it printed: {words[-300:]})" if words else event.reason


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
    max_lead: int = 4096
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

    def stop(self, worker: Worker) -> None:
        """Let a worker end once it has finished what it holds."""
        if not worker.stopping:
            worker.stopping = True
            self.stops.append(worker.worker_id)

    def add(self, later: Decisions) -> None:
        """Do also what was decided in the same turn, a moment later."""
        self.fetch += later.fetch
        for one in fields(self):
            if one.name != "fetch":
                getattr(self, one.name).extend(getattr(later, one.name))
