"""How much device memory given processes hold, right now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.facts import read_facts


@dataclass(frozen=True)
class MemorySampler:
    """Reads from the driver, or from the recorded facts where ``settings.device_facts`` is set.

    The facts are read anew for each sample, so whoever records them can let memory change.
    """

    settings: Settings

    def used_by(self, pids: Collection[int], uuids: Collection[str]) -> int | None:
        """MiB that ``pids`` together hold on the devices ``uuids``; None when it is not known.

        0 means that the driver lists none of them. That is no proof that they hold nothing:
        inside a container a driver may list processes by numbers that mean nothing there.
        Raises SetupError for a facts file that is missing or malformed.
        """
        return total_held(pids, uuids, self._held_mib(uuids))

    def _held_mib(self, uuids: Collection[str]) -> Mapping[str, Mapping[int, int | None]]:
        if self.settings.device_facts is None:
            return nvml.process_memory_mib(uuids)
        return {
            device.uuid: {holder.pid: holder.used_mib for holder in device.holders}
            for device in read_facts(self.settings.device_facts).devices
            if device.uuid in uuids and device.lost is None
        }


def total_held(
    pids: Collection[int],
    uuids: Collection[str],
    held_mib: Mapping[str, Mapping[int, int | None]],
) -> int | None:
    """The sum over ``pids`` and ``uuids``; None if a device or an amount is missing.

    >>> total_held({7, 8}, ["GPU-a"], {"GPU-a": {7: 300, 9: 50}})
    300
    >>> total_held({7}, ["GPU-a", "GPU-b"], {"GPU-a": {7: 300}}) is None
    True
    """
    total_mib = 0
    for uuid in uuids:
        if uuid not in held_mib:
            return None
        for pid, used_mib in held_mib[uuid].items():
            if pid not in pids:
                continue
            if used_mib is None:
                return None
            total_mib += used_mib
    return total_mib
