"""Slots and the workers in them, as the scheduler knows them, and what it asks of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muster.farm.task import HeldWorker, Outcome, SlotSpec, TargetSpec, Task


@dataclass
class Slot:
    spec: SlotSpec
    share: int = 0  # 0 for the first worker of its device, 1 for the second, …
    worker_id: int | None = None
    start_failures: int = 0
    start_after: float = 0.0
    quarantined: str = ""
    is_given_back: bool = False  # or will be, once its worker has ended
    is_stuck: bool = False  # its device has memory that a dead worker still holds


@dataclass
class Worker:
    """``in_flight`` is in the order in which the worker runs it: its first is running."""

    worker_id: int
    slot: Slot
    ready: bool = False
    in_flight: dict[int, Task] = field(default_factory=dict)
    together: bool = False
    call: frozenset[int] = frozenset()  # the tasks that its joint call was sent with
    head_since: float = 0.0
    sign_s: float = 0.0  # when its running task last showed a sign of life
    left: float = 0.0  # what that task has before it, by its own account
    is_asked: bool = False  # to share it
    has_declined: bool = False
    halted_s: float = 0.0  # when its task was last told to end early
    killing: Outcome | None = None
    overdue: Task | None = None  # for which it is being killed
    stopping: bool = False
    is_hurried: bool = False  # told to end the task in hand, because its slot is given back
    poisoned: bool = False
    revoking: bool = False
    solo_id: int | None = None  # the task in hand, where its device is reserved for it
    has_worked: bool = False  # a task that has ended may have left something in its memory
    has_shared: bool = False  # its device, since its head began, with one that is gone now

    def begins(self, now: float) -> None:
        """Note that the worker runs another task now, or none."""
        self.head_since = self.sign_s = now
        self.left = 0.0
        self.is_asked = self.has_declined = False

    @property
    def call_size(self) -> int:
        return max(1, len(self.call))

    @property
    def is_free(self) -> bool:
        """Whether it holds no task and can take one, perhaps once it has started."""
        return not (self.in_flight or self.stopping or self.revoking or self.killing)

    @property
    def is_idle(self) -> bool:
        return self.ready and self.is_free


class Roster:
    def __init__(self, specs: Sequence[SlotSpec], first_worker_id: int) -> None:
        self.slots: list[Slot] = []
        self._by_id: dict[int, Slot] = {}
        self._by_device: dict[str, list[Slot]] = {}
        # Looked up in each turn and at each event, where all slots and workers may be thousands.
        self._usable: dict[int, Slot] = {}
        self._vacant: dict[int, Slot] = {}  # without a worker
        self._holders: dict[int, Worker] = {}  # by task
        self.have(specs)
        self.workers: dict[int, Worker] = {}
        self._next_id = first_worker_id
        self._allowed: dict[str, int] = {}

    def have(self, specs: Iterable[SlotSpec]) -> list[Slot]:
        """Have exactly these slots from now on; returns those that are given back by that.

        One that was given back and is taken again gets tasks again, also if it was in quarantine.
        """
        wanted = {spec.slot_id: spec for spec in specs}
        back = [s for s in self.slots if not (s.is_given_back or s.spec.slot_id in wanted)]
        for slot in self.slots:
            is_wanted = wanted.pop(slot.spec.slot_id, None) is not None
            if slot.is_given_back and is_wanted and not slot.is_stuck:
                slot.quarantined, slot.start_failures = "", 0
            slot.is_given_back = not is_wanted
        for spec in wanted.values():
            shares = self._by_device.setdefault(spec.device_key, [])
            slot = self._by_id[spec.slot_id] = Slot(spec, len(shares))
            shares.append(slot)
            self.slots.append(slot)
            self._vacant[spec.slot_id] = slot
        self._sort_usable()
        return back

    def _sort_usable(self) -> None:
        """In the order of all slots, which is that in which workers are started."""
        usable = (slot for slot in self.slots if not (slot.quarantined or slot.is_given_back))
        self._usable = {slot.spec.slot_id: slot for slot in usable}

    def quarantine(self, slot: Slot, reason: str) -> None:
        slot.quarantined = reason
        self._usable.pop(slot.spec.slot_id, None)

    def readmit(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.quarantined = ""
        self._sort_usable()

    def spec_of(self, slot_id: int) -> SlotSpec:
        return self._by_id[slot_id].spec

    def allow(self, device_key: str, workers: int) -> None:
        self._allowed[device_key] = max(1, workers)

    def usable(self) -> Collection[Slot]:
        """The slots that get tasks, in the order of all."""
        return self._usable.values()

    def usable_without(self, device_key: str) -> Iterator[str]:
        """The other devices of usable slots, as often as they have some."""
        keys = (slot.spec.device_key for slot in self._usable.values())
        return (key for key in keys if key != device_key)

    def shares_of(self, device_key: str) -> list[Slot]:
        return [*self._by_device.get(device_key, ())]

    def give(self, worker: Worker, tasks: Iterable[Task]) -> None:
        given = {task.task_id: task for task in tasks}
        worker.in_flight.update(given)
        self._holders.update(dict.fromkeys(given, worker))

    def take(self, worker: Worker, task_id: int) -> None:
        """Note that the worker has the task no more."""
        del worker.in_flight[task_id], self._holders[task_id]

    def holder(self, task_id: int) -> Worker | None:
        """The worker that has this task."""
        return self._holders.get(task_id)

    def has(self, task_id: int) -> bool:
        """Whether a worker has this task."""
        return task_id in self._holders

    def num_at_work(self) -> int:
        """Workers that take tasks now: one that waits in a cluster's queue does not."""
        usable = [w for w in self.workers.values() if w.ready and not w.stopping]
        return sum(not worker.slot.quarantined for worker in usable)

    def waiting(self, now: float) -> list[Slot]:
        """Slots that may not start before a time to come, after a start that failed."""
        vacant = self._vacant.items()
        return [s for number, s in vacant if s.start_after > now and number in self._usable]

    def startable(self, now: float) -> Iterator[Slot]:
        """Slots where a worker may start; the first shares of all devices before any second."""
        there = (slot for number, slot in self._vacant.items() if number in self._usable)
        for slot in sorted(there, key=lambda s: (s.share, s.spec.slot_id)):
            if slot.start_after <= now and self.has_room(slot):
                yield slot

    def has_room(self, slot: Slot) -> bool:
        """Whether a worker may be started there: one per slot, and what the device allows."""
        if slot.worker_id is not None:
            return False
        allowed = self._allowed.get(slot.spec.device_key)
        return allowed is None or len(self.workers_on(slot.spec.device_key)) < allowed

    def surplus(self) -> list[Worker]:
        """Workers beyond what their device allows now, its last shares."""
        found = []
        for key, allowed in self._allowed.items():
            workers = [worker for worker in self.workers_on(key) if not worker.stopping]
            found += sorted(workers, key=lambda worker: worker.slot.share)[allowed:]
        return found

    def hire(self, slot: Slot) -> Worker:
        worker = Worker(self._next_id, slot)
        self._next_id += 1
        self._seat(worker)
        return worker

    def adopt(self, slot_id: int, held: HeldWorker, now: float) -> None:
        """Go on with a worker of an earlier coordinator and with the tasks that it holds."""
        slot = self._by_id[slot_id]
        worker = Worker(held.worker_id, slot, ready=held.is_ready, stopping=held.is_ending)
        self.give(worker, held.tasks)
        worker.together = held.is_together
        worker.call = frozenset(worker.in_flight if held.is_together else ())
        worker.has_worked = True  # nobody knows, and one more try is no loss
        worker.begins(now)
        self._seat(worker)

    def _seat(self, worker: Worker) -> None:
        self.workers[worker.worker_id] = worker
        worker.slot.worker_id = worker.worker_id
        self._vacant.pop(worker.slot.spec.slot_id, None)

    def remove(self, worker_id: int) -> tuple[Worker | None, list[Task]]:
        """The worker, which is gone, and the tasks that it had."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return None, []
        worker.slot.worker_id = None
        self._vacant[worker.slot.spec.slot_id] = worker.slot
        for sibling in self.workers_on(worker.slot.spec.device_key):
            sibling.has_shared = bool(sibling.in_flight)
        tasks = list(worker.in_flight.values())
        for task in tasks:
            self.take(worker, task.task_id)
        return worker, tasks

    def ready(self, worker_id: int) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.ready = True
            worker.slot.start_failures = 0

    def available(self, most: int) -> Iterator[Worker]:
        """Workers that may get work and have no more than ``most`` tasks; the idle first, so that
        none waits behind a full one.
        """
        able = [
            worker
            for worker in self.workers.values()
            if len(worker.in_flight) <= most
            and worker.ready
            and not worker.stopping
            and not worker.revoking
            and worker.killing is None
            and not worker.slot.quarantined
        ]
        return iter(sorted(able, key=lambda worker: len(worker.in_flight)))

    def worker_of(self, slot: Slot) -> Worker | None:
        return self.workers.get(slot.worker_id) if slot.worker_id is not None else None

    def is_busy(self, slot: Slot) -> bool:
        """Whether its worker has a task."""
        worker = self.worker_of(slot)
        return worker is not None and bool(worker.in_flight)

    def shares(self, slot: Slot) -> bool:
        """Whether another worker is on the same device, or was when the running task began."""
        workers = self.workers_on(slot.spec.device_key)
        return len(workers) > 1 or any(worker.has_shared for worker in workers)

    def workers_on(self, device_key: str) -> list[Worker]:
        there = (self.worker_of(slot) for slot in self._by_device.get(device_key, ()))
        return [worker for worker in there if worker is not None]


def runs_divisible(worker: Worker, targets: Mapping[int, TargetSpec]) -> bool:
    head = next(iter(worker.in_flight.values()), None)
    return head is not None and targets[head.target_id].is_divisible


def due_s(worker: Worker, targets: Mapping[int, TargetSpec], timeout_s: float | None) -> float:
    """When a worker's running call is overdue, on the scheduler's clock.

    A joint call may take the limit once per task in it. A divisible task is long by nature, so
    there the limit bounds the time without a sign of life.
    """
    share = len(worker.in_flight) if worker.together else 1
    since = worker.sign_s if runs_divisible(worker, targets) else worker.head_since
    return since + (timeout_s or math.inf) * max(1, share)


def to_revoke(workers: Iterable[Worker], before: float = math.inf) -> Iterator[int]:
    """Take back what workers have not begun that have been at their task since ``before``."""
    for worker in workers:
        waits = len(worker.in_flight) > 1 and not worker.together and not worker.revoking
        if waits and worker.head_since < before:
            worker.revoking = True
            yield worker.worker_id


class Breaker:
    """Counts failures for as long as all of them, from the first, are the same."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._mark = ""
        self._count = 0

    def failed(self, mark: str) -> int:
        """Count a failure; returns how many there are once the limit is reached, else 0."""
        self._count = self._count + 1 if mark == self._mark else 1
        self._mark = mark
        return self._count if self._count >= self._limit else 0
