"""The scheduler while devices come and go and tasks are cancelled: the random worlds of
test_decide_random, with both."""

from __future__ import annotations

from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.farm.test_decide_random import Simulation, World

from muster.farm.decisions import Decisions
from muster.farm.events import Event, Results, Slots, StopTask
from muster.farm.task import Finished, Outcome, SlotSpec, Task


class Lent(Simulation):
    """Slots are given back, some at once, and taken again; further devices are taken."""

    def __init__(self, world: World, num_changes: int, num_cancelled: int) -> None:
        super().__init__(world)
        self.num_changes, self.num_cancelled = num_changes, num_cancelled
        self.wanted = {slot.device_key for slot in self.slots}
        self.cancelled: set[int] = set()

    def run(self) -> None:
        for _ in range(self.num_changes):
            self.later(self.random.uniform(0, 40), self.change)
        for _ in range(self.num_cancelled):
            self.later(self.random.uniform(0, 40), self.cancel)
        super().run()

    def change(self) -> Event:
        number = len({slot.device_key for slot in self.slots})
        if self.random.random() < 0.3:
            devices = (f"D{number}",) if self.slots[0].devices else ()
            slot = SlotSpec(slot_id=len(self.slots), label=f"d{number}.0", devices=devices)
            self.slots.append(slot)
        keys = sorted({slot.device_key for slot in self.slots})
        self.wanted = set(self.random.sample(keys, self.random.randint(1, len(keys))))
        wanted = [slot for slot in self.slots if slot.device_key in self.wanted]
        return Slots(wanted, at_once=self.random.random() < 0.5)

    def cancel(self) -> Event:
        number = self.random.randint(1, self.world.num_tasks)
        if number in self.ready:  # as the coordinator does it in the ledger
            self.ready.remove(number)
            self.state[number] = "cancelled"
        return StopTask(number, cancels=True)

    def record(self, out: Decisions) -> None:
        super().record(out)
        for task, record in out.cancelled:
            self.close(task.task_id, task.token, "cancelled")
            assert record is None or record.token == task.token

    def obey(self, out: Decisions) -> None:
        for slot_id, _ in out.starts:
            slot = next(s for s in self.slots if s.slot_id == slot_id)
            assert slot.device_key in self.wanted, "a worker on what is given back"
        super().obey(out)
        for worker_id, task_id, _ in out.halts:
            worker = self.workers[worker_id]
            is_head = bool(worker.calls) and worker.calls[0][0].task_id == task_id
            if is_head and self.random.random() < 0.7:
                delay, plan = self.random.uniform(0, 0.4), worker.running
                self.later(delay, lambda w=worker_id, p=plan: self.stopped(w, p))

    def check_send(self, worker_id: int, sent: list[Task], together: bool) -> None:
        assert self.workers[worker_id].slot.device_key in self.wanted
        assert not any(self.state[task.task_id] == "cancelled" for task in sent)
        super().check_send(worker_id, sent, together)

    def stopped(self, worker_id: int, plan: int) -> Event | None:
        """The running task has saved, or has heard that it is cancelled."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead or worker.running != plan:
            return None
        [task] = worker.calls.pop(0)
        worker.running += 1
        if worker.calls:
            self.begin(worker_id)
        elif worker.stopping:
            self.later(0.1, lambda: self.leave(worker_id))
        ended = Finished(task.task_id, task.token, Outcome.STOPPED, 0.0, 0.1, 0, 0, None)
        return Results(worker_id, [ended])

    def check_end(self) -> None:
        is_over = self.world.drain_at is None and bool(self.scheduler.roster.usable())
        for number in [n for n, state in self.state.items() if state == "cancelled"]:
            del self.state[number], self.fates[number]
        assert self.scheduler.halts.cancelling == [] or not is_over
        super().check_end()


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    num_tasks=st.integers(1, 50),
    num_devices=st.integers(1, 4),
    per_gpu=st.integers(1, 3),
    is_gpu=st.booleans(),
    share_bad=st.sampled_from([0.0, 0.2]),
    kill_rate=st.sampled_from([0.0, 0.0, 0.1]),
    short=st.booleans(),
    batched=st.booleans(),
    bad_device=st.just(""),
    drain_at=st.sampled_from([None, None, None, 10.0]),
    capacity=st.booleans(),
    num_liars=st.just(0),
)


@examples(60, suppress_health_check=list(HealthCheck))
@given(WORLDS, st.integers(0, 6), st.integers(0, 6))
def test_no_task_is_lost_and_none_begins_on_what_is_given_back(
    world: World, num_changes: int, num_cancelled: int
) -> None:
    Lent(world, num_changes, num_cancelled).run()
