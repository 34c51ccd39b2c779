"""What SLURM's states and reasons mean: pure tables, and the reading of what its commands print."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Literal, NamedTuple

from muster.base.errors import SetupError

#: Why a pilot's job left its place, as the outcome of its attempt.
Ending = Literal["lost", "preempted", "job_timeout", "host_oom"]

_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
#: With COMPLETING: a requeued job passes through it, and one that has ended leaves it soon.
_ALIVE = _WAITING | {
    "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING",
    "RESIZING", "RESV_DEL_HOLD",
}  # fmt: skip


class JobStatus(NamedTuple):
    """A job, or an element of an array, as SLURM shows it.

    Attributes
        state: as SLURM writes it; UNKNOWN when SLURM has forgotten the job.
        restarts: how often it was sent back to the queue.
        reason: why it waits, or why it ended; "" for none.
        exit_code, signal: of the batch script, once it has ended.
        nodes: where it runs, in SLURM's short form.
    """

    state: str
    restarts: int = 0
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""

    @property
    def is_alive(self) -> bool:
        """It waits, runs, or will run again."""
        return self.state in _ALIVE

    @property
    def waits(self) -> bool:
        return self.state in _WAITING


#: The elements of arrays, by array and number.
Elements = Mapping[tuple[int, int], JobStatus]


# ---------------------------------------------------------------- what commands print

#: The reason is last because it may hold spaces.
SQUEUE = (
    "squeue", "--noheader", "--array", "--states=all",
    "--Format=JobArrayID:40,State:24,RestartCnt:12,Reason:80",
)  # fmt: skip


def read_squeue(text: str) -> dict[tuple[int, int], JobStatus]:
    """The elements in the output of ``SQUEUE``.

    >>> read_squeue("12_3    PENDING    0    Priority\\n")[12, 3].reason
    'Priority'
    """
    found = {}
    for line in text.splitlines():
        words = line.split(None, 3)
        if len(words) < 3:
            continue
        array, _, number = words[0].partition("_")
        if array.isdigit() and number.isdigit() and words[2].isdigit():
            reason = _said(words[3].strip()) if len(words) > 3 else ""
            found[int(array), int(number)] = JobStatus(words[1], int(words[2]), reason)
    return found


def read_scontrol(text: str) -> JobStatus:
    """A line of ``scontrol -o show job``.

    >>> status = read_scontrol("JobId=7 JobState=FAILED Reason=None Restarts=1 ExitCode=75:0")
    >>> status.state, status.reason, status.exit_code, status.restarts
    ('FAILED', '', 75, 1)
    """
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", text.strip().partition("\n")[0]))
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    return JobStatus(
        state=fields.get("JobState", "UNKNOWN"),
        restarts=int(fields.get("Restarts", "0") or 0),
        reason=_said(fields.get("Reason", "")),
        exit_code=int(code or 0),
        signal=int(number or 0),
        nodes=_said(fields.get("NodeList", "")),
    )


def read_sacct(text: str) -> JobStatus:
    """The last line of ``sacct -P -o State,ExitCode``; a requeued job has several.

    >>> read_sacct("PREEMPTED|0:0\\nCANCELLED by 1000|0:15\\n").state
    'CANCELLED'
    """
    state, _, codes = text.strip().splitlines()[-1].partition("|")
    code, _, number = codes.partition(":")
    return JobStatus(state.partition(" ")[0], exit_code=int(code or 0), signal=int(number or 0))


def was_preempted(show_job: str) -> bool:
    """Whether ``scontrol show job`` knows of a preemption."""
    found = re.search(r"\bPreemptTime=(\S+)", show_job)
    return found is not None and _said(found.group(1)) != ""


def why_warned(number: int, show_job: str) -> Ending:
    """Why a job got this signal; "lost" when it was cancelled."""
    if was_preempted(show_job):
        return "preempted"
    if number == signal.SIGTERM or "JobState=CANCELLED" in show_job:
        return "lost"
    return "job_timeout"


def _said(value: str) -> str:
    return "" if value in ("None", "(null)", "N/A", "Unknown") else value


# ---------------------------------------------------------------- how jobs end

#: What the final state of a pilot's job means for its attempt, and how that is said of the job.
_ENDINGS: Mapping[str, tuple[Ending, str]] = {
    "CANCELLED": ("lost", "was cancelled with scancel"),
    "NODE_FAIL": ("lost", "lost its node"),
    "BOOT_FAIL": ("lost", "was given a node that did not start"),
    "PREEMPTED": ("preempted", "was preempted by a job of higher priority"),
    "TIMEOUT": (
        "job_timeout",
        "reached its time limit; ask for more with --time, or save with ctx.checkpoint",
    ),
    "DEADLINE": ("job_timeout", "reached its deadline"),
    "OUT_OF_MEMORY": ("host_oom", "used more memory than it was given; ask for more with --mem"),
    "REVOKED": ("lost", "was taken over by another cluster"),
    "FAILED": ("lost", "failed"),
    "COMPLETED": ("lost", "ended before its work was done"),
    "REQUEUED": ("lost", "was requeued"),
    "GONE": ("lost", "is not known to SLURM any more"),
}
#: How the final state of a gang's job is said of it.
SENTENCES: Mapping[str, str] = {
    "COMPLETED": "has ended well",
    "CANCELLED": "was cancelled; the same command submits it again and goes on",
    "TIMEOUT": "has reached its time limit; ask for more with --time; the same command goes on",
    "DEADLINE": "has reached its deadline",
    "OUT_OF_MEMORY": "used more host memory than it was given; ask for more with --mem",
    "NODE_FAIL": "has lost a node; the same command submits it again and goes on",
    "PREEMPTED": "gave way to a job of higher priority; the same command submits it again",
    "BOOT_FAIL": "was given a node that does not start",
}


def ending_of(state: str) -> tuple[Ending, str]:
    """The outcome that a job's final state means, and the words for it, such as "lost its node"."""
    return _ENDINGS.get(state, ("lost", f"ended in the state {state}"))


# ---------------------------------------------------------------- jobs that never start

#: Reasons for which a job waits in vain: what is wrong, and what to do.
_NEVER: Mapping[str, tuple[str, str]] = {
    "PartitionConfig": (
        "its partition has no nodes such as it asks for",
        "ask for less (--mem, cores, GPUs, --nodes) or another --partition; `sinfo -o '%P %D %c %m "
        "%G'` shows what partitions have.",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than its partition gives to one job, or they are all down",
        "lower --nodes or name another --partition; `sinfo` shows which nodes are up.",
    ),
    "PartitionTimeLimit": (
        "it asks for more time than its partition allows",
        "lower --time or name another --partition; `sinfo -o '%P %l'` shows the limits.",
    ),
    "PartitionDown": (
        "its partition is down",
        "name another --partition (`sinfo -o '%P %a'` shows which are up), or run the same command "
        "when it is up again.",
    ),
    "PartitionInactive": (
        "its partition starts no jobs",
        "name another --partition; `sinfo -o '%P %a'` shows which are up.",
    ),
    "BadConstraints": (
        "no node has what it asks for",
        "look at the constraints in --slurm-arg; `sinfo -o '%N %f'` shows the nodes' features.",
    ),
    "InvalidAccount": ("its account is not valid", "name another --account."),
    "AccountNotAllowed": (
        "its partition does not admit its account",
        "name another --account or --partition.",
    ),
    "InvalidQOS": ("its QOS is not valid", "name another with --slurm-arg qos=NAME."),
    "QOSNotAllowed": (
        "its partition does not admit its QOS",
        "name another with --slurm-arg qos=NAME, or another --partition.",
    ),
    "DependencyNeverSatisfied": (
        "it waits for a job that can no longer end as it must",
        "run the same command again without that dependency.",
    ),
    "ReservationDeleted": (
        "its reservation is gone",
        "leave --slurm-arg reservation=… out, or name another one.",
    ),
    "JobHoldMaxRequeue": (
        "it failed to start again and again, and SLURM holds it",
        "see its output and `scontrol show job`; then run the same command again.",
    ),
}
_TOO_MUCH = (
    "it asks for more than its account or QOS allows one job",
    "ask for less; `sacctmgr show qos` and `sacctmgr show associations user=$USER` show "
    "the limits.",
)
#: Limits of an account, a QOS or a partition that a single job exceeds by itself.
_OF_ONE_JOB = re.compile(
    r"(?:QOS|Assoc|Association)\w*(?:Max\w*PerJob\w*|MaxWallDuration\w*|TimeLimit|JobLimit)$"
)


def never_starts(job: str, reason: str) -> SetupError | None:
    """The error for a job that waits for this reason; None where waiting may help."""
    found = _NEVER.get(reason)
    if found is None and _OF_ONE_JOB.match(reason) and "MaxJobs" not in reason:
        found = _TOO_MUCH
    if found is None:
        return None
    return SetupError(f"SLURM will never start job {job}: {found[0]} ({reason}).", hint=found[1])
