"""The scheduler when tasks are told to end early: who is told, who is killed, what is stopped."""

from __future__ import annotations

import pytest
from tests.unit.farm.test_decide import TARGETS, Rig, cpus, gpus, tasks

from muster.farm.decide import Scheduler
from muster.farm.decisions import Policy
from muster.farm.events import (
    Fetched,
    Reopen,
    Returned,
    Slots,
    StopTask,
    WorkerDied,
    WorkerReady,
)
from muster.farm.task import Outcome, TargetSpec

AS_ASKED = [
    Outcome.STOPPED, Outcome.PREEMPTED, Outcome.JOB_TIMEOUT, Outcome.LOST, Outcome.CRASH,
    Outcome.DEVICE_OOM, Outcome.DEVICE_FAULT, Outcome.HOST_OOM, Outcome.TIMEOUT,
]  # fmt: skip


@pytest.mark.parametrize("outcome", AS_ASKED)
def test_however_a_stopped_task_ends_its_worker_goes_on(outcome: Outcome) -> None:
    rig = Rig(cpus(1), tasks(2))
    rig.ready()
    worker = rig.worker_on(0)
    assert rig.step(StopTask(1)).halts == [(worker, 1, False)]
    out = rig.end(worker, outcome)
    [(task, record)] = out.stopped
    assert task.task_id == 1
    assert record is not None and record.finished.outcome is outcome
    assert (out.failed, out.tried, out.done) == ([], [], [])
    assert [task.task_id for send in out.sends for task in send.tasks] == [2]


@pytest.mark.parametrize("outcome", [*AS_ASKED, Outcome.EXCEPTION])
def test_one_that_is_to_save_before_it_rests_runs_again_where_it_could_not(
    outcome: Outcome,
) -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    worker = rig.worker_on(0)
    assert rig.step(StopTask(1, pauses=True, saves=True)).halts == [(worker, 1, True)]
    out = rig.end(worker, outcome)
    is_as_asked = outcome is Outcome.STOPPED
    assert len(out.stopped) == is_as_asked
    assert len(out.tried) + len(out.failed) == (not is_as_asked), "as if it had not been told"


def test_one_that_is_to_save_does_not_end_where_it_waits() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1, pauses=True, saves=True))
    out = rig.die(rig.worker_on(0))
    assert ([again.token for _, again in out.tried], out.stopped) == ([2], [])
    assert rig.step(StopTask(1, pauses=True, saves=True)).stopped == []
    assert [task.task_id for task in rig.scheduler.open_tasks()] == [1]


@pytest.mark.parametrize("outcome", [Outcome.EXCEPTION, Outcome.BAD_RESULT])
def test_an_error_of_its_own_stays_one(outcome: Outcome) -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1))
    out = rig.end(rig.worker_on(0), outcome)
    assert (len(out.failed), out.stopped) == (1, [])


def test_a_task_that_was_faster_is_done() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1))
    out = rig.end(rig.worker_on(0))
    assert (len(out.done), out.stopped) == (1, [])


@pytest.mark.parametrize(
    ("pauses", "target", "grace_s"),
    [(False, 1, 0.5), (True, 1, 60.0), (False, 9, 10.0), (True, 9, 60.0)],
)
def test_a_worker_whose_task_does_not_end_is_killed(
    pauses: bool, target: int, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, 9, TargetSpec(name="c", kind="command", argv=("c",)))
    rig = Rig(cpus(1), tasks(1, target=target))
    rig.ready()
    rig.step(StopTask(1, pauses), at=7.0)
    assert rig.scheduler.next_deadline() == 7.0 + grace_s
    out = rig.wait()
    worker = rig.worker_on(0)
    assert [kill[0] for kill in out.kills] == [worker]
    assert rig.scheduler.next_deadline() is None
    [(_, record)] = rig.die(worker).stopped
    assert record is not None and record.finished.outcome is Outcome.STOPPED


def test_a_task_that_waits_ends_at_once() -> None:
    rig = Rig(cpus(1), tasks(3))
    rig.ready()
    out = rig.step(StopTask(3))
    assert ([t.task_id for t, _ in out.stopped], out.halts) == ([3], [])
    assert 3 not in {task.task_id for task in rig.scheduler.open_tasks()}
    assert rig.step(StopTask(3)).stopped == [], "it has ended"


def test_a_task_that_loses_its_worker_and_is_stopped_in_one_turn() -> None:
    """It has a new token by then: the ledger writes new tokens first."""
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    worker = rig.worker_on(0)
    out = rig.step(WorkerDied(worker, None, 9, "was ended by SIGKILL (9)"), StopTask(1))
    [(_, again)], [(stopped, record)] = out.tried, out.stopped
    assert again == stopped
    assert (stopped.token, record) == (2, None)


def test_a_task_promoted_while_it_is_being_stopped_runs_again() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1, pauses=True))
    assert rig.step(Reopen(1)).promoted == [], "it still runs"
    out = rig.end(rig.worker_on(0), Outcome.STOPPED)
    assert out.stopped == []
    [(_, again)] = out.tried
    assert (again.token, again.tries) == (2, 0)
    assert [task.token for send in out.sends for task in send.tasks] == [2]


def test_a_stopped_task_that_is_promoted_is_claimed_again() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1))
    rig.end(rig.worker_on(0), Outcome.STOPPED)
    assert rig.scheduler.is_finished
    out = rig.step(Reopen(1))
    assert out.promoted == [1]
    assert out.fetch
    assert not rig.scheduler.is_finished


def test_tasks_that_are_chosen_late_are_asked_for_one_per_free_worker() -> None:
    policy = Policy(asks_ahead=False, max_lead=1)
    scheduler = Scheduler(policy, cpus(3), TARGETS, expected=9)
    first = scheduler.step([], 0.0)
    assert (first.fetch, len(first.starts)) == (3, 3)
    ready = [WorkerReady(worker_id, 1) for _, worker_id in first.starts]
    out = scheduler.step([Fetched(tasks(2), exhausted=False), *ready], 1.0)
    assert len(out.sends) == 2
    assert out.fetch == 1
    assert not scheduler.is_finished


# ------------------------------------------------------------------ what its user cancels


@pytest.mark.parametrize("outcome", [*AS_ASKED, Outcome.EXCEPTION, Outcome.BAD_RESULT])
def test_however_a_cancelled_task_ends_it_is_cancelled(outcome: Outcome) -> None:
    rig = Rig(cpus(1), tasks(2))
    rig.ready()
    worker = rig.worker_on(0)
    assert rig.step(StopTask(1, cancels=True)).halts == [(worker, 1, False)]
    assert rig.scheduler.halts.cancelling == [1]
    out = rig.end(worker, outcome)
    [(task, record)] = out.cancelled
    assert task.task_id == 1 and record is not None
    assert (out.failed, out.tried, out.done, out.stopped) == ([], [], [], [])
    assert [task.task_id for send in out.sends for task in send.tasks] == [2]
    assert rig.scheduler.halts.cancelling == []


def test_a_cancelled_task_that_was_faster_is_done() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1, cancels=True))
    out = rig.end(rig.worker_on(0))
    assert (len(out.done), out.cancelled, rig.scheduler.halts.cancelling) == (1, [], [])


@pytest.mark.parametrize("order", [StopTask(1, pauses=True), StopTask(1), Reopen(1)])
def test_what_a_search_says_of_a_cancelled_task_changes_nothing(order: StopTask | Reopen) -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1, cancels=True))
    out = rig.step(order)
    assert (out.halts, out.promoted) == ([], [])
    [(task, _)] = rig.end(rig.worker_on(0), Outcome.STOPPED).cancelled
    assert task.task_id == 1


def test_a_task_that_is_to_pause_can_be_cancelled() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.step(StopTask(1, pauses=True))
    worker = rig.worker_on(0)
    assert rig.step(StopTask(1, cancels=True)).halts == [(worker, 1, False)]
    assert len(rig.end(worker, Outcome.STOPPED).cancelled) == 1


def test_a_cancelled_task_waits_for_nothing_wherever_it_waits() -> None:
    """In the queue, for its next try, and for a device that it is to have alone."""
    rig = Rig(cpus(1), tasks(2))
    rig.ready()
    rig.end(rig.worker_on(0), Outcome.CRASH)  # it is tried again after a pause
    assert [t.task_id for t, _ in rig.step(StopTask(1, cancels=True)).cancelled] == [1]
    rig = Rig(gpus(1, per_gpu=2), tasks(2))
    rig.ready()
    rig.end(rig.worker_on(0), Outcome.DEVICE_OOM)  # its GPU is emptied for it
    assert [t.task_id for t, _ in rig.step(StopTask(1, cancels=True)).cancelled] == [1]
    assert not (rig.scheduler.backlog.solo or rig.scheduler.backlog.queue)
    rig.end(rig.worker_on(1))
    assert rig.scheduler.is_finished


@pytest.mark.parametrize("cancels", [False, True])
def test_one_that_was_handed_out_ahead_ends_with_its_worker(cancels: bool) -> None:
    """It is told, loses its worker through the task before it, and does not begin again."""
    rig = Rig(cpus(1), tasks(3))
    worker = rig.worker_on(0)
    rig.ready()
    roster = rig.scheduler.roster
    roster.give(roster.workers[worker], [rig.scheduler.backlog.queue.popleft()])
    out = rig.step(StopTask(2, cancels=cancels))
    assert (out.halts, out.revokes) == ([(worker, 2, False)], [worker])
    out = rig.die(worker)
    ended = out.cancelled if cancels else out.stopped
    assert [(t.task_id, t.token, record) for t, record in ended] == [(2, 2, None)]
    assert [t.task_id for t in out.retokened] == [2]


def test_one_that_was_handed_out_ahead_is_taken_back() -> None:
    rig = Rig(cpus(1), tasks(3))
    worker = rig.worker_on(0)
    rig.ready()
    roster = rig.scheduler.roster
    roster.give(roster.workers[worker], [rig.scheduler.backlog.queue.popleft()])
    rig.step(StopTask(2, cancels=True))
    out = rig.step(Returned(worker, [2]))
    assert [t.task_id for t, _ in out.cancelled] == [2]
    assert 2 not in {task.task_id for task in rig.scheduler.open_tasks()}


def test_a_task_in_a_call_with_others_goes_on() -> None:
    rig = Rig(cpus(1), tasks(4, target=2))
    rig.ready()
    out = rig.step(StopTask(2, cancels=True))
    assert (out.cancelled, out.halts, rig.scheduler.halts.cancelling) == ([], [], [])
    assert rig.scheduler.roster.has(2)


def test_who_ran_alone_on_a_gpu_that_was_lent_gives_up_no_place_of_another_task() -> None:
    """A runs alone, B waits; the GPU is given back and taken again while A still runs."""
    slots = gpus(1, per_gpu=2)
    rig = Rig(slots, tasks(2))
    rig.ready()
    one, other = rig.worker_on(0), rig.worker_on(1)
    rig.end(one, Outcome.DEVICE_OOM)
    [gone] = rig.end(other, Outcome.DEVICE_OOM).stops
    rig.step(WorkerDied(gone, 0, None, "ended"))
    [alone] = [worker for worker in rig.scheduler.roster.workers if rig.holds[worker]]
    rig.step(Slots([], at_once=False))
    rig.step(Slots(slots, at_once=False))
    rig.end(alone)
    assert not rig.scheduler.is_finished
    assert len(rig.scheduler.open_tasks()) == 1
