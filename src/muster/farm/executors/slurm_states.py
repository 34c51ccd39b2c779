"""What SLURM's words mean for a pilot: pure tables, and the reading of its commands' output."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import NamedTuple

from muster.farm.model import Outcome


class Element(NamedTuple):
    """One element of an array as SLURM shows it."""

    state: str
    restarts: int = 0  # how often it was requeued
    reason: str = ""

    @property
    def is_there(self) -> bool:
        """It waits, runs, or will run again."""
        return self.state in _THERE

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


#: COMPLETING too: what is requeued passes through it, and what has ended leaves it.
_THERE = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING",
    "RESIZING", "STAGE_OUT", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}  # fmt: skip

#: How an attempt ended whose pilot's job came to this end, and a sentence for it.
ENDINGS: Mapping[str, tuple[Outcome, str]] = {
    "CANCELLED": (Outcome.LOST, "was cancelled with scancel"),
    "NODE_FAIL": (Outcome.LOST, "lost its node"),
    "BOOT_FAIL": (Outcome.LOST, "was given a node that did not start"),
    "PREEMPTED": (Outcome.PREEMPTED, "was preempted by a job of higher priority"),
    "TIMEOUT": (
        Outcome.JOB_TIMEOUT,
        "reached its time limit; ask for more with --time, or save with ctx.checkpoint",
    ),
    "DEADLINE": (Outcome.JOB_TIMEOUT, "reached its deadline"),
    "OUT_OF_MEMORY": (
        Outcome.HOST_OOM,
        "used more memory than it was given; ask for more with --mem",
    ),
    "REVOKED": (Outcome.LOST, "was taken over by another cluster"),
    "FAILED": (Outcome.LOST, "failed"),
    "COMPLETED": (Outcome.LOST, "ended before its work was done"),
    "REQUEUED": (Outcome.LOST, "was requeued"),
    "GONE": (Outcome.LOST, "is not known to SLURM any more"),
}


def ending_of(state: str) -> tuple[Outcome, str]:
    return ENDINGS.get(state, (Outcome.LOST, f"ended in the state {state}"))


#: What ``read_squeue`` reads; the reason is last because it may hold spaces.
SQUEUE = (
    "squeue", "--noheader", "--array", "--states=all",
    "--Format=JobArrayID:40,State:24,RestartCnt:12,Reason:80",
)  # fmt: skip


def read_squeue(text: str) -> dict[tuple[int, int], Element]:
    """The elements in the output of ``SQUEUE``, by array and number.

    >>> read_squeue("12_3    PENDING    0    Priority\\n")
    {(12, 3): Element(state='PENDING', restarts=0, reason='Priority')}
    """
    found = {}
    for line in text.splitlines():
        words = line.split(None, 3)
        if len(words) < 3:
            continue
        array, _, number = words[0].partition("_")
        if array.isdigit() and number.isdigit() and words[2].isdigit():
            reason = words[3].strip() if len(words) > 3 else ""
            element = Element(words[1], int(words[2]), "" if reason == "None" else reason)
            found[int(array), int(number)] = element
    return found


def was_preempted(show_job: str) -> bool:
    """Whether ``scontrol show job`` knows of a preemption."""
    found = re.search(r"\bPreemptTime=(\S+)", show_job)
    return found is not None and found.group(1) not in ("None", "N/A", "Unknown")


def why_warned(number: int, show_job: str) -> Outcome:
    """Why a pilot's job got this signal: PREEMPTED, JOB_TIMEOUT or, when cancelled, LOST."""
    if was_preempted(show_job):
        return Outcome.PREEMPTED
    if number == signal.SIGTERM or "JobState=CANCELLED" in show_job:
        return Outcome.LOST
    return Outcome.JOB_TIMEOUT
