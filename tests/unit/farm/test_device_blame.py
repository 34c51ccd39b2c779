"""When a device is no longer believed, and when it is believed again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.farm.test_decide import Rig, finished, gpus, kinds, tasks

from muster.farm.decisions import Policy, RetryPolicy
from muster.farm.events import Results, WorkerDied
from muster.farm.quarantine import DeviceHealth, blame
from muster.farm.task import Finished, Outcome

FAULT, ERROR = Outcome.DEVICE_FAULT, Outcome.EXCEPTION


def health(count: int = 0, naming: int = 0, **fields: Any) -> DeviceHealth:
    calls = [frozenset({number}) for number in range(max(count, naming))]
    return DeviceHealth(accusers=calls[:count], naming=calls[:naming], **fields)


@pytest.mark.parametrize(
    ("outcome", "own", "others", "is_blamed"),
    [
        # It says itself that it cannot be used: whatever the others say, and without others.
        (FAULT, health(naming=3), [], True),
        (FAULT, health(naming=3), [health(marks={"m"})], True),
        (FAULT, health(naming=2), [health()], False),
        (FAULT, health(count=3, naming=2), [health()], False),
        # It fails everything: only beside one that has not failed so.
        (ERROR, health(count=3), [health()], True),
        (ERROR, health(count=3), [health(marks={"m"})], False),
        (ERROR, health(count=3), [], False),
        # It did work: only eight alike in a row that no other knows, beside one that works.
        (ERROR, health(alike=8, has_worked=True), [health(has_worked=True)], True),
        (ERROR, health(alike=7, has_worked=True), [health(has_worked=True)], False),
        (ERROR, health(alike=8, has_worked=True), [health()], False),
        (ERROR, health(alike=8), [health(has_worked=True, marks={"m"}), health()], False),
        (Outcome.DEVICE_OOM, health(alike=8), [health(has_worked=True)], False),
        # A record may have broken it, whatever crashed there before.
        (Outcome.BROKEN_CONTEXT, health(count=3), [health()], False),
        (Outcome.TIMEOUT, health(alike=8), [health(has_worked=True)], False),
    ],
)
def test_who_is_to_blame(
    outcome: Outcome, own: DeviceHealth, others: list[DeviceHealth], is_blamed: bool
) -> None:
    failed = Finished(1, 1, outcome, 0.0, 0.0, 0, 0, None, message="cuda broken")
    found = blame(failed, "m", own, lambda: iter(others), Policy())
    assert (found is not None) == is_blamed
    if found is not None:
        assert "cuda broken" in found.reason
        assert found.until == ("m" if own.alike else "")


def replaced(rig: Rig, slot_id: int, outcome: Outcome = FAULT) -> list[str]:
    """The worker's task fails so that the worker ends; the notes of that."""
    worker_id = rig.worker_on(slot_id)
    notes = kinds(rig.end(worker_id, outcome, poisoned=True), "quarantined")
    rig.step(WorkerDied(worker_id, 0, None, "ended"))
    rig.ready()
    return notes


def test_a_device_that_says_it_is_gone_fails_no_task_even_after_good_work() -> None:
    rig = Rig(gpus(2), tasks(20))
    rig.ready()
    for _ in range(3):
        rig.end(rig.worker_on(0))
    notes = [note for _ in range(3) for note in replaced(rig, 0)]
    assert len(notes) == 1
    assert notes[0].startswith("gpu0.0: it failed 3 tasks in a row")
    good, done = rig.worker_on(1), 3
    for _ in range(40):
        while rig.holds[good]:
            done += len(rig.end(good).done)
        if rig.scheduler.is_finished:
            break
        rig.wait()
    assert done == 20


def test_on_the_only_device_the_run_ends_and_no_task_is_failed() -> None:
    rig = Rig(gpus(1), tasks(20))
    rig.ready()
    for _ in range(3):
        replaced(rig, 0)
    assert rig.scheduler.is_finished
    assert not rig.scheduler.roster.usable()
    assert len(rig.scheduler.open_tasks()) == 20


def test_a_joint_call_on_a_dead_device_counts_once_and_stays_together() -> None:
    rig = Rig(gpus(2), tasks(8, target=2))
    rig.ready()
    worker_id = rig.worker_on(0)
    call, rig.holds[worker_id] = rig.holds[worker_id], []
    out = rig.step(Results(worker_id, [finished(t, FAULT, poisoned=True) for t in call]))
    assert len(call) == 4
    assert kinds(out, "quarantined") == []
    assert {(again.tries, again.batch_limit, again.avoid) for _, again in out.tried} == {(1, 0, "")}


def alike(rig: Rig, count: int) -> list[str]:
    bad = rig.worker_on(0)
    notes = []
    for _ in range(count):
        notes += kinds(rig.end(bad, ERROR, message="the model cannot be built"), "quarantined")
    return notes


def working_pair(count: int) -> Rig:
    rig = Rig(gpus(2), tasks(count), Policy(lead_s=0.0))
    rig.ready()
    rig.end(rig.worker_on(0))
    rig.end(rig.worker_on(1))
    return rig


def test_failures_in_a_row_that_no_other_device_has_set_it_aside() -> None:
    rig = working_pair(40)
    assert alike(rig, 7) == []
    [note] = alike(rig, 1)
    assert "it failed 8 tasks in a row in a way that no other GPU did" in note
    rig.step(WorkerDied(rig.worker_on(0), 0, None, "ended"))
    good, done = rig.worker_on(1), 2
    while rig.holds[good]:
        done += len(rig.end(good).done)
    assert done == 40


def test_it_is_believed_again_once_another_device_fails_so_too() -> None:
    rig = working_pair(40)
    alike(rig, 8)
    rig.step(WorkerDied(rig.worker_on(0), 0, None, "ended"))
    out = rig.end(rig.worker_on(1), ERROR, message="the model cannot be built")
    assert kinds(out, "readmitted") == ["gpu0.0: another GPU fails in the same way"]
    assert [slot for slot, _ in out.starts] == [0]
    rig.ready()
    assert rig.holds[rig.worker_on(0)]
    assert alike(rig, 8) == []


def with_a_liar(rig: Rig, liars: set[int]) -> tuple[set[int], set[int], list[str]]:
    """What is done and failed when some tasks blame every GPU, and who was quarantined."""
    rig.ready()
    done, failed, notes = set(), set(), []
    for _ in range(400):
        if rig.scheduler.is_finished:
            break
        busy = [worker_id for worker_id, held in rig.holds.items() if held]
        for worker_id in busy:
            held = rig.holds[worker_id]
            together = next(joint for who, _, joint in reversed(rig.calls) if who == worker_id)
            call = held[:] if together else held[:1]
            del held[: len(call)]
            lies = any(task.task_id in liars for task in call)
            outcome = FAULT if lies else Outcome.OK
            results = [finished(task, outcome, poisoned=lies) for task in call]
            outs = [rig.step(Results(worker_id, results))]
            if lies:
                rig.holds[worker_id] = []
                outs.append(rig.step(WorkerDied(worker_id, 0, None, "ended")))
            outs.append(rig.ready())
            done |= {record.task_id for out in outs for record in out.done}
            failed |= {record.task_id for out in outs for record in out.failed}
            notes += [note for out in outs for note in kinds(out, "quarantined")]
        if not busy:
            rig.wait()
            rig.ready()
    return done, failed, notes


@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("liars", [{1}, {11}, {3, 11}])
def test_a_task_that_blames_every_gpu_fails_alone(
    num_gpus: int, liars: set[int], target: int
) -> None:
    rig = Rig(gpus(num_gpus), tasks(12, target=target))
    assert with_a_liar(rig, liars) == (set(range(1, 13)) - liars, liars, [])


def test_what_a_worker_has_found_itself_counts_each_time() -> None:
    rig = Rig(gpus(1), tasks(1))
    rig.ready()
    notes = []
    for _ in range(3):
        worker_id = rig.worker_on(0)
        said = {"message": "torch cannot use the GPU of this worker: too old", "poisoned": True}
        notes += kinds(rig.end(worker_id, FAULT, **said), "quarantined")
        rig.step(WorkerDied(worker_id, 0, None, "ended"))
        if not notes:
            rig.wait()
            rig.ready()
    assert len(notes) == 1
    assert [task.task_id for task in rig.scheduler.open_tasks()] == [1]


def test_what_was_only_set_aside_goes_on_when_the_last_other_is_lost() -> None:
    rig = working_pair(40)
    alike(rig, 8)
    rig.step(WorkerDied(rig.worker_on(0), 0, None, "ended"))
    notes = [note for _ in range(3) for note in replaced(rig, 1)]
    assert len(notes) == 1
    assert rig.scheduler.roster.usable()
    assert not rig.scheduler.is_finished
    rig.ready()
    assert rig.holds[rig.worker_on(0)]


def test_readmission_clears_no_other_reason() -> None:
    rig = Rig(gpus(2, per_gpu=2), tasks(80), Policy(lead_s=0.0))
    rig.ready()
    for slot_id in range(4):
        rig.end(rig.worker_on(slot_id))
    stuck = "its memory is not free"
    rig.step(WorkerDied(rig.worker_on(1), None, 9, "killed", stuck=stuck))
    alike(rig, 8)
    rig.end(rig.worker_on(2), ERROR, message="the model cannot be built")
    assert [slot.quarantined for slot in rig.scheduler.roster.slots] == ["", stuck, "", ""]


def test_a_task_whose_gpu_is_gone_goes_to_another_first() -> None:
    rig = Rig(gpus(2), tasks(1))
    rig.ready()
    [worker_id] = [number for number, held in rig.holds.items() if held]
    out = rig.end(worker_id, FAULT, poisoned=True)
    assert [again.avoid for _, again in out.tried] == [f"G{rig.slot_of[worker_id]}"]


CONTEXT = Outcome.BROKEN_CONTEXT


def broken(rig: Rig, slot_id: int) -> tuple[int, list[str]]:
    """The first task there says that one of its records broke the context; who, and the notes."""
    task_id = rig.holds[rig.worker_on(slot_id)][0].task_id
    return task_id, replaced(rig, slot_id, CONTEXT)


def test_records_that_break_contexts_strike_no_gpu_off() -> None:
    """All on one GPU, while the other is at one long task: as with a crash it would be blamed."""
    policy = Policy(retry=RetryPolicy(by_outcome={CONTEXT: 1000}), lead_s=0.0)
    rig = Rig(gpus(2), tasks(12), policy)
    rig.ready()
    met = [broken(rig, 0) for _ in range(6)]
    assert [notes for _, notes in met] == [[]] * 6
    assert len({task_id for task_id, _ in met}) == 6


@pytest.mark.parametrize("breaks_both", [False, True])
def test_a_gpu_that_breaks_what_others_can_do_is_struck_off(breaks_both: bool) -> None:
    policy = Policy(retry=RetryPolicy(by_outcome={CONTEXT: 1000}), lead_s=0.0)
    rig = Rig(gpus(2), tasks(4), policy)
    rig.ready()
    met = {broken(rig, 0)[0] for _ in range(3)}
    notes: list[str] = []
    for _ in range(30):
        if rig.scheduler.is_finished:
            break
        busy = [worker_id for worker_id, held in rig.holds.items() if held]
        if not busy:
            rig.wait()
            rig.ready()
        elif breaks_both and rig.holds[busy[0]][0].task_id in met:
            task_id, more = broken(rig, rig.slot_of[busy[0]])
            met.discard(task_id)
            notes += more
        else:
            notes += kinds(rig.end(busy[0]), "quarantined")
            rig.ready()
    assert rig.scheduler.is_finished
    said = ["gpu0.0: its context broke under 3 tasks that another GPU has done"]
    assert notes == ([] if breaks_both else said)
