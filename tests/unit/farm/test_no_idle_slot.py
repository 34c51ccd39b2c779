"""No slot idles while there is a task that may run there, also after crashes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given
from tests.examples import examples
from tests.unit.farm.test_decide import TARGETS, Rig, gpus, tasks
from tests.unit.farm.test_decide_random import WORLDS, Simulation, World

from muster.farm.decide import Scheduler
from muster.farm.decisions import Policy, RetryPolicy
from muster.farm.events import Event, Fetched, Slots
from muster.farm.task import Task


def test_of_a_search_the_slot_that_a_retry_avoids_takes_another_trial() -> None:
    rig = Rig(gpus(2), [])
    policy = Policy(asks_ahead=False, max_lead=1, retry=RetryPolicy(retries=9))
    rig.scheduler = Scheduler(policy, gpus(2), TARGETS, expected=9)
    assert rig.step().fetch == 2
    rig.step(Fetched(tasks(2), exhausted=False))
    rig.ready()
    assert rig.step().fetch == 0
    crashed = rig.holds[rig.worker_on(0)][0]
    assert rig.die(rig.worker_on(0)).fetch == 1  # at once, and not after the pause
    rig.step(Fetched(tasks(1, first=3), exhausted=False))
    rig.ready()
    assert [task.task_id for task in rig.holds[rig.worker_on(0)]] == [3]
    assert rig.wait().fetch == 0
    rig.end(rig.worker_on(1))
    assert [task.task_id for task in rig.holds[rig.worker_on(1)]] == [crashed.task_id]


def test_of_a_search_the_other_slot_waits_for_the_retry() -> None:
    """It is given out when its pause is over, and no further trial takes its place before."""
    rig = Rig(gpus(2), [])
    policy = Policy(asks_ahead=False, max_lead=1, retry=RetryPolicy(retries=9, backoff_s=5.0))
    rig.scheduler = Scheduler(policy, gpus(2), TARGETS, expected=9)
    rig.step()
    rig.step(Fetched(tasks(2), exhausted=False))
    rig.ready()
    rig.die(rig.worker_on(0))
    rig.step(Fetched(tasks(1, first=3), exhausted=False))
    rig.ready()
    assert rig.end(rig.worker_on(1)).fetch == 0
    rig.wait()
    assert [task.task_id for task in rig.holds[rig.worker_on(1)]] == [1]


def test_of_a_search_a_single_worker_begins_nothing_before_the_retry() -> None:
    rig = Rig(gpus(1), [])
    policy = Policy(asks_ahead=False, max_lead=1, retry=RetryPolicy(retries=9))
    rig.scheduler = Scheduler(policy, gpus(1), TARGETS, expected=9)
    rig.step()
    rig.step(Fetched(tasks(1), exhausted=False))
    rig.ready()
    assert rig.die(rig.worker_on(0)).fetch == 0
    assert rig.wait().fetch == 0
    rig.ready()
    assert [task.task_id for task in rig.holds[rig.worker_on(0)]] == [1]


def test_of_a_search_a_slot_that_is_given_back_takes_no_other_ones_trial() -> None:
    rig = Rig(gpus(2), [])
    rig.scheduler = Scheduler(Policy(asks_ahead=False, max_lead=1), gpus(2), TARGETS, expected=9)
    rig.step()
    rig.step(Fetched(tasks(2), exhausted=False))
    rig.ready()
    rig.step(Slots(gpus(2)[1:]))  # the worker on the other one ends its task first
    assert rig.end(rig.worker_on(1)).fetch == 1


class Watched(Simulation):
    """After each turn it is looked at what idles."""

    def __init__(self, world: World, *, asks_ahead: bool) -> None:
        super().__init__(world)
        policy = self.scheduler.policy
        lead = policy.max_lead if asks_ahead else 1
        policy = dataclasses.replace(policy, asks_ahead=asks_ahead, max_lead=lead)
        self.scheduler = Scheduler(policy, self.slots, self.scheduler.targets, expected=9999)

    def step(self, events: list[Event]) -> None:
        super().step(events)
        scheduler, roster, backlog = self.scheduler, self.scheduler.roster, self.scheduler.backlog
        if scheduler.draining or scheduler.paused:
            return
        left = len(self.ready) + len(backlog.queue)
        free = [worker for worker in roster.workers.values() if worker.is_free]
        slots = {
            "idle": [worker.slot for worker in free if worker.ready],
            "starting": [worker.slot for worker in free if not worker.ready],
            "vacant": list(roster.startable(self.now)),
        }
        usable = {slot.spec.slot_id for slot in roster.usable()}
        idle, starting, vacant = (
            [
                slot.spec.device_key
                for slot in some
                if slot.spec.slot_id in usable and slot.spec.device_key not in backlog.reserved
            ]
            for some in slots.values()
        )
        kept: list[Task] = []
        if not scheduler.policy.asks_ahead:  # a task in hand keeps the slot that it will get
            out = {task.task_id for task in (*backlog.queue, *backlog.reserved.values())}
            kept = [task for task in backlog.tasks() if task.task_id not in out]
        devices = {slot.spec.device_key for slot in roster.usable()}
        why = (idle, starting, vacant, kept, self.open_report())
        assert not left or len(idle) <= num_taken(idle, kept, devices), why
        places = [*idle, *starting, *vacant]
        num_places = len(places) - num_taken(places, kept, devices)
        assert len(idle) + len(starting) >= min(left, num_places), why


def num_taken(idle: Sequence[str], kept: Sequence[Task], devices: set[str]) -> int:
    """How many of the idle slots the tasks could take at most, by trying all ways."""
    taken: dict[int, Task] = {}

    def place(task: Task, tried: set[int]) -> bool:
        for number, key in enumerate(idle):
            if number in tried or (key == task.avoid and devices - {key}):
                continue
            tried.add(number)
            if number not in taken or place(taken[number], tried):
                taken[number] = task
                return True
        return False

    return sum(place(task, set()) for task in kept)


@pytest.mark.thorough
@pytest.mark.parametrize("asks_ahead", [False, True])
@examples(150, suppress_health_check=list(HealthCheck))
@given(world=WORLDS.filter(lambda world: world.num_devices > 1))
def test_no_slot_idles_while_a_task_may_run_there(world: World, asks_ahead: bool) -> None:
    Watched(world, asks_ahead=asks_ahead).run()
