"""A GPU on which one context after another breaks gets no more tasks, and none of them is lost."""

from __future__ import annotations

import pytest
from tests.unit.farm.test_decide import Rig, gpus, kinds, tasks

from muster.farm.decisions import Policy, RetryPolicy
from muster.farm.events import Progress, WorkerDied
from muster.farm.task import Outcome

MANY = RetryPolicy(by_outcome={Outcome.BROKEN_CONTEXT: 1000}, breaks_in_a_row=6)


CHUNKS = RetryPolicy(by_outcome={Outcome.CRASH: 1000}, breaks_in_a_row=6, backoff_s=0.0)


def crashes(rig: Rig, count: int, *, records: int = 0) -> list[str]:
    """Each worker does that many records and is then ended by a signal; the notes of that."""
    notes = []
    for _ in range(count):
        if rig.scheduler.is_finished:
            break
        while not any(rig.holds.get(w) for w in rig.scheduler.roster.workers):
            rig.wait()
            rig.ready()
        worker_id = next(w for w in rig.scheduler.roster.workers if rig.holds[w])
        if records:
            said = {"records": records, "rejected": 1, "left": 3}
            rig.step(Progress(worker_id, rig.holds[worker_id][0].task_id, "", said))
        rig.holds[worker_id] = []
        notes += kinds(rig.step(WorkerDied(worker_id, None, 11, "SIGSEGV")), "quarantined")
        rig.ready()
    return notes


def breaks(rig: Rig, count: int, outcome: Outcome, *, records: int = 0) -> list[str]:
    """Each worker does that many records and then breaks its context; the notes of that."""
    notes = []
    for _ in range(count):
        if rig.scheduler.is_finished:
            break
        while not any(rig.holds.get(w) for w in rig.scheduler.roster.workers):
            rig.wait()
            rig.ready()
        worker_id = next(w for w in rig.scheduler.roster.workers if rig.holds[w])
        if records:
            task_id = rig.holds[worker_id][0].task_id
            said = {"records": records, "rejected": 1, "left": 3}
            rig.step(Progress(worker_id, task_id, "", said))
        out = rig.end(worker_id, outcome, poisoned=True, message="illegal memory access")
        notes += kinds(out, "quarantined")
        rig.holds[worker_id] = []
        rig.step(WorkerDied(worker_id, 0, None, "ended"))
        rig.ready()
    return notes


def test_the_only_gpu_is_given_up_and_every_task_is_kept() -> None:
    rig = Rig(gpus(1), tasks(20), Policy(retry=MANY))
    rig.ready()
    rig.end(rig.worker_on(0))  # it did work
    assert breaks(rig, 5, Outcome.BROKEN_CONTEXT) == []
    [note] = breaks(rig, 1, Outcome.BROKEN_CONTEXT)
    said = "gpu0.0: 6 GPU contexts in a row broke on it without a finished task between them"
    assert note.startswith(said)
    assert rig.scheduler.is_finished
    assert len(rig.scheduler.open_tasks()) == 19


def test_several_gpus_are_given_up_one_by_one() -> None:
    rig = Rig(gpus(2), tasks(20), Policy(retry=MANY))
    rig.ready()
    notes = breaks(rig, 100, Outcome.BROKEN_CONTEXT)
    assert len(notes) == 2 and rig.scheduler.is_finished
    assert len(rig.scheduler.open_tasks()) == 20


def test_a_gpu_that_does_records_between_is_kept() -> None:
    rig = Rig(gpus(1), tasks(1), Policy(retry=MANY))
    rig.ready()
    assert breaks(rig, 40, Outcome.BROKEN_CONTEXT, records=2) == []
    assert len(breaks(rig, 40, Outcome.BROKEN_CONTEXT, records=1)) == 1  # the one was rejected


def test_tasks_that_break_the_only_gpu_are_not_all_failed() -> None:
    """The tasks of a sweep; those that had failed by then run again with the next start."""
    policy = Policy(retry=RetryPolicy(breaks_in_a_row=6))
    rig = Rig(gpus(1), tasks(20), policy)
    rig.ready()
    rig.end(rig.worker_on(0))
    [note] = breaks(rig, 40, Outcome.EXCEPTION)
    assert "the last: illegal memory access" in note
    assert len(rig.scheduler.open_tasks()) == 19


def test_whoever_wants_to_keep_going_has_them_all_tried() -> None:
    policy = Policy(retry=RetryPolicy(breaks_in_a_row=6), keep_going=True)
    rig = Rig(gpus(1), tasks(20), policy)
    rig.ready()
    assert breaks(rig, 40, Outcome.EXCEPTION) == []
    assert rig.scheduler.open_tasks() == []


@pytest.mark.parametrize("gpus_there", [1, 2])
def test_a_map_that_crashes_on_every_record_is_given_up(gpus_there: int) -> None:
    """A chunk may lose a thousand workers, but not where nothing is done between."""
    rig = Rig(gpus(gpus_there), tasks(3), Policy(retry=CHUNKS))
    rig.ready()
    notes = crashes(rig, 100)
    assert len(notes) == gpus_there and rig.scheduler.is_finished
    assert "6 workers in a row crashed on it without a finished task between them" in notes[0]
    assert len(rig.scheduler.open_tasks()) == 3


def test_a_map_that_does_records_between_crashes_goes_on() -> None:
    rig = Rig(gpus(1), tasks(1), Policy(retry=CHUNKS))
    rig.ready()
    assert crashes(rig, 40, records=2) == []


def test_tasks_of_a_sweep_that_crash_are_still_their_own_fault() -> None:
    policy = Policy(retry=RetryPolicy(breaks_in_a_row=6))
    rig = Rig(gpus(1), tasks(20), policy)
    rig.ready()
    rig.end(rig.worker_on(0))
    assert crashes(rig, 100) == []
    assert rig.scheduler.open_tasks() == []
