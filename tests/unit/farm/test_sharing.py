"""A running divisible task gives part of itself to workers that have nothing to do."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
from tests.unit.farm.alone import Alone

from muster.base.clock import SystemClock
from muster.base.journal import Journal
from muster.farm.canonical import payload_and_key
from muster.farm.coordinator import Coordinator
from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions, Policy, RetryPolicy
from muster.farm.dispatch import SHARE_AFTER_S
from muster.farm.events import (
    Divided,
    Event,
    Fetched,
    Progress,
    Results,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Plan
from muster.farm.task import Finished, NewTask, Outcome, SlotSpec, TargetSpec, Task, TaskState
from muster.run.folder import RunFolder

LONG = TargetSpec(name="long", location="long.py", attribute="count", is_divisible=True)


def slots(count: int) -> list[SlotSpec]:
    return [SlotSpec(slot_id=i, label=f"cpu{i}", devices=()) for i in range(count)]


def task(number: int) -> Task:
    return Task(number, number.to_bytes(8, "big"), 1, b'{"a":0,"b":100}', 0, 1)


class Two:
    """Two workers that are ready; worker 1 holds a long task, worker 2 nothing."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.scheduler = Scheduler(policy or Policy(), slots(2), {1: LONG}, expected=2)
        self.step(0.0)
        self.step(0.1, Fetched([task(1), task(2)], exhausted=True))
        out = self.step(0.2, WorkerReady(1, 11), WorkerReady(2, 12))
        assert [send.worker_id for send in out.sends] == [1, 2]
        done = Finished(2, 1, Outcome.OK, 0.0, 0.1, 0, 0, None)
        self.step(0.3, Results(2, [done]))

    def step(self, now: float, *events: Event) -> Decisions:
        return self.scheduler.step(list(events), now)


def test_the_idle_ask_the_busy_once_and_not_at_once() -> None:
    two = Two()
    assert two.step(0.35).shares == []  # it may be over any moment
    assert two.step(1.0).shares == [(1, 1, 1)]
    assert two.step(1.1).shares == []  # asked already


def test_what_is_given_away_becomes_tasks_and_the_rest_goes_on() -> None:
    two = Two()
    two.step(1.0)
    out = two.step(1.1, Divided(1, 1, 1, {"a": 0, "b": 60}, [{"a": 60, "b": 100}]))
    [division] = out.divided
    make = payload_and_key("long")
    assert division.task.payload == make({"a": 0, "b": 60})[0]
    assert list(division.given) == [make({"a": 60, "b": 100})]
    assert out.fetch > 0  # the new task is in the ledger by then
    given = Task(3, b"k3", 1, division.given[0][0], 0, 1)
    assert two.step(1.2, Fetched([given], exhausted=True)).sends[0].worker_id == 2


def test_after_a_division_a_lost_worker_repeats_only_what_it_had_kept() -> None:
    two = Two(Policy(retry=RetryPolicy(retries=3, backoff_s=0.0)))
    two.step(1.0)
    two.step(1.1, Divided(1, 1, 1, {"a": 0, "b": 60}, [{"a": 60, "b": 100}]))
    two.step(1.2, Fetched([], exhausted=True))
    outs = [two.step(1.3, WorkerDied(1, None, 9, "killed")), two.step(2.0)]
    sent = [t for out in outs for send in out.sends for t in send.tasks]
    assert [orjson.loads(t.payload) for t in sent] == [{"a": 0, "b": 60}]


def test_one_that_has_too_little_is_not_asked_again() -> None:
    two = Two()
    two.step(1.0)
    two.step(1.1, Divided(1, 1, 1, {}, []))
    assert two.step(5.0).shares == []


def test_a_division_by_an_attempt_that_is_over_changes_nothing() -> None:
    two = Two()
    out = two.step(1.0, Divided(1, 1, 7, {"a": 0, "b": 1}, [{"a": 1, "b": 100}]))
    assert out.divided == []


def test_the_one_with_the_most_left_is_asked() -> None:
    scheduler = Scheduler(Policy(), slots(3), {1: LONG}, expected=3)
    scheduler.step([], 0.0)
    scheduler.step([Fetched([task(1), task(2), task(3)], exhausted=True)], 0.1)
    scheduler.step([WorkerReady(n, n) for n in (1, 2, 3)], 0.2)
    scheduler.step([Progress(1, 1, "", {"left": 10}), Progress(2, 2, "", {"left": 500})], 0.3)
    done = Finished(3, 1, Outcome.OK, 0.0, 0.1, 0, 0, None)
    out = scheduler.step([Results(3, [done])], 0.2 + 2 * SHARE_AFTER_S)
    assert out.shares == [(2, 2, 1)]


def test_a_sign_of_life_puts_off_the_time_limit_of_a_divisible_task() -> None:
    two = Two(Policy(timeout_s=10.0))
    two.step(9.0, Progress(1, 1, "still here"))
    assert two.step(18.9).kills == []
    assert [worker for worker, _ in two.step(19.1).kills] == [1]


COUNTING = '''
import time


def count(ctx, a: int, b: int) -> dict:
    """Numbers from a to b, slowly; gives half away when somebody waits."""
    numbers, at = [], a
    while at < b:
        numbers.append(at)
        at += 1
        time.sleep(0.01)
        ctx.measure(f"at {at}", {"left": b - at})
        if ctx.num_waiting:
            middle = (at + b + 1) // 2
            if b - middle < 5:
                ctx.divide({}, [])
                continue
            ctx.divide({"a": a, "b": middle}, [{"a": middle, "b": b}])
            b = middle
    return {"numbers": numbers}
'''


def test_with_real_workers_every_number_is_counted_once_and_both_work(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(COUNTING)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    ledger = Ledger(folder.ledger)
    ledger.begin()
    number = ledger.target_id("long")
    ledger.commit()
    spec = TargetSpec(
        name="long", location="long.py", attribute="count", base_folder=str(tmp_path),
        is_divisible=True,
    )  # fmt: skip
    payload, key = payload_and_key("long")({"a": 0, "b": 300})
    plan = Plan(
        folder=folder,
        targets={number: spec},
        slots=tuple(slots(2)),
        policy=Policy(),
        total=1,
        feed=iter([NewTask(key, number, payload)]),
    )
    clock = SystemClock()
    run_id = f"share-{os.getpid()}"  # a run ends what an earlier one with its id has left
    executor = LocalExecutor(Assignment(folder=folder, run_id=run_id, targets={number: spec}))
    journal = Journal(folder.events, clock)
    ending = Coordinator(plan, ledger, executor, journal, Alone()).run()
    journal.close()
    ledger.close()
    assert {state for state, n in ending.counts.items() if n} == {TaskState.DONE}
    counted: list[int] = []
    workers = set()
    with LedgerReader(folder.ledger) as reader:
        for row in reader.tasks():
            assert row.value is not None
            counted += orjson.loads(row.value)["numbers"]
            workers.add(row.device)
    assert sorted(counted) == list(range(300))
    assert len(workers) == 2
