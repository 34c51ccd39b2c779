"""The coordinator's side of one slot on a cluster: whichever pilot serves it, one after another.

A worker is asked for when there may be no pilot yet; its commands wait here until one shows itself.
When a pilot is lost, the worker that was in it has died, and the next worker waits for the next
pilot. This module knows mailboxes and nothing of SLURM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from muster.base.clock import Rhythm
from muster.farm.events import Event, Progress, WorkerDied, WorkerLeaving
from muster.farm.executors import remote
from muster.farm.executors.base import PilotLeft
from muster.farm.executors.mailbox import (
    BYE,
    HELLO,
    LEAVING,
    PilotBox,
    Reader,
    Writer,
    boxes_of,
    pilot_box,
    why_leaving,
)
from muster.farm.executors.remote import EventReader, Frame
from muster.farm.task import Outcome, SlotSpec
from muster.run.folder import RunFolder

#: A pilot that has not come yet; thousands of them are sought no faster than they are heard.
_SEEK_LEAST_S, _SEEK_MOST_S = 0.02, 2.0


class ClusterSlot:
    def __init__(self, folder: RunFolder, slot_id: int, session: int, least_s: float) -> None:
        """``least_s``: how many seconds pass at least between two looks at its mailbox."""
        self.slot_id = slot_id
        self.array: int | None = None  # the array whose element serves it, or will
        self.cancelled = ""  # what is to be said of its last job, which somebody has cancelled
        self.worker_id: int | None = None
        self.box: PilotBox | None = None
        self.leaving: tuple[Outcome, str] | None = None
        self.age = (-1, -1)  # of the last pilot; only a newer one is entered
        self._folder = folder
        self._session = session
        self._least_s = least_s
        self._reason_told = ""  # why its worker waits, as last told
        self._is_placed = False  # the pilot there was told of the worker
        self._orders = bytearray()  # for the worker, from its start on, until a pilot takes them
        now = time.monotonic()
        self._seeking = Rhythm(
            now, least_s=max(_SEEK_LEAST_S, least_s), most_s=max(_SEEK_MOST_S, least_s)
        )
        self._listening = Rhythm(now, least_s=least_s)
        self._inbox: Writer | None = None
        self._outbox: Reader | None = None
        self._events = EventReader()

    # ------------------------------------------------------------------ orders

    def adopt(self, left: PilotLeft) -> None:
        """Go on with the pilot of an earlier coordinator, and know whether it is leaving."""
        box = pilot_box(self._folder, left.slot_id, left.job_id, left.restart)
        self.array = left.job_id
        self._enter(box, left.heard)
        outcome = why_leaving(box)
        self.leaving = None if outcome is None else _leaving_for(outcome)
        if left.worker is not None:
            self.worker_id, self._is_placed = left.worker.worker_id, True
        if left.unwanted is not None and self._inbox is not None:
            self._inbox.add(remote.end_command(left.unwanted, kill=True))

    def pass_over(self, ages: Iterable[tuple[int, int]]) -> None:
        """Never listen to pilots of these ages or older ones: they are gone, or soon will be."""
        self.age = max([self.age, *ages])

    def start(self, worker_id: int, slot: SlotSpec) -> None:
        self.worker_id, self._is_placed = worker_id, False
        self._orders = bytearray(remote.start_command(worker_id, slot))
        self._reason_told = ""
        self._seeking.happened(time.monotonic())

    def order(self, worker_id: int, frames: bytes) -> None:
        """Keep frames for its worker; they are dropped when it has another worker by now."""
        if worker_id == self.worker_id:
            self._orders += frames
            self._listening.happened(time.monotonic())

    def end_unplaced(self) -> list[Event]:
        """Report the death of a worker that no pilot knows and nobody wants any more."""
        if self.worker_id is None or self._is_placed:
            return []
        death = WorkerDied(self.worker_id, 0, None, "it was not started")
        self._forget_worker()
        return [death]

    @property
    def has_waiting(self) -> bool:
        """A worker waits for a pilot, and there is none."""
        return self.worker_id is not None and not self._is_placed and self.box is None

    @property
    def due_s(self) -> float:
        """When to look again."""
        is_served = self.leaving is None
        if self.box is None:
            return self._seeking.due_s if self.worker_id is not None else float("inf")
        if self._orders and (is_served or self._is_placed):
            return 0.0
        seek_s = float("inf") if is_served else self._seeking.due_s
        return min(self._listening.due_s, seek_s)

    @property
    def job(self) -> str:
        """The id of its job, as SLURM writes it: ``ARRAY_ELEMENT``."""
        return f"{self.array}_{self.slot_id}"

    def tell(self, text: str) -> list[Event]:
        """Report why its worker waits, unless that was the last report."""
        if self.worker_id is None or self._reason_told == text:
            return []
        self._reason_told = text
        return [Progress(self.worker_id, 0, text)]

    # ------------------------------------------------------------------ looking

    def look(self, now: float) -> list[Event]:
        """Hand over waiting commands and read what the pilot has said. Cheap when not due."""
        events: list[Event] = []
        if (self.box is None or self.leaving is not None) and now >= self._seeking.due_s:
            events += self._seek(now)
        if self.box is None or self._inbox is None:
            return events
        if self._orders and (self.leaving is None or self._is_placed):
            self._inbox.add(bytes(self._orders))  # a pilot that leaves hands back what it gets
            self._orders.clear()
            self._is_placed = True
        self._inbox.flush()
        if now >= self._listening.due_s:
            events += self._listen(now)
        return events

    def lost(self, outcome: Outcome, reason: str, trace: str = "") -> list[Event]:
        """Report the end of its pilot's job, after everything that the pilot had said."""
        events = self._listen(time.monotonic()) if self.box is not None else []
        outcome, reason = self.leaving or (outcome, reason)
        events += self._worker_died(outcome, reason, trace)
        self.close()  # in case SLURM is wrong and the node is only out of reach
        self._empty()
        return events

    def close(self) -> None:
        """Tell the pilot to end now, with its worker."""
        if self._inbox is not None:
            self._inbox.add(remote.close_command())
            self._inbox.flush()

    def _seek(self, now: float) -> list[Event]:
        newer = [box for box in boxes_of(self._folder, self.slot_id) if box.age > self.age]
        self._seeking.looked(now)
        if not newer:
            return []
        events: list[Event] = []
        if self.box is not None:  # it left, and did not say when it was gone
            events = self.lost(Outcome.LOST, "its pilot was replaced by a newer one")
        self._enter(newer[-1])
        if self.worker_id is not None:
            events.append(Progress(self.worker_id, 0, ""))
        return events

    def _enter(self, box: PilotBox, heard: int = 0) -> None:
        self.box, self.age, self.leaving = box, box.age, None
        self._inbox = Writer(box.inbox(self._session), durable=False)
        self._outbox = Reader(box.outbox, heard)
        self._events = EventReader()
        self._listening = Rhythm(time.monotonic(), least_s=self._least_s)

    def _empty(self) -> None:
        self.box = self._inbox = self._outbox = self.leaving = None
        self._seeking.happened(time.monotonic())

    def _listen(self, now: float) -> list[Event]:
        assert self._outbox is not None
        frames = self._outbox.receive()
        if frames:
            self._listening.happened(now)
        self._listening.looked(now)
        return self._read(frames)

    def _read(self, frames: Iterable[Frame]) -> list[Event]:
        events: list[Event] = []
        for header, body in frames:
            if header[0] == HELLO:
                continue
            if header[0] == LEAVING:
                self.leaving = _leaving_for(Outcome(header[1]))
                self._seeking.happened(time.monotonic())
                if self.worker_id is not None and self._is_placed:
                    events.append(WorkerLeaving(self.worker_id))
            elif header[0] == BYE:
                outcome, reason = self.leaving or (Outcome.LOST, "its pilot ended")
                events += self._worker_died(outcome, reason)
                self._empty()
            else:
                for event in self._events.read([(header, body)]):
                    events.append(event)
                    if isinstance(event, WorkerDied) and event.worker_id == self.worker_id:
                        self._forget_worker()
        return events

    def _worker_died(self, outcome: Outcome, reason: str, trace: str = "") -> list[Event]:
        """Report the death of its worker, unless it waits for another pilot than the lost one."""
        if self.worker_id is None or (not self._is_placed and self.box is not None):
            return []
        death = WorkerDied(
            self.worker_id,
            None,
            None,
            reason,
            trace,
            host_oom=outcome is Outcome.HOST_OOM,
            outcome=outcome if outcome is not Outcome.HOST_OOM else None,
        )
        self._forget_worker()
        return [death]

    def _forget_worker(self) -> None:
        self.worker_id, self._is_placed = None, False
        self._orders.clear()


def _leaving_for(outcome: Outcome) -> tuple[Outcome, str]:
    sentences = {
        Outcome.PREEMPTED: "its job was preempted by one of higher priority",
        Outcome.JOB_TIMEOUT: "its job came to its time limit; ask for more with --time",
    }
    return outcome, sentences.get(outcome, "its job was cancelled")
