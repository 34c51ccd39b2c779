"""Slots and the workers in them, as the scheduler knows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from muster.farm.model import Outcome, SlotSpec, Task


@dataclass
class Slot:
    spec: SlotSpec
    share: int = 0  # 0 for the first worker of its device, 1 for the second, …
    worker_id: int | None = None
    start_failures: int = 0
    start_after: float = 0.0
    quarantined: str = ""


@dataclass
class Worker:
    """``in_flight`` is in the order in which the worker runs it: its first is running."""

    worker_id: int
    slot: Slot
    ready: bool = False
    in_flight: dict[int, Task] = field(default_factory=dict)
    together: bool = False
    head_since: float = 0.0
    killing: Outcome | None = None
    stopping: bool = False
    revoking: bool = False
    solo_key: str = ""

    @property
    def is_idle(self) -> bool:
        return self.ready and not self.in_flight and not self.stopping and self.killing is None


class Roster:
    def __init__(self, specs: Sequence[SlotSpec], first_worker_id: int) -> None:
        seen: dict[str, int] = {}
        self.slots: list[Slot] = []
        for spec in specs:
            share = seen.get(spec.device_key, 0)
            seen[spec.device_key] = share + 1
            self.slots.append(Slot(spec, share))
        self.workers: dict[int, Worker] = {}
        self._next_id = first_worker_id
        self._allowed: dict[str, int] = {}

    def allow(self, device_key: str, workers: int) -> None:
        self._allowed[device_key] = max(1, workers)

    def usable(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.quarantined]

    def waiting(self) -> list[Slot]:
        """Slots that wait for their next start after one that failed."""
        return [s for s in self.usable() if s.worker_id is None and s.start_failures]

    def startable(self, now: float) -> Iterator[Slot]:
        """First shares of all devices before any second share."""
        for slot in sorted(self.usable(), key=lambda s: s.share):
            allowed = slot.share < self._allowed.get(slot.spec.device_key, len(self.slots))
            if slot.worker_id is None and slot.start_after <= now and allowed:
                yield slot

    def hire(self, slot: Slot) -> Worker:
        worker = Worker(self._next_id, slot)
        self._next_id += 1
        self.workers[worker.worker_id] = worker
        slot.worker_id = worker.worker_id
        return worker

    def ready(self, worker_id: int) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.ready = True
            worker.slot.start_failures = 0

    def available(self) -> Iterator[Worker]:
        """Workers that may get work; the idle first, so that none waits behind a full one."""
        able = [
            worker
            for worker in self.workers.values()
            if worker.ready
            and not worker.stopping
            and not worker.revoking
            and worker.killing is None
            and not worker.slot.quarantined
        ]
        return iter(sorted(able, key=lambda worker: len(worker.in_flight)))

    def worker_of(self, slot: Slot) -> Worker | None:
        return self.workers.get(slot.worker_id) if slot.worker_id is not None else None

    def has_worker_on(self, device_key: str) -> bool:
        return any(w.slot.spec.device_key == device_key for w in self.workers.values())

    def shares(self, slot: Slot) -> bool:
        """Whether another worker is on the same device right now."""
        key = slot.spec.device_key
        return sum(w.slot.spec.device_key == key for w in self.workers.values()) > 1
