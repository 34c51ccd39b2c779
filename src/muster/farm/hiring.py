"""Which workers are started for the work that is open. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from muster.farm.roster import Roster, Slot
from muster.farm.task import Task


def hire(
    roster: Roster, now: float, reserved: Collection[str], wary: Collection[Task], open_work: int
) -> Iterator[tuple[int, int]]:
    """Start what the open work can use, as slot and worker: three tasks never start eight workers.

    ``reserved``: devices that a task has to itself; ``wary``: tasks that avoid a device.
    """
    for key in reserved:
        if not roster.has_worker_on(key):
            there = (slot for slot in roster.startable(now) if slot.spec.device_key == key)
            yield from _hire(roster, next(there, None))
    free = [
        worker.slot.spec.device_key
        for worker in roster.workers.values()
        if worker.is_free and worker.slot.spec.device_key not in reserved
    ]
    slots = [slot for slot in roster.startable(now) if slot.spec.device_key not in reserved]
    for task in wary:
        if all(key == task.avoid for key in free):
            able = next((slot for slot in slots if slot.spec.device_key != task.avoid), None)
            for started in _hire(roster, able):
                assert able is not None
                free.append(able.spec.device_key)
                yield started
    for slot in slots:
        if len(free) >= open_work:
            return
        for started in _hire(roster, slot):
            free.append(slot.spec.device_key)
            yield started


def _hire(roster: Roster, slot: Slot | None) -> Iterator[tuple[int, int]]:
    """A worker in ``slot``; none where the slot or its device is full by now."""
    if slot is not None and roster.has_room(slot):
        yield slot.spec.slot_id, roster.hire(slot).worker_id
