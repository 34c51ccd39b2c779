"""The scheduler against its specification: the failure classes of durability.md as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions, Policy, RetryPolicy
from muster.farm.events import (
    Capacity,
    Drain,
    Event,
    Fetched,
    Results,
    Returned,
    Slots,
    WorkerDied,
    WorkerReady,
)
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task
from muster.farm.view import GIVEN_BACK, QUARANTINED, Picture

PLAIN = TargetSpec(name="f", location="f.py", attribute="f")
BATCHED = TargetSpec(name="g", location="g.py", attribute="g", max_batch=64)
SMALL_ON_CPU = dataclasses.replace(BATCHED, name="h", max_batch_on_cpu=4)
TARGETS = {1: PLAIN, 2: BATCHED, 3: SMALL_ON_CPU}


def cpus(count: int) -> list[SlotSpec]:
    return [SlotSpec(slot_id=i, label=f"cpu{i}", devices=()) for i in range(count)]


def gpus(count: int, per_gpu: int = 1) -> list[SlotSpec]:
    return [
        SlotSpec(slot_id=g * per_gpu + k, label=f"gpu{g}.{k}", devices=(f"G{g}",), kind="cuda")
        for g in range(count)
        for k in range(per_gpu)
    ]


def tasks(count: int, *, target: int = 1, first: int = 1) -> list[Task]:
    return [Task(i, i.to_bytes(8, "big"), target, b"{}", 0, 1) for i in range(first, first + count)]


def finished(task: Task, outcome: Outcome = Outcome.OK, **changes: object) -> Finished:
    base = Finished(task.task_id, task.token, outcome, 0.0, 5.0, 0, 0, None)
    if outcome is not Outcome.OK:
        base = base._replace(message=f"{outcome} happened", trace="  File x\nError")
    return base._replace(**changes)


class Rig:
    """Drives a scheduler by hand: time, workers by slot, what they hold."""

    def __init__(
        self,
        slots: Sequence[SlotSpec],
        work: Sequence[Task],
        policy: Policy | None = None,
        *,
        before: Sequence[Event] = (),
    ) -> None:
        self.scheduler = Scheduler(policy or Policy(), slots, TARGETS, expected=len(work))
        self.now = 0.0
        self.slot_of: dict[int, int] = {}
        self.holds: dict[int, list[Task]] = {}
        self.calls: list[tuple[int, list[Task], bool]] = []
        first = self.step(*before)
        if first.fetch:
            self.step(Fetched(list(work), exhausted=True))

    def step(self, *events: Event, at: float | None = None) -> Decisions:
        self.now = self.now + 0.001 if at is None else at
        out = self.scheduler.step(list(events), self.now)
        for slot_id, worker_id in out.starts:
            self.slot_of[worker_id] = slot_id
            self.holds[worker_id] = []
        for worker_id, sent, together in out.sends:
            self.holds[worker_id].extend(sent)
            self.calls.append((worker_id, sent, together))
        return out

    def ready(self) -> Decisions:
        """Every worker that is starting is ready now."""
        starting = [w.worker_id for w in self.scheduler.roster.workers.values() if not w.ready]
        return self.step(*(WorkerReady(worker_id, 100 + worker_id) for worker_id in starting))

    def worker_on(self, slot_id: int) -> int:
        alive = self.scheduler.roster.workers
        [worker_id] = [w for w, slot in self.slot_of.items() if slot == slot_id and w in alive]
        return worker_id

    def end(self, worker_id: int, outcome: Outcome = Outcome.OK, **changes: object) -> Decisions:
        """The worker's first task ends."""
        task = self.holds[worker_id].pop(0)
        return self.step(Results(worker_id, [finished(task, outcome, **changes)]))

    def die(self, worker_id: int, **changes: object) -> Decisions:
        self.holds[worker_id] = []
        return self.step(WorkerDied(worker_id, None, 9, "was ended by SIGKILL (9)", **changes))

    def wait(self) -> Decisions:
        """Until the next thing that is due of itself."""
        due = self.scheduler.next_deadline()
        assert due is not None
        assert due > self.now, "something is overdue: the coordinator would spin"
        return self.step(at=due)


def kinds(out: Decisions, what: str) -> list[str]:
    return [text for kind, text in out.notes if kind == what]


# ------------------------------------------------------------------ failure classes


def test_an_exception_fails_its_task_at_once_and_nothing_else() -> None:
    rig = Rig(cpus(1), tasks(2))
    rig.ready()
    out = rig.end(1, Outcome.EXCEPTION)
    assert [(r.task_id, r.finished.outcome) for r in out.failed] == [(1, Outcome.EXCEPTION)]
    assert out.tried == []
    assert [t.task_id for t in rig.holds[1]] == [2]


def test_exceptions_are_retried_when_asked_for() -> None:
    policy = Policy(retry=RetryPolicy(exception_retries=2))
    rig = Rig(cpus(1), tasks(1), policy)
    rig.ready()
    tokens = []
    for _ in range(2):
        tokens.append(rig.holds[1][0].token)
        out = rig.end(1, Outcome.EXCEPTION)
        assert out.failed == []
        assert not rig.scheduler.is_finished
        rig.wait()
    tokens.append(rig.holds[1][0].token)
    assert tokens == [1, 2, 3]
    assert len(rig.end(1, Outcome.EXCEPTION).failed) == 1
    assert rig.scheduler.is_finished


def test_a_crash_is_retried_on_another_device_first_then_marked_with_its_signal() -> None:
    rig = Rig(gpus(2), tasks(2))
    rig.ready()
    rig.end(rig.worker_on(1))  # gpu1 has done its task and idles
    out = rig.die(rig.worker_on(0))
    assert [record.finished.signal for record, _ in out.tried] == [9]
    assert out.failed == []
    rig.wait()
    assert [t.task_id for t in rig.holds[rig.worker_on(1)]] == [1]
    out = rig.die(rig.worker_on(1))
    [record] = out.failed
    assert record.finished.outcome is Outcome.CRASH
    assert record.finished.signal == 9


def test_a_lone_crashing_task_moves_to_another_device_although_its_own_is_free() -> None:
    """The second device has no worker yet: it must get one, whoever else is idle."""
    rig = Rig(cpus(2), tasks(1))
    rig.ready()
    assert list(rig.slot_of.values()) == [0]
    rig.die(1)
    out = rig.wait()
    assert [slot for slot, _ in out.starts] == [1]
    rig.ready()
    assert [t.task_id for t in rig.holds[2]] == [1]


def test_a_crash_on_the_only_device_is_retried_there() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    rig.die(1)
    rig.wait()
    rig.ready()
    assert [t.task_id for t in rig.holds[2]] == [1]


def test_a_crashed_batched_task_also_goes_to_another_device() -> None:
    rig = Rig(gpus(2), tasks(2, target=2))
    rig.ready()
    assert [(len(sent), together) for _, sent, together in rig.calls] == [(1, True), (1, True)]
    rig.end(rig.worker_on(1))
    rig.die(rig.worker_on(0))
    rig.wait()
    assert [t.task_id for t in rig.holds[rig.worker_on(1)]] == [1]
    assert rig.calls[-1][2] is True


def test_the_host_running_out_of_memory_has_the_limit_of_crashes() -> None:
    rig = Rig(cpus(1), tasks(1))
    rig.ready()
    out = rig.die(1, host_oom=True)
    assert [record.finished.outcome for record, _ in out.tried] == [Outcome.HOST_OOM]
    rig.wait()
    rig.ready()
    [record] = rig.die(2, host_oom=True).failed
    assert record.finished.outcome is Outcome.HOST_OOM


def test_a_task_above_its_memory_limit_fails_only_as_the_first_of_its_worker() -> None:
    """No device is blamed for it, however often it happens there and nowhere else."""
    rig = Rig(gpus(2), tasks(9), Policy(keep_going=True))
    rig.ready()
    for number in range(3):  # the first of three workers
        out = rig.die(rig.worker_on(0), outcome=Outcome.MEMORY_LIMIT)
        assert [one.finished.outcome for one in out.failed] == [Outcome.MEMORY_LIMIT], number
        rig.ready()
    assert all(slot.quarantined == "" for slot in rig.scheduler.roster.slots)
    worker = rig.worker_on(0)
    rig.end(worker)
    out = rig.die(worker, outcome=Outcome.MEMORY_LIMIT)
    assert ([len(out.failed), len(out.tried)]) == [0, 1]
    [(_, again)] = out.tried
    assert (again.tries, again.losses, again.fresh) == (0, 0, True)
    rig.ready()
    out = rig.die(rig.worker_on(0), outcome=Outcome.MEMORY_LIMIT)
    assert [one.task_id for one in out.failed] == [again.task_id], "now it was the first"


def _begins_alone(rig: Rig, task_id: int) -> None:
    """Whoever gets the task has done nothing before, and gets nothing beside it."""
    [worker] = {worker for worker, sent, _ in rig.calls if task_id in [t.task_id for t in sent][:1]
                and worker in rig.scheduler.roster.workers}  # fmt: skip
    first = next(sent for number, sent, _ in rig.calls if number == worker)
    assert [task.task_id for task in first] == [task_id]
    assert not rig.scheduler.roster.workers[worker].has_worked


def test_a_task_that_others_may_have_brought_to_the_limit_waits_for_a_fresh_worker() -> None:
    """Those beside it have nothing to do, and take it all the same only when they have done
    nothing yet: what their tasks have left would kill it again.
    """
    rig = Rig(cpus(3), tasks(6), Policy(keep_going=True))
    rig.ready()
    for slot in range(3):
        rig.end(rig.worker_on(slot))
    task = rig.holds[rig.worker_on(0)][0]
    rig.end(rig.worker_on(1))
    rig.end(rig.worker_on(2))  # both idle from now on
    rig.die(rig.worker_on(0), outcome=Outcome.MEMORY_LIMIT)
    assert not rig.scheduler.is_finished
    assert [sent for _, sent, _ in rig.calls if task.task_id in [t.task_id for t in sent]][1:] == []
    rig.ready()
    _begins_alone(rig, task.task_id)
    rig.end(rig.worker_on(0))
    assert rig.scheduler.is_finished


def test_where_its_place_is_gone_a_fresh_worker_is_made_in_another() -> None:
    """Its slot is given back meanwhile, so one of the others makes room when it has nothing."""
    slots = cpus(2)
    rig = Rig(slots, tasks(4), Policy(keep_going=True))
    rig.ready()
    rig.end(rig.worker_on(0))
    task = rig.holds[rig.worker_on(0)][0]
    rig.end(rig.worker_on(1))
    other = rig.worker_on(1)
    out = rig.step(
        WorkerDied(rig.worker_on(0), None, 9, "took all", outcome=Outcome.MEMORY_LIMIT),
        Slots(slots[1:]),
    )
    assert out.stops == [other]
    rig.end(other)  # what it had in hand
    rig.step(WorkerDied(other, 0, None, "ended"))
    rig.ready()
    _begins_alone(rig, task.task_id)


def test_a_fresh_worker_is_started_although_another_one_is_idle() -> None:
    rig = Rig(cpus(2), tasks(3), Policy(keep_going=True))
    rig.ready()
    rig.end(rig.worker_on(0))
    rig.end(rig.worker_on(1))
    holder = rig.worker_on(0) if rig.holds[rig.worker_on(0)] else rig.worker_on(1)
    [task] = rig.holds[holder]
    out = rig.die(holder, outcome=Outcome.MEMORY_LIMIT)
    assert len(out.starts) == 1
    rig.ready()
    _begins_alone(rig, task.task_id)


def test_what_earlier_tasks_left_in_a_worker_never_fails_a_good_task() -> None:
    """Each worker has room for two tasks, and the next one is killed whatever it is."""
    rig = Rig(cpus(2), tasks(30), Policy(retry=RetryPolicy(retries=0)))
    num_done = 0
    for turn in range(200):
        rig.ready()
        worker = rig.worker_on(turn % 2)
        if rig.scheduler.is_finished:
            break
        if not rig.holds[worker]:
            continue
        if sum(call[0] == worker for call in rig.calls) > 2:
            assert rig.die(worker, outcome=Outcome.MEMORY_LIMIT).failed == []
        else:
            num_done += len(rig.end(worker).done)
    assert num_done == 30


def test_what_was_handed_out_but_not_begun_runs_again_without_blame() -> None:
    rig = Rig(cpus(1), tasks(20))
    rig.ready()
    rig.end(1, seconds=0.01)  # short: two and more are kept in the worker
    held = list(rig.holds[1])
    assert len(held) > 1
    out = rig.die(1)
    assert [record.task_id for record, _ in out.tried] == [held[0].task_id]
    assert [t.task_id for t in out.retokened] == [t.task_id for t in reversed(held[1:])]
    assert all(t.tries == 0 and t.token == 2 for t in out.retokened)


def test_device_memory_exhausted_while_sharing_runs_alone_on_its_device() -> None:
    rig = Rig(gpus(1, per_gpu=3), tasks(4))
    rig.ready()
    oom = rig.worker_on(1)
    task = rig.holds[oom][0]
    out = rig.end(oom, Outcome.DEVICE_OOM)
    assert out.failed == []
    assert [again.solo for _, again in out.tried] == [True]
    siblings = [w for w in rig.holds if rig.holds[w]]
    assert len(siblings) == 2  # the fourth task was not handed out to the idle worker
    stopped = set(out.stops)
    for sibling in siblings:
        stopped |= set(rig.end(sibling).stops)
    assert len(stopped) == 2
    sent_before = len(rig.calls)
    for worker_id in sorted(stopped):
        assert len(rig.calls) == sent_before, "sent before the device was its own"
        rig.step(WorkerDied(worker_id, 0, None, "ended"))
    [alone] = rig.scheduler.roster.workers
    assert [t.task_id for t in rig.holds[alone]] == [task.task_id]
    out = rig.end(alone, Outcome.DEVICE_OOM)
    assert [r.task_id for r in out.failed] == [task.task_id], "alone and still too large: its fault"
    rig.ready()
    assert 4 in [t.task_id for held in rig.holds.values() for t in held]


def test_device_memory_exhausted_alone_fails_at_once() -> None:
    rig = Rig(gpus(1), tasks(1))
    rig.ready()
    assert len(rig.end(1, Outcome.DEVICE_OOM).failed) == 1


def test_a_solo_task_has_its_own_time_limit() -> None:
    rig = Rig(gpus(1, per_gpu=2), tasks(2), Policy(timeout_s=10.0))
    rig.ready()
    rig.end(1, Outcome.DEVICE_OOM)
    rig.now = 9.0
    out = rig.end(2)
    [gone] = out.stops
    out = rig.step(WorkerDied(gone, 0, None, "ended"), at=9.5)
    assert len(out.sends) == 1
    assert rig.step(at=12.0).kills == []
    assert len(rig.step(at=19.6).kills) == 1


def test_a_call_on_a_cpu_has_its_own_limit() -> None:
    for slots, expected in ((cpus(1), 4), (gpus(1), 20)):
        rig = Rig(slots, tasks(20, target=3))
        rig.ready()
        assert [len(sent) for _, sent, _ in rig.calls] == [expected]


def test_a_solo_task_of_a_batched_target_is_still_a_joint_call() -> None:
    rig = Rig(gpus(1, per_gpu=2), tasks(2, target=2))
    rig.ready()
    rig.end(1, Outcome.DEVICE_OOM)
    out = rig.end(2)
    rig.step(WorkerDied(out.stops[0], 0, None, "ended"))
    assert rig.calls[-1][2] is True
    assert [t.solo for t in rig.calls[-1][1]] == [True]


def test_a_solo_task_survives_the_quarantine_of_the_device_reserved_for_it() -> None:
    rig = Rig(gpus(2, per_gpu=2), tasks(40), Policy(keep_going=True))
    rig.ready()
    first = rig.worker_on(0)
    task = rig.holds[first][0]
    rig.end(first, Outcome.DEVICE_OOM)
    for number in range(3):  # whatever else is on the reserved device fails
        other = rig.worker_on(1)
        if rig.holds[other]:
            rig.end(other, Outcome.EXCEPTION, message=f"cuda {'abc'[number]}")
    for slot in list(rig.scheduler.roster.slots):
        if slot.spec.devices == ("G0",) and not slot.quarantined:
            rig.scheduler._quarantine.put([slot], "gone", Decisions())
    for _ in range(200):
        if task.task_id in [t.task_id for held in rig.holds.values() for t in held]:
            return
        rig.ready()
        busy = [w for w, held in rig.holds.items() if held]
        stopping = [w.worker_id for w in rig.scheduler.roster.workers.values() if w.stopping]
        if busy:
            rig.end(busy[0])
        elif stopping:
            rig.step(WorkerDied(stopping[0], 0, None, "ended"))
    raise AssertionError("the solo task never ran")


def test_a_timeout_kills_and_is_final() -> None:
    rig = Rig(cpus(1), tasks(2), Policy(timeout_s=10.0))
    rig.ready()
    assert rig.scheduler.next_deadline() == rig.now + 10.0
    assert rig.step(at=9.9).kills == []
    out = rig.wait()
    assert [worker for worker, _ in out.kills] == [1]
    assert rig.step().kills == [], "killed once"
    out = rig.die(1)
    [record] = out.failed
    assert record.finished.outcome is Outcome.TIMEOUT
    assert "timeout" in record.finished.message
    rig.ready()
    assert [t.task_id for t in rig.holds[2]] == [2]


def test_a_result_that_overtakes_the_kill_counts_and_the_next_task_is_not_blamed() -> None:
    rig = Rig(cpus(1), tasks(10), Policy(timeout_s=10.0))
    rig.ready()
    rig.end(1, seconds=0.01)
    assert len(rig.holds[1]) > 1
    assert rig.wait().kills
    out = rig.end(1)
    assert [r.task_id for r in out.done] == [2]
    out = rig.die(1)
    assert out.failed == []
    assert out.tried == []
    assert 3 in [t.task_id for t in out.retokened]


def test_a_lost_joint_call_is_halved_until_the_culprit_is_alone() -> None:
    work = tasks(8, target=2)
    rig = Rig(cpus(1), work, Policy(retry=RetryPolicy(retries=0)))
    culprit = 5
    done: list[int] = []
    failed: list[int] = []
    sizes = []
    for _ in range(100):
        rig.ready()
        busy = [w for w, held in rig.holds.items() if held]
        if not busy:
            break
        worker_id = busy[0]
        call = rig.holds[worker_id]
        sizes.append(len(call))
        if culprit in [t.task_id for t in call]:
            out = rig.die(worker_id)
        else:
            rig.holds[worker_id] = []
            out = rig.step(Results(worker_id, [finished(t) for t in call]))
        done += [r.task_id for r in out.done]
        failed += [r.task_id for r in out.failed]
    assert failed == [culprit]
    assert sorted(done) == [t.task_id for t in work if t.task_id != culprit]
    assert sizes[0] == 8
    assert rig.scheduler.is_finished


def test_a_joint_call_that_poisons_its_worker_blames_the_culprit_only() -> None:
    rig = Rig(cpus(1), tasks(4, target=2))
    rig.ready()
    call = rig.holds.pop(1)
    assert len(call) == 4
    all_bad = [finished(t, Outcome.EXCEPTION, poisoned=True) for t in call]
    out = rig.step(Results(1, all_bad))
    assert out.failed == []
    assert {again.batch_limit for _, again in out.tried} == {2}
    assert out.stops == [1]


def test_after_a_poisoned_result_the_rest_in_the_worker_is_not_blamed() -> None:
    rig = Rig(cpus(1), tasks(20))
    rig.ready()
    rig.end(1, seconds=0.01)
    held = list(rig.holds[1])
    assert len(held) > 1
    out = rig.end(1, Outcome.EXCEPTION, poisoned=True)
    assert out.stops == [1]
    assert [r.task_id for r in out.failed] == [held[0].task_id]
    out = rig.step(WorkerDied(1, 0, None, "ended"))
    assert out.failed == []
    assert out.tried == []
    assert sorted(t.task_id for t in out.retokened) == [t.task_id for t in held[1:]]


# ------------------------------------------------------------------ devices and the breaker


def test_a_device_that_fails_everything_is_quarantined_and_its_tasks_run_elsewhere() -> None:
    rig = Rig(gpus(2), tasks(20))
    rig.ready()
    good, bad = rig.worker_on(1), rig.worker_on(0)
    rig.end(good)
    victims, outs = [], []
    for _ in range(3):
        victims.append(rig.holds[bad][0].task_id)
        outs.append(rig.end(bad, Outcome.EXCEPTION, message="cuda broken"))
    last = outs[-1]
    assert len(kinds(last, "quarantined")) == 1
    assert "cuda broken" in kinds(last, "quarantined")[0]
    assert [t.task_id for t in last.reopened] == victims[:2]
    assert [again.task_id for _, again in last.tried] == victims[2:]
    assert last.stops == [bad]
    rig.step(WorkerDied(bad, 0, None, "ended"))
    done = []
    while rig.holds[good]:
        done += [r.task_id for r in rig.end(good).done]
    assert set(victims) <= set(done)
    assert rig.scheduler.is_finished
    assert 0 not in [rig.slot_of[w] for w in rig.scheduler.roster.workers]


def test_a_device_that_crashes_everything_is_quarantined_although_each_crash_is_retried() -> None:
    rig = Rig(gpus(2), tasks(20))
    rig.ready()
    rig.end(rig.worker_on(1))
    notes: list[str] = []
    for _ in range(3):
        out = rig.die(rig.worker_on(0))
        assert out.failed == []
        notes += kinds(out, "quarantined")
        rig.ready()
    assert len(notes) == 1


def test_a_device_lost_in_mid_run_is_quarantined_too() -> None:
    rig = Rig(gpus(2), tasks(40))
    rig.ready()
    rig.end(rig.worker_on(0))
    rig.end(rig.worker_on(1))
    notes: list[str] = []
    for _ in range(3):
        out = rig.die(rig.worker_on(0))
        notes += kinds(out, "quarantined")
        rig.ready()
    assert len(notes) == 1


def test_failures_after_the_quarantine_reopen_no_task_twice() -> None:
    rig = Rig(gpus(2, per_gpu=4), tasks(60))
    rig.ready()
    rig.end(rig.worker_on(4))
    bad = [rig.worker_on(slot) for slot in range(4)]
    reopened: list[int] = []
    tried: list[int] = []
    for worker_id in bad:
        out = rig.end(worker_id, Outcome.EXCEPTION)
        reopened += [t.task_id for t in out.reopened]
        tried += [again.task_id for _, again in out.tried]
    assert len(set(reopened + tried)) == len(reopened + tried) == 4
    open_ids = [t.task_id for t in rig.scheduler.open_tasks()]
    assert len(open_ids) == len(set(open_ids))


def test_a_healthy_device_is_not_blamed_for_failures_that_others_see_as_well() -> None:
    rig = Rig(gpus(2), tasks(30), Policy(keep_going=True))
    rig.ready()
    for _ in range(6):
        for slot in (0, 1):
            out = rig.end(rig.worker_on(slot), Outcome.EXCEPTION, message="bad setting")
            assert kinds(out, "quarantined") == []


def test_one_gpu_alone_is_never_blamed() -> None:
    rig = Rig(gpus(1), tasks(30), Policy(keep_going=True))
    rig.ready()
    for _ in range(20):
        out = rig.end(1, Outcome.EXCEPTION)
        assert kinds(out, "quarantined") == []
        assert len(out.failed) == 1


def test_memory_that_never_comes_back_quarantines_the_slot_and_still_blames_the_task() -> None:
    rig = Rig(gpus(2), tasks(6), Policy(timeout_s=10.0))
    rig.ready()
    rig.wait()
    out = rig.step(WorkerDied(1, None, 9, "killed", stuck="700 MiB are still held"))
    assert [r.finished.outcome for r in out.failed] == [Outcome.TIMEOUT]
    assert "700 MiB" in kinds(out, "quarantined")[0]
    assert all(slot != 0 for slot, _ in out.starts)


def test_the_breaker_pauses_after_k_equal_failures_from_the_start() -> None:
    policy = Policy(same_failure_limit=5)
    rig = Rig(cpus(1), tasks(50), policy)
    rig.ready()
    for number in range(5):
        assert rig.scheduler.paused == ""
        out = rig.end(1, Outcome.EXCEPTION, message=f"bad value 0.{number}")
    assert "5 tasks" in rig.scheduler.paused
    assert "bad value" in kinds(out, "paused")[0]
    assert rig.scheduler.is_finished
    assert out.sends == []
    assert len(rig.scheduler.open_tasks()) == 45


def test_the_breaker_stays_closed_after_one_success_or_another_failure() -> None:
    for spoiler in (Outcome.OK, Outcome.BAD_RESULT):
        rig = Rig(cpus(1), tasks(50))
        rig.ready()
        for _ in range(4):
            rig.end(1, Outcome.EXCEPTION)
        rig.end(1, spoiler)
        for _ in range(4):
            rig.end(1, Outcome.EXCEPTION)
        assert rig.scheduler.paused == "", spoiler


def test_keep_going_overrides_the_breaker() -> None:
    rig = Rig(cpus(1), tasks(30), Policy(keep_going=True))
    rig.ready()
    for _ in range(30):
        rig.end(1, Outcome.EXCEPTION)
    assert rig.scheduler.paused == ""
    assert rig.scheduler.is_finished


def test_a_slot_whose_worker_never_starts_is_quarantined_with_pauses_between() -> None:
    rig = Rig(cpus(2), tasks(2))
    rig.step(WorkerReady(2, 102))
    notes: list[str] = []
    starts = 1
    while not notes:
        current = [w for w, slot in rig.slot_of.items() if slot == 0]
        alive = [w for w in current if w in rig.scheduler.roster.workers]
        out = rig.step(WorkerDied(alive[0], 1, None, "exit code 1")) if alive else rig.wait()
        notes += kinds(out, "quarantined")
        starts += len(out.starts)
    assert starts == 3
    assert len(notes) == 1
    assert "exit code 1" in notes[0]
    rig.end(2)
    rig.end(2)
    assert rig.scheduler.is_finished


def test_a_start_that_failed_is_told_with_the_last_it_printed() -> None:
    rig = Rig(cpus(1), tasks(1), Policy(start_failure_limit=1))
    trace = "one\ntwo\n\nmodule: command not found\nhello\n"
    out = rig.step(WorkerDied(1, None, None, "its job 29_0 failed", trace))
    assert kinds(out, "quarantined") == [
        "cpu0: its worker did not start 1 times: its job 29_0 failed "
        "(it printed: two; module: command not found; hello)"
    ]


def test_with_no_usable_slot_the_run_ends_and_gives_its_tasks_back() -> None:
    rig = Rig(cpus(1), tasks(3), Policy(start_failure_limit=1))
    rig.step(WorkerDied(1, 1, None, "exit code 1"))
    assert rig.scheduler.is_finished
    assert len(rig.scheduler.open_tasks()) == 3


def test_a_start_that_waits_for_nothing_makes_nobody_spin() -> None:
    """A slot past its pause that is not needed must not be due for ever."""
    rig = Rig(cpus(2), tasks(2))
    rig.step(WorkerReady(2, 102))
    rig.step(WorkerDied(1, 1, None, "exit code 1"))
    rig.end(2)  # the last task goes to the living worker
    rig.step(at=60.0)
    due = rig.scheduler.next_deadline()
    assert due is None or due > 60.0


# ------------------------------------------------------------------ pace and capacity


def test_long_tasks_are_handed_out_one_by_one_and_short_ones_ahead() -> None:
    for seconds, least, most in ((5.0, 1, 1), (0.5, 2, 2), (0.01, 3, 8), (0.0001, 100, 512)):
        rig = Rig(cpus(1), tasks(2000))
        rig.ready()
        assert len(rig.holds[1]) == 1, "unknown length: one"
        rig.end(1, seconds=seconds)
        assert least <= len(rig.holds[1]) <= most, seconds


def test_three_tasks_never_start_eight_workers() -> None:
    rig = Rig(cpus(8), tasks(3))
    assert len(rig.slot_of) == 3
    rig.ready()
    rig.step()
    assert len(rig.slot_of) == 3
    many = Rig(cpus(8), tasks(100))
    assert len(many.slot_of) == 8


def test_first_shares_of_all_devices_come_before_second_shares() -> None:
    rig = Rig(gpus(4, per_gpu=2), tasks(4))
    assert sorted(rig.slot_of.values()) == [0, 2, 4, 6]


def test_capacity_bounds_the_workers_of_a_device_up_and_down() -> None:
    rig = Rig(gpus(1, per_gpu=4), tasks(40), before=[Capacity("G0", 1)])
    rig.ready()
    assert len(rig.scheduler.roster.workers) == 1
    rig.step(Capacity("G0", 3))
    rig.ready()
    assert len(rig.scheduler.roster.workers) == 3
    out = rig.step(Capacity("G0", 1))
    assert len(out.stops) == 2
    for worker_id in out.stops:
        sent = len(rig.calls)
        rig.end(worker_id)
        assert all(call[0] != worker_id for call in rig.calls[sent:])
        rig.step(WorkerDied(worker_id, 0, None, "ended"))
    assert len(rig.scheduler.roster.workers) == 1
    [left] = rig.scheduler.roster.workers
    while rig.holds[left]:
        rig.end(left)
    assert rig.scheduler.is_finished


def test_capacity_does_not_depend_on_the_first_share() -> None:
    """The first slot of the device is out of order: the second one takes its place."""
    policy = Policy(start_failure_limit=1)
    rig = Rig(gpus(1, per_gpu=2), tasks(2), policy, before=[Capacity("G0", 1)])
    out = rig.step(WorkerDied(1, 1, None, "exit code 1"))
    assert [slot for slot, _ in out.starts] == [1]
    rig.ready()
    assert rig.holds[2]


def test_unbegun_tasks_are_taken_back_when_somebody_is_idle() -> None:
    rig = Rig(cpus(2), tasks(2))
    rig.ready()
    rig.scheduler.backlog.exhausted = False
    rig.end(1, seconds=0.01)
    rig.step(Fetched(tasks(3, first=10), exhausted=True))
    loaded = next(w for w, held in rig.holds.items() if len(held) > 1)
    idle = 3 - loaded
    while rig.holds[idle]:
        rig.end(idle, seconds=0.01)
    out = rig.step(at=rig.now + 1.0)
    assert out.revokes == [loaded]
    assert rig.step(at=rig.now + 1.0).revokes == [], "asked once"
    unbegun = [t.task_id for t in rig.holds[loaded][1:]]
    out = rig.step(Returned(loaded, unbegun))
    assert [t.task_id for send in out.sends for t in send.tasks] == unbegun
    assert all(send.worker_id == idle for send in out.sends)


def test_a_joint_call_takes_no_more_than_an_even_share() -> None:
    rig = Rig(cpus(4), tasks(40, target=2))
    rig.ready()
    sizes = [len(sent) for _, sent, _ in rig.calls]
    assert len(sizes) == 4
    assert max(sizes) == 10


def test_joint_calls_hold_tasks_of_one_shape_only() -> None:
    work = [t._replace(group=t.task_id % 2) for t in tasks(20, target=2)]
    rig = Rig(cpus(2), work)
    rig.ready()
    for _, sent, _ in rig.calls:
        assert len({t.group for t in sent}) == 1


def test_a_joint_call_may_take_the_time_limit_of_all_its_tasks() -> None:
    rig = Rig(cpus(1), tasks(4, target=2), Policy(timeout_s=10.0))
    rig.ready()
    assert len(rig.holds[1]) == 4
    assert rig.step(at=39.0).kills == []
    assert rig.step(at=41.0).kills


# ------------------------------------------------------------------ endings


def test_drain_lets_running_tasks_finish_and_hands_out_nothing() -> None:
    rig = Rig(cpus(2), tasks(50))
    rig.ready()
    rig.end(1, seconds=0.01)
    assert len(rig.holds[1]) > 1
    loaded = [w for w, held in rig.holds.items() if len(held) > 1]
    assert rig.step(Drain()).revokes == loaded
    assert not rig.scheduler.is_finished
    for worker_id in loaded:
        back = rig.holds[worker_id][1:]
        del rig.holds[worker_id][1:]
        assert rig.step(Returned(worker_id, [t.task_id for t in back])).sends == []
    rig.end(1)
    out = rig.end(2)
    assert rig.scheduler.is_finished
    assert sorted(out.stops) == [1, 2]
    assert len(rig.scheduler.open_tasks()) == 47


def test_late_results_are_kept_aside_and_never_recorded() -> None:
    rig = Rig(cpus(1), tasks(2))
    rig.ready()
    task = rig.holds[1][0]
    old = finished(task._replace(token=0))
    unknown = finished(task._replace(task_id=99))
    out = rig.step(Results(1, [old, unknown]), Results(77, [finished(task)]))
    assert [f for _, f in out.late] == [old, unknown, finished(task)]
    assert out.done == []
    assert [r.task_id for r in rig.end(1).done] == [1]
    out = rig.step(Results(1, [finished(task)]))
    assert len(out.late) == 1, "a result twice"


def test_finished_runs_let_their_workers_go() -> None:
    rig = Rig(cpus(2), tasks(2))
    rig.ready()
    rig.end(1)
    out = rig.end(2)
    assert rig.scheduler.is_finished
    assert sorted(out.stops) == [1, 2]


def test_the_schedule_is_a_function_of_its_input() -> None:
    def play() -> list[object]:
        rig = Rig(gpus(2, per_gpu=2), tasks(30))
        seen: list[object] = []
        for number in range(60):
            rig.ready()
            busy = [w for w, held in rig.holds.items() if held]
            if not busy:
                break
            worker_id = busy[number % len(busy)]
            out = rig.die(worker_id) if number % 7 == 3 else rig.end(worker_id)
            seen.append(dataclasses.astuple(out))
        return seen

    assert play() == play()


def test_what_was_given_back_can_be_hurried_later_and_is_told_once() -> None:
    slots = gpus(2)
    rig = Rig(slots, tasks(4))
    rig.ready()
    assert rig.step(Slots([slots[0]], at_once=False)).halts == []
    [(worker_id, _, pauses)] = rig.step(Slots([slots[0]], at_once=True)).halts
    assert (worker_id, pauses) == (rig.worker_on(1), True)
    assert rig.step(Slots([slots[0]], at_once=True)).halts == []


def test_stuck_memory_is_seen_and_other_quarantine_ends_when_a_device_is_taken_again() -> None:
    slots = gpus(3)
    rig = Rig(slots, tasks(6))
    rig.ready()
    rig.scheduler.roster.quarantine(rig.scheduler.roster.slots[2], "it failed tasks")
    rig.step(Slots([slots[0]], at_once=False))
    rig.step(WorkerDied(rig.worker_on(1), None, 9, "killed", stuck="700 MiB are still held"))
    rig.step(WorkerDied(rig.worker_on(2), 0, None, ""))
    lines = Picture("r", 6, 0.0).view(rig.scheduler, 1.0, "running").workers
    assert [line.state for line in lines[1:]] == [QUARANTINED, GIVEN_BACK]
    rig.step(Slots(slots, at_once=False))
    assert [slot.spec.label for slot in rig.scheduler.roster.usable()] == ["gpu0.0", "gpu2.0"]
