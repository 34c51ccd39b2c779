"""The scheduler under random interleavings: nothing lost, nothing twice, no deadlock.

A small simulation stands for the outer edge: workers that are slow to start, crash, run out of
memory, hang, poison their device, answer a revoke late or are killed at any moment; and a ledger
that refuses what a real one would refuse.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions, Policy, RetryPolicy
from muster.farm.events import (
    Capacity,
    Drain,
    Event,
    Fetched,
    Results,
    Returned,
    WorkerDied,
    WorkerReady,
)
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task

TARGETS = {
    1: TargetSpec(name="f", location="f.py", attribute="f"),
    2: TargetSpec(name="g", location="g.py", attribute="g", max_batch=8),
}
FATES = ("ok", "raises", "crashes", "crashes once", "hungry", "poisons", "hangs")
COUNTED = {Outcome.CRASH, Outcome.HOST_OOM}


@dataclass
class World:
    """What a run is thrown at."""

    seed: int
    num_tasks: int
    num_devices: int
    per_gpu: int
    is_gpu: bool
    share_bad: float
    kill_rate: float
    short: bool
    batched: bool
    bad_device: str  # "broken" fails everything; "gone" does so after a while, and says it
    drain_at: float | None
    capacity: bool
    num_liars: int  # tasks that say of every device that it is gone


@dataclass
class Worker:
    slot: SlotSpec
    calls: list[list[Task]] = field(default_factory=list)
    ready: bool = False
    stopping: bool = False
    killed: bool = False
    dead: bool = False
    running: int = 0  # raised with every call begun or ended, to forget old plans

    @property
    def held(self) -> list[Task]:
        return [task for call in self.calls for task in call]


class Simulation:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(world.seed)
        per = world.per_gpu if world.is_gpu else 1
        self.slots = [
            SlotSpec(
                slot_id=d * per + k,
                label=f"d{d}.{k}",
                devices=(f"D{d}",) if world.is_gpu else (),
            )
            for d in range(world.num_devices)
            for k in range(per)
        ]
        self.retries = self.random.choice([0, 1, 2])
        self.scheduler = Scheduler(
            Policy(
                retry=RetryPolicy(retries=self.retries, exception_retries=0),
                timeout_s=30.0,
                keep_going=True,
            ),
            self.slots,
            TARGETS,
            expected=world.num_tasks,
        )
        self.now = 0.0
        self.count = itertools.count()
        self.heap: list[tuple[float, int, Callable[[], Event | None]]] = []
        self.workers: dict[int, Worker] = {}
        self.fates: dict[int, str] = {}
        self.crashed: set[int] = set()
        # the ledger's side
        self.ready = list(range(1, world.num_tasks + 1))
        self.state = dict.fromkeys(self.ready, "ready")
        self.token = dict.fromkeys(self.ready, 0)
        self.counted: Counter[int] = Counter()
        self.begun: set[tuple[int, int]] = set()
        self.expected_late = 0
        self.kills = 0
        for number in self.ready:
            bad = self.random.random() < world.share_bad
            self.fates[number] = self.random.choice(FATES[1:]) if bad else "ok"
        for number in self.ready[: world.num_liars] if world.is_gpu else ():
            self.fates[number] = "lies"
        self.random.shuffle(self.ready)

    # -------------------------------------------------------------- running it

    @property
    def has_liars(self) -> bool:
        return "lies" in self.fates.values()

    def later(self, delay: float, what: Callable[[], Event | None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.count), what))

    def run(self) -> None:
        world = self.world
        if world.drain_at is not None:
            self.later(world.drain_at, Drain)
        first: list[Event] = []
        if world.capacity and world.is_gpu:
            first = [Capacity(f"D{d}", 1) for d in range(world.num_devices)]
            for _ in range(5):
                key = f"D{self.random.randrange(world.num_devices)}"
                number = self.random.randint(1, world.per_gpu)
                self.later(self.random.uniform(0, 60), lambda k=key, n=number: Capacity(k, n))
        self.step(first)
        quiet = 0
        for _ in range(60_000):
            if self.scheduler.is_finished and not self.workers:
                break
            due = self.scheduler.next_deadline()
            times = [t for t in (self.heap[0][0] if self.heap else None, due) if t is not None]
            if due is not None:
                assert due > self.now, "something is overdue: the coordinator would spin"
            quiet = 0 if times else quiet + 1
            assert quiet < 5, f"deadlock: {self.open_report()}"
            # the coordinator looks at least every tenth of a second
            self.now = min([*times, self.now + 0.1]) if not times else min(times)
            events = []
            while self.heap and self.heap[0][0] <= self.now:
                event = heapq.heappop(self.heap)[2]()
                if event is not None:
                    events.append(event)
            self.step(events)
        else:
            raise AssertionError(f"does not come to an end: {self.open_report()}")
        self.check_end()

    def open_report(self) -> str:
        return f"{Counter(self.state.values())} {self.scheduler.roster.workers}"

    def step(self, events: list[Event]) -> None:
        out = self.scheduler.step(events, self.now)
        self.record(out)
        assert not (out.fetch and self.scheduler.backlog.exhausted)
        claimed = self.claim(out.fetch) if out.fetch else None
        self.obey(out)
        if claimed is not None:
            self.step([Fetched(claimed, exhausted=len(claimed) < out.fetch)])

    def claim(self, count: int) -> list[Task]:
        numbers, self.ready = self.ready[:count], self.ready[count:]
        found = []
        for number in numbers:
            self.state[number] = "claimed"
            self.token[number] += 1
            target = 2 if self.world.batched else 1
            key = number.to_bytes(8, "big")
            found.append(Task(number, key, target, b"{}", number % 2, self.token[number]))
        return found

    # -------------------------------------------------------------- the ledger

    def record(self, out: Decisions) -> None:
        for record in out.done:
            self.close(record.task_id, record.token, "done")
        for record in out.failed:
            self.close(record.task_id, record.token, "failed")
            fate = self.fates[record.task_id]
            faulted = self.has_liars or self.world.bad_device == "gone"  # which counts as a try
            innocent = ("ok",) if faulted else ("ok", "crashes once")
            # The last two tasks of a device that is gone say no more than two liars would.
            is_gone = record.finished.message == "gone" and self.world.bad_device == "gone"
            if not self.world.kill_rate and self.world.bad_device != "broken" and not is_gone:
                assert fate not in innocent or self.retries == 0, (fate, record)
        for record, again in out.tried:
            assert self.state[record.task_id] == "claimed"
            assert self.token[record.task_id] == record.token
            if record.finished.outcome is Outcome.DEVICE_FAULT:
                assert again.tries <= RetryPolicy.device_fault_retries
            elif again.tries and self.world.bad_device != "gone" and not self.has_liars:
                assert again.tries <= self.retries
            self.renew(again)
        for task in out.retokened:
            assert self.state[task.task_id] == "claimed"
            self.renew(task)
        for task in out.reopened:
            assert self.state[task.task_id] == "failed"
            self.state[task.task_id] = "claimed"
            self.renew(task)
        self.expected_late -= len(out.late)
        for kind, text in out.notes:
            if kind == "quarantined" and text.endswith(": gone"):
                assert text.startswith("d0.") and self.world.bad_device, text

    def close(self, number: int, token: int, state: str) -> None:
        assert self.state[number] == "claimed", f"task {number} ends twice"
        assert self.token[number] == token
        self.state[number] = state

    def renew(self, task: Task) -> None:
        assert task.token > self.token[task.task_id]
        self.token[task.task_id] = task.token

    # -------------------------------------------------------------- the workers

    def obey(self, out: Decisions) -> None:
        for worker_id, sent, together in out.sends:
            self.check_send(worker_id, sent, together)
            worker = self.workers[worker_id]
            was_idle = not worker.calls
            worker.calls += [list(sent)] if together else [[task] for task in sent]
            if was_idle and not worker.dead:
                self.begin(worker_id)
        for worker_id in out.revokes:
            self.later(self.random.uniform(0, 0.05), lambda w=worker_id: self.give_back(w))
        for slot_id, worker_id in out.starts:
            assert worker_id not in self.workers
            slot = next(s for s in self.slots if s.slot_id == slot_id)
            assert all(w.slot is not slot for w in self.workers.values()), "two in a slot"
            self.workers[worker_id] = Worker(slot)
            self.later(self.random.uniform(0.01, 3), lambda w=worker_id: self.get_ready(w))
            if self.random.random() < self.world.kill_rate:
                delay = self.random.expovariate(0.1)
                self.later(delay, lambda w=worker_id: self.die(w, signal=9))
        for worker_id, _ in out.kills:
            assert worker_id in self.workers
            self.workers[worker_id].killed = True
            self.later(self.random.uniform(0, 2), lambda w=worker_id: self.die(w, signal=15))
        for worker_id in out.stops:
            worker = self.workers[worker_id]
            assert not worker.stopping, "stopped twice"
            worker.stopping = True
            if not worker.calls:
                self.later(self.random.uniform(0, 0.2), lambda w=worker_id: self.leave(w))

    def check_send(self, worker_id: int, sent: list[Task], together: bool) -> None:
        worker = self.workers[worker_id]
        assert worker.ready
        assert not worker.stopping
        assert not worker.killed
        slot = next(s for s in self.scheduler.roster.slots if s.spec is worker.slot)
        assert not slot.quarantined
        assert together or len({task.target_id for task in sent}) == 1
        assert together == TARGETS[sent[0].target_id].is_batched
        assert not (together and worker.calls)
        held = {task.task_id for other in self.workers.values() for task in other.held}
        for task in sent:
            assert task.task_id not in held, "two workers hold the same task"
            assert self.state[task.task_id] == "claimed"
            assert self.token[task.task_id] == task.token
            assert (task.task_id, task.token) not in self.begun, "a token is used again"
            if task.solo:
                key = worker.slot.device_key
                on_device = [w for w in self.workers.values() if w.slot.device_key == key]
                assert on_device == [worker]
                assert len(sent) == 1

    def get_ready(self, worker_id: int) -> Event | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead:
            return None
        if worker.slot.slot_id == 0 and self.random.random() < 0.3:
            return self.die(worker_id, exit_code=1)
        worker.ready = True
        if worker.stopping:
            self.later(0.1, lambda: self.leave(worker_id))
        return WorkerReady(worker_id, 1)

    def begin(self, worker_id: int) -> None:
        worker = self.workers[worker_id]
        worker.running += 1
        call = worker.calls[0]
        self.begun |= {(task.task_id, task.token) for task in call}
        fates = [self.fate(worker, task) for task in call]
        seconds = min(25.0, self.random.expovariate(1 / (0.005 if self.world.short else 5.0)))
        plan = worker.running
        if "crash" in fates:
            self.later(seconds, lambda: self.die(worker_id, signal=11, plan=plan))
        elif "hang" not in fates:
            self.later(seconds, lambda: self.report(worker_id, plan, fates, seconds))

    def fate(self, worker: Worker, task: Task) -> str:
        fate = self.fates[task.task_id]
        if fate == "lies":
            return "gone"
        if self.world.bad_device and worker.slot.device_key == "D0":
            if self.world.bad_device == "broken":
                return "raise"
            if self.now > 20:
                return "gone"
        if fate == "crashes once" and task.task_id not in self.crashed:
            self.crashed.add(task.task_id)
            return "crash"
        if fate == "hungry":
            sharing = sum(
                w.slot.device_key == worker.slot.device_key for w in self.workers.values()
            )
            return "oom" if sharing > 1 else "ok"
        names = {"crashes": "crash", "raises": "raise", "poisons": "poison", "hangs": "hang"}
        return names.get(fate, "ok")

    def report(self, worker_id: int, plan: int, fates: list[str], seconds: float) -> Event | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead or worker.running != plan:
            return None
        call = worker.calls.pop(0)
        poisoned = "poison" in fates or "gone" in fates
        records = []
        for task, fate in zip(call, fates, strict=True):
            outcome = {"raise": Outcome.EXCEPTION, "oom": Outcome.DEVICE_OOM}.get(fate, Outcome.OK)
            if poisoned:  # everything that is computed after it fails too
                outcome = Outcome.DEVICE_FAULT if "gone" in fates else Outcome.EXCEPTION
            records.append(
                Finished(
                    task.task_id, task.token, outcome, 0.0, seconds / len(call), 0, 0, None,
                    message="gone" if outcome is Outcome.DEVICE_FAULT else fate, poisoned=poisoned,
                )
            )  # fmt: skip
        worker.running += 1
        if poisoned:
            worker.dead = True
            self.later(0.05, lambda: self.bury(worker_id, 0, None))
        elif worker.calls:
            self.begin(worker_id)
        elif worker.stopping:
            self.later(0.1, lambda: self.leave(worker_id))
        if self.random.random() < 0.05:  # an answer from the past
            records.append(records[0]._replace(token=records[0].token - 1))
            self.expected_late += 1
        return Results(worker_id, records)

    def give_back(self, worker_id: int) -> Event | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead:
            return None
        unbegun = [task for call in worker.calls[1:] for task in call]
        del worker.calls[1:]
        return Returned(worker_id, [task.task_id for task in unbegun])

    def leave(self, worker_id: int) -> Event | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead or worker.calls or not worker.ready:
            return None
        return self.die(worker_id, exit_code=0)

    def die(
        self,
        worker_id: int,
        *,
        signal: int | None = None,
        exit_code: int | None = None,
        plan: int | None = None,
    ) -> Event | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.dead or plan not in (None, worker.running):
            return None
        worker.dead = True
        self.kills += signal == 9
        self.later(self.random.uniform(0, 0.02), lambda: self.bury(worker_id, exit_code, signal))
        return None

    def bury(self, worker_id: int, exit_code: int | None, signal: int | None) -> Event:
        del self.workers[worker_id]
        return WorkerDied(worker_id, exit_code, signal, f"ended by {signal or exit_code}")

    # -------------------------------------------------------------- the end

    def check_end(self) -> None:
        assert self.expected_late == 0
        open_tasks = {task.task_id: task.token for task in self.scheduler.open_tasks()}
        claimed = {n: self.token[n] for n, state in self.state.items() if state == "claimed"}
        assert open_tasks == claimed
        if self.world.drain_at is not None or not self.scheduler.roster.usable():
            return
        assert set(self.state.values()) <= {"done", "failed"}
        if self.world.kill_rate or self.world.bad_device:
            return  # the innocent may have been hit too often
        for number, fate in self.fates.items():
            if fate == "ok" or (fate == "hungry" and self.world.is_gpu):
                assert self.state[number] == "done", (number, fate)
            elif fate in ("raises", "crashes", "poisons", "hangs", "lies"):
                assert self.state[number] == "failed", (number, fate)
            elif fate == "crashes once" and self.retries and not self.has_liars:
                assert self.state[number] == "done", (number, fate)


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    num_tasks=st.integers(1, 60),
    num_devices=st.integers(1, 4),
    per_gpu=st.integers(1, 3),
    is_gpu=st.booleans(),
    share_bad=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    kill_rate=st.sampled_from([0.0, 0.0, 0.5]),
    short=st.booleans(),
    batched=st.booleans(),
    bad_device=st.sampled_from(["", "", "", "broken", "gone"]),
    drain_at=st.sampled_from([None, None, None, 3.0]),
    capacity=st.booleans(),
    num_liars=st.sampled_from([0, 0, 1, 2]),
)


@examples(300, suppress_health_check=list(HealthCheck))
@given(WORLDS)
def test_nothing_is_lost_or_done_twice_and_everything_ends(world: World) -> None:
    Simulation(world).run()


@pytest.mark.slow
@examples(5000, suppress_health_check=list(HealthCheck))
@given(WORLDS)
def test_nothing_is_lost_or_done_twice_over_many_worlds(world: World) -> None:
    Simulation(world).run()
