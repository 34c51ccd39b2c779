"""The devices that get no more tasks: which are put there, and which come back. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from muster.farm.backlog import Backlog
from muster.farm.decisions import Decisions, Policy
from muster.farm.device_health import Blame, DeviceHealth, blame, done_on
from muster.farm.roster import Roster, Slot
from muster.farm.task import AttemptRecord, Finished, Outcome, Task


class Quarantine:
    """Counts what fails and what is done on each device, and judges it by that."""

    def __init__(self, policy: Policy, roster: Roster, backlog: Backlog) -> None:
        self._policy, self._roster, self._backlog = policy, roster, backlog
        self._health: dict[str, DeviceHealth] = defaultdict(DeviceHealth)
        self._broken: dict[int, set[str]] = {}  # by task: devices whose context broke under it
        self._blamed: dict[str, Blame] = {}  # for a failure that no other device has shown

    def done(self, key: str, tasks: Sequence[Task], out: Decisions) -> None:
        """A device has done these tasks, which may put another one to blame."""
        self._health[key].succeeded()
        for task in tasks:
            if task.tries:  # else none has broken anything
                found = done_on(key, task, self._health, self._broken, self._policy)
                self._put_devices(found, out)

    def progressed(self, key: str) -> None:
        """Records were handled on a device since its last context broke."""
        self._health[key].breaks = 0

    def failed(
        self, slot: Slot, record: AttemptRecord, call: frozenset[int], mark: str, out: Decisions
    ) -> bool:
        """Count a failure; returns whether the device is to blame, which then gets nothing more.

        ``call``: the tasks that the worker was at; ``mark``: the fingerprint of the failure.
        """
        health = self._health[slot.spec.device_key]
        health.failed(mark, record.finished, record.worker_id, call)
        if record.finished.outcome is Outcome.BROKEN_CONTEXT:
            self._broken.setdefault(record.task_id, set()).add(slot.spec.device_key)
        if self._is_at_fault(slot, record.finished, mark, out):
            return True
        alike = [key for key, known in self._blamed.items() if known.until == mark]
        self._readmit(alike, "another GPU fails in the same way", out)
        return False

    def lost(self, key: str, task: Task) -> None:
        """A task has failed on a device for good."""
        self._health[key].lost(task)

    def take_lost(self, key: str) -> list[Task]:
        """Those that have; they are asked for once."""
        tasks, self._health[key].tasks = self._health[key].tasks, []
        return tasks

    def put(self, slots: Sequence[Slot], reason: str, out: Decisions) -> None:
        """Give these slots, all of one device, nothing more."""
        for slot in slots:
            self._roster.quarantine(slot, reason)
            if (worker := self._roster.worker_of(slot)) is not None:
                out.stop(worker)
        self._backlog.give_up(slots[0].spec.device_key)
        out.notes.append(("quarantined", f"{slots[0].spec.label}: {reason}"))
        if not self._roster.usable():
            self._readmit(list(self._blamed), "no other GPU is left", out)

    def _is_at_fault(self, slot: Slot, finished: Finished, mark: str, out: Decisions) -> bool:
        if slot.quarantined:
            return True
        is_no_device = finished.outcome is Outcome.MEMORY_LIMIT or not slot.spec.devices
        if is_no_device and finished.outcome is not Outcome.DEVICE_FAULT:
            return False
        key = slot.spec.device_key
        found = blame(
            finished, mark, self._health[key],
            lambda: map(self._health.__getitem__, self._roster.usable_without(key)), self._policy,
        )  # fmt: skip
        if found is None:
            return False
        if found.until:
            self._blamed[key] = found
        self._put_devices({key: found.reason}, out)
        return True

    def _put_devices(self, reasons: Mapping[str, str], out: Decisions) -> None:
        for key, reason in reasons.items():
            if shares := [s for s in self._roster.shares_of(key) if not s.quarantined]:
                self.put(shares, reason, out)

    def _readmit(self, keys: Iterable[str], why: str, out: Decisions) -> None:
        """Let devices have tasks again that were blamed for a failure only they had shown."""
        for key in keys:
            reason = self._blamed.pop(key).reason
            shares = [s for s in self._roster.shares_of(key) if s.quarantined == reason]
            self._roster.readmit(shares)
            self._health[key].alike = 0
            if shares:
                out.notes.append(("readmitted", f"{shares[0].spec.label}: {why}"))
