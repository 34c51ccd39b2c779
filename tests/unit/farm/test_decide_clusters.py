"""What the scheduler makes of workers that a cluster takes away, and of those it finds."""

from __future__ import annotations

import pytest
from tests.unit.farm.test_decide import Rig, cpus, finished, tasks

from muster.farm.decisions import Decisions, Policy, RetryPolicy
from muster.farm.events import Fetched, Results, Returned, WorkerDied, WorkerLeaving
from muster.farm.outcomes import REASONS
from muster.farm.roster import Roster
from muster.farm.task import HeldWorker, Outcome

BLAMELESS = [Outcome.PREEMPTED, Outcome.JOB_TIMEOUT, Outcome.LOST]


def lost(rig: Rig, worker_id: int, outcome: Outcome) -> Decisions:
    rig.holds[worker_id] = []
    return rig.step(WorkerDied(worker_id, None, None, "its job 1_0 ended", outcome=outcome))


@pytest.mark.parametrize("outcome", BLAMELESS)
def test_a_task_whose_worker_is_taken_away_runs_again_at_once_and_is_not_to_blame(
    outcome: Outcome,
) -> None:
    rig = Rig(cpus(1), tasks(1), Policy(retry=RetryPolicy(retries=0)))
    rig.ready()
    [worker] = rig.holds
    out = lost(rig, worker, outcome)
    [(record, again)] = out.tried
    assert record.finished.outcome is outcome
    assert (again.tries, again.losses, again.token) == (0, 1, record.token + 1)
    assert out.failed == []


def test_a_crash_after_losses_still_has_all_its_tries() -> None:
    rig = Rig(cpus(1), tasks(1), Policy(retry=RetryPolicy(retries=1)))
    for _ in range(3):
        rig.ready()
        lost(rig, rig.worker_on(0), Outcome.PREEMPTED)
    rig.ready()
    out = rig.die(rig.worker_on(0))
    assert [task.tries for _, task in out.tried] == [1]
    assert out.failed == []


def test_losses_have_a_limit_so_that_nothing_runs_for_ever() -> None:
    rig = Rig(cpus(1), tasks(1), Policy(retry=RetryPolicy(lost_limit=2)))
    for _ in range(2):
        rig.ready()
        assert lost(rig, rig.worker_on(0), Outcome.JOB_TIMEOUT).failed == []
    rig.ready()
    [record] = lost(rig, rig.worker_on(0), Outcome.JOB_TIMEOUT).failed
    assert record.finished.outcome is Outcome.JOB_TIMEOUT


def test_many_losses_do_not_stop_the_run() -> None:
    """They say nothing about the task: no pause after the first five, no blame for the slot."""
    rig = Rig(cpus(2), tasks(20), Policy(retry=RetryPolicy(lost_limit=0)))
    rig.ready()
    for _ in range(8):
        lost(rig, rig.worker_on(0), Outcome.LOST)
        rig.ready()
    assert rig.scheduler.paused == ""
    assert len(rig.scheduler.roster.usable()) == 2


def test_a_leaving_worker_gets_nothing_more_and_what_it_hands_back_runs_elsewhere() -> None:
    rig = Rig(cpus(2), tasks(6), Policy(lead_s=10.0))
    rig.ready()
    first, second = rig.worker_on(0), rig.worker_on(1)
    rig.step(WorkerLeaving(first))
    head, *rest = rig.holds[first]
    before = len(rig.holds[first])
    rig.step(Returned(first, [task.task_id for task in rest]))
    rig.end(second)
    rig.end(second)
    assert len(rig.holds[first]) == before, "nothing is sent to it"
    out = rig.step(Results(first, [finished(head, Outcome.PREEMPTED, poisoned=True)]))
    assert [task.task_id for _, task in out.tried] == [head.task_id]
    assert not any(send.worker_id == first for send in out.sends)


def test_a_leaving_worker_that_finished_is_not_sent_the_next_task() -> None:
    rig = Rig(cpus(1), tasks(3))
    rig.ready()
    worker = rig.worker_on(0)
    rig.step(WorkerLeaving(worker))
    while rig.holds[worker]:
        assert rig.end(worker).sends == []


def test_a_worker_that_had_no_time_to_start_is_no_fault_of_its_slot() -> None:
    rig = Rig(cpus(1), tasks(1))
    for _ in range(5):
        lost(rig, rig.worker_on(0), Outcome.PREEMPTED)
    assert rig.scheduler.roster.usable()
    for _ in range(3):
        rig.step(WorkerDied(rig.worker_on(0), None, None, "its job failed", outcome=Outcome.LOST))
        if rig.scheduler.next_deadline() is not None:
            rig.wait()
    assert not rig.scheduler.roster.usable(), "a job that always fails is given up"


def test_a_worker_of_an_earlier_coordinator_goes_on_with_what_it_holds() -> None:
    rig = Rig(cpus(2), [])
    [held, other] = tasks(2)
    rig.scheduler.roster.adopt(0, HeldWorker(7, [held]), 0.0)
    rig.scheduler.backlog.exhausted = False
    rig.scheduler.step([Fetched([other], exhausted=True)], 1.0)
    workers = rig.scheduler.roster.workers
    assert workers[7].slot.worker_id == 7
    assert not rig.scheduler.is_finished
    out = rig.scheduler.step([Results(7, [finished(held)])], 2.0)
    assert [record.task_id for record in out.done] == [held.task_id]
    assert out.late == []


def test_what_a_worker_did_before_it_was_taken_over_may_have_left_something() -> None:
    rig = Rig(cpus(1), [])
    rig.scheduler.roster.adopt(0, HeldWorker(7, tasks(1)), 0.0)
    died = WorkerDied(7, None, 9, "took too much", outcome=Outcome.MEMORY_LIMIT)
    out = rig.scheduler.step([died], 1.0)
    assert (len(out.failed), len(out.tried)) == (0, 1)


def test_a_held_joint_call_counts_as_one() -> None:
    roster = Roster(cpus(1), 1)
    roster.adopt(0, HeldWorker(3, tasks(4), is_together=True, is_ready=False), 5.0)
    worker = roster.workers[3]
    assert (worker.together, worker.call_size, worker.ready) == (True, 4, False)
    assert worker.head_since == 5.0
    roster.ready(3)
    assert worker.ready


def test_every_outcome_has_a_sentence_and_a_limit() -> None:
    policy = RetryPolicy()
    for outcome in Outcome:
        assert REASONS[outcome]
        if outcome is not Outcome.OK:
            assert policy.limit(outcome) >= 0
