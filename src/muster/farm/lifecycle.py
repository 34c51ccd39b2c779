"""Which state may follow which, and how an attempt's outcome decides it. Pure tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.farm.model import Outcome, TaskState

MAY_FOLLOW: dict[TaskState, frozenset[TaskState]] = {
    TaskState.READY: frozenset({TaskState.CLAIMED, TaskState.CANCELLED}),
    TaskState.CLAIMED: frozenset(
        {TaskState.DONE, TaskState.FAILED, TaskState.READY, TaskState.CANCELLED}
    ),
    TaskState.DONE: frozenset(),
    TaskState.FAILED: frozenset({TaskState.READY}),  # `muster retry`
    TaskState.CANCELLED: frozenset({TaskState.READY}),  # `muster retry --cancelled`
}

#: A sentence for each outcome, used on screen and in the exported table.
REASONS: dict[Outcome, str] = {
    Outcome.OK: "finished",
    Outcome.EXCEPTION: "raised an exception",
    Outcome.BAD_RESULT: "returned something that cannot be recorded",
    Outcome.DEVICE_OOM: "ran out of GPU memory",
    Outcome.HOST_OOM: "was killed because the host ran out of memory",
    Outcome.CRASH: "ended its process",
    Outcome.TIMEOUT: "took longer than --timeout and was killed",
    Outcome.PREEMPTED: "was preempted by the cluster",
    Outcome.JOB_TIMEOUT: "was cut short by the time limit of its worker's job",
    Outcome.LOST: "was interrupted with its worker's job or its run",
}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often each failure class is tried again, and after which pause.

    ``retries`` bounds crashes and host out-of-memory; a device out-of-memory is tried once more
    alone when it shared its device; a lost or preempted attempt is nobody's fault, counts apart
    and is only bounded against loops.
    """

    retries: int = 1
    exception_retries: int = 0
    timeout_retries: int = 0
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
            Outcome.HOST_OOM: self.retries,
            Outcome.CRASH: self.retries,
            Outcome.TIMEOUT: self.timeout_retries,
            Outcome.PREEMPTED: self.lost_limit,
            Outcome.JOB_TIMEOUT: self.lost_limit,
            Outcome.LOST: self.lost_limit,
        }[outcome]

    def pause_s(self, tries: int, jitter: float) -> float:
        """Exponential in ``tries`` (1, 2, …), capped, times a jitter factor in [0.5, 1]."""
        return min(self.backoff_cap_s, self.backoff_s * 2.0 ** (tries - 1)) * (0.5 + jitter / 2)


def may_follow(current: TaskState, following: TaskState) -> bool:
    return following in MAY_FOLLOW[current]
