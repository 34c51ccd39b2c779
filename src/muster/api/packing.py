"""``--per-gpu auto``: watches what workers hold on each GPU and says how many fit."""

from __future__ import annotations

from collections.abc import Mapping

from muster.base.processes import family
from muster.base.settings import Settings
from muster.devices.discovery import discover
from muster.devices.packing import MemorySampler, workers_that_fit
from muster.farm.events import Capacity, Event
from muster.farm.task import SlotSpec
from muster.farm.view import RunView, WorkerLine


class PerGpuAuto:
    """Starts with one worker per GPU; after finished tasks grows to what their peaks allow.

    What a worker holds is read from the driver by process, descendants included. Where the
    driver does not list our processes (some containers) nothing is known and one worker stays.
    """

    CAP = 8

    def __init__(self, settings: Settings, slots: tuple[SlotSpec, ...]) -> None:
        self._sampler = MemorySampler(settings)
        self._shares: dict[str, list[SlotSpec]] = {}
        for slot in slots:
            self._shares.setdefault(slot.device_key, []).append(slot)
        devices = {device.uuid: device for device in discover(settings).devices}
        self._totals = {uuid: device.memory_total_mib for uuid, device in devices.items()}
        self._others = {uuid: device.memory_used_mib or 0 for uuid, device in devices.items()}
        self._allowed = dict.fromkeys(self._shares, 0)
        self._peaks: dict[str, int] = {}

    def sample(self, view: RunView) -> list[Event]:
        """New limits where the peaks allow more workers or force fewer."""
        lines = {line.slot: line for line in view.workers}
        events: list[Event] = []
        for key, slots in self._shares.items():
            now = self._fitting(key, slots, lines)
            if now != self._allowed[key]:
                self._allowed[key] = now
                events.append(Capacity(key, now))
        return events

    def _fitting(self, key: str, slots: list[SlotSpec], lines: Mapping[str, WorkerLine]) -> int:
        uuids = slots[0].devices
        mine = [lines[slot.label] for slot in slots if lines[slot.label].pid is not None]
        for line in mine:
            assert line.pid is not None
            held = self._sampler.used_by(family(line.pid), uuids)
            if held:
                self._peaks[key] = max(self._peaks.get(key, 0), held)
        current = max(1, self._allowed[key])
        has_finished = any(line.num_ended for line in mine)
        if key not in self._peaks or (current == 1 and not has_finished):
            return current
        totals = [self._totals.get(uuid) for uuid in uuids]
        known = [total for total in totals if total is not None]
        return workers_that_fit(
            peaks_mib=[self._peaks[key]],
            total_mib=sum(known) if len(known) == len(uuids) else None,
            others_mib=sum(self._others.get(uuid, 0) for uuid in uuids),
            current=current,
            cap=len(slots),
        )
