"""What one event costs where workers are many: no look at all of them for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.farm.test_decide import Rig, cpus, finished, tasks

from muster.farm.decisions import Decisions, Policy
from muster.farm.events import Event, Results, StopTask, WorkerDied
from muster.farm.roster import Slot, Worker
from muster.farm.task import Outcome

NUM = 200


class Workers(dict[int, Worker]):
    """Counts how often all are gone through."""

    num_walks = 0

    def values(self) -> Any:
        self.num_walks += 1
        return super().values()

    def items(self) -> Any:
        self.num_walks += 1
        return super().items()

    def __iter__(self) -> Iterator[int]:
        self.num_walks += 1
        return super().__iter__()


class Slots(list[Slot]):
    num_walks = 0

    def __iter__(self) -> Iterator[Slot]:
        self.num_walks += 1
        return super().__iter__()


def crash(rig: Rig, number: int) -> Event:
    return WorkerDied(rig.worker_on(number), None, 11, "was ended by SIGSEGV (11)")


def loss(rig: Rig, number: int) -> Event:
    return WorkerDied(rig.worker_on(number), None, None, "its job ended", outcome=Outcome.LOST)


def failure(rig: Rig, number: int) -> Event:
    worker = rig.worker_on(number)
    return Results(worker, [finished(rig.holds[worker][0], Outcome.EXCEPTION)])


def device_fault(rig: Rig, number: int) -> Event:
    worker = rig.worker_on(number)
    return Results(worker, [finished(rig.holds[worker][0], Outcome.DEVICE_FAULT)])


def cancel(rig: Rig, number: int) -> Event:
    return StopTask(rig.holds[rig.worker_on(number)][0].task_id, cancels=True)


def cancel_of_one_that_waits(rig: Rig, number: int) -> Event:
    return StopTask(NUM + 1 + number, cancels=True)


@pytest.mark.parametrize(
    "what", [crash, loss, failure, device_fault, cancel, cancel_of_one_that_waits]
)
def test_workers_are_not_gone_through_for_each_event(what: Callable[[Rig, int], Event]) -> None:
    assert walks(what, 1) == walks(what, NUM // 4)


def walks(what: Callable[[Rig, int], Event], count: int) -> int:
    """How often all workers or slots are gone through until so many events are dealt with."""
    rig = Rig(cpus(NUM), tasks(3 * NUM), Policy(keep_going=True))
    rig.ready()
    events = [what(rig, number) for number in range(count)]
    roster = rig.scheduler.roster
    roster.workers, roster.slots = Workers(roster.workers), Slots(roster.slots)
    outs: list[Decisions] = [rig.step(*events)]
    outs.append(rig.step(at=rig.now + 1000.0))  # tasks that wait for their next try are due
    rig.scheduler.next_deadline()
    assert any(out != Decisions() for out in outs), "nothing has come of it"
    return roster.workers.num_walks + roster.slots.num_walks
