"""SLURM's words, and what they mean for an attempt."""

from __future__ import annotations

import signal

import pytest

from muster.base.shown_text import number_ranges
from muster.farm.task import Outcome
from muster.slurm.states import (
    JobStatus,
    ending_of,
    read_squeue,
    was_preempted,
    why_warned,
)

# As SLURM 22.05 prints it.
SQUEUE = """\
3_1                                     PENDING                 0           Resources
3_0                                     RUNNING                 2           None
3_2                                     COMPLETED               0           None
4                                       RUNNING                 0           None
5_[7-9]                                 PENDING                 0           (begin time)
6_0                                     PENDING                 1           ReqNodeNotAvail, UnavailableNodes:n1
"""  # noqa: E501


def test_the_output_of_squeue_is_read_by_element() -> None:
    assert read_squeue(SQUEUE) == {
        (3, 1): JobStatus("PENDING", 0, "Resources"),
        (3, 0): JobStatus("RUNNING", 2, ""),
        (3, 2): JobStatus("COMPLETED", 0, ""),
        (6, 0): JobStatus("PENDING", 1, "ReqNodeNotAvail, UnavailableNodes:n1"),
    }


@pytest.mark.parametrize(
    ("state", "is_alive", "waits"),
    [
        ("PENDING", True, True),
        ("RUNNING", True, False),
        ("COMPLETING", True, False),  # what is requeued passes through it
        ("REQUEUE_HOLD", True, True),
        ("COMPLETED", False, False),
        ("PREEMPTED", False, False),
        ("NODE_FAIL", False, False),
    ],
)
def test_what_is_alive_still_brings_or_has_a_pilot(state: str, is_alive: bool, waits: bool) -> None:
    element = JobStatus(state)
    assert (element.is_alive, element.waits) == (is_alive, waits)


@pytest.mark.parametrize(
    ("state", "outcome", "word"),
    [
        ("CANCELLED", Outcome.LOST, "scancel"),
        ("NODE_FAIL", Outcome.LOST, "node"),
        ("PREEMPTED", Outcome.PREEMPTED, "priority"),
        ("TIMEOUT", Outcome.JOB_TIMEOUT, "--time"),
        ("OUT_OF_MEMORY", Outcome.HOST_OOM, "--mem"),
        ("SOMETHING_NEW", Outcome.LOST, "SOMETHING_NEW"),
    ],
)
def test_every_end_of_a_job_has_an_outcome_and_a_sentence(
    state: str, outcome: Outcome, word: str
) -> None:
    found, sentence = ending_of(state)
    assert Outcome(found) is outcome
    assert word in sentence


@pytest.mark.parametrize(
    ("number", "shown", "outcome"),
    [
        (signal.SIGUSR2, "JobState=RUNNING PreemptTime=None", Outcome.JOB_TIMEOUT),
        (signal.SIGUSR2, "JobState=RUNNING PreemptTime=2026-01-01T10:00:00", Outcome.PREEMPTED),
        (signal.SIGTERM, "JobState=RUNNING PreemptTime=2026-01-01T10:00:00", Outcome.PREEMPTED),
        (signal.SIGTERM, "JobState=CANCELLED PreemptTime=None", Outcome.LOST),
        (signal.SIGUSR2, "", Outcome.JOB_TIMEOUT),
        (signal.SIGTERM, "", Outcome.LOST),
    ],
)
def test_why_a_pilot_was_warned(number: int, shown: str, outcome: Outcome) -> None:
    assert Outcome(why_warned(number, shown)) is outcome


def test_a_preemption_is_known_by_its_time() -> None:
    assert not was_preempted("PreemptEligibleTime=2026-01-01T10:00:00 PreemptTime=None")
    assert was_preempted("PreemptTime=2026-01-01T10:00:00")


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([2, 0, 1], "0-2"), ([0, 2, 3, 9], "0,2-3,9")]
)
def test_slots_are_written_as_an_array(numbers: list[int], text: str) -> None:
    assert ",".join(number_ranges(numbers)) == text
