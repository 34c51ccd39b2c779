"""How many workers fit on one GPU, learnt from the memory that finished tasks have held there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.inventory import read_facts

#: What CUDA and its libraries hold on a GPU for each process, beside tensors: 450 to 700 MiB.
CONTEXT_MIB = 700
#: Workers that share a GPU with --per-gpu auto.
MOST_PER_GPU = 8


def workers_that_fit(
    *,
    peaks_mib: Sequence[int],
    total_mib: int | None,
    others_mib: int,
    current: int,
    cap: int,
    headroom: float = 0.1,
) -> int:
    """The number of workers that this GPU should have now, between 1 and ``cap``.

    ``peaks_mib``: the highest memory of each finished task on this GPU; values of 0 mean that the
    sampler saw nothing and are left out. ``others_mib``: what processes that are not ours hold.
    ``headroom``: the fraction of the total that stays free, for a task larger than all before.

    Without a peak or a total there is nothing to go by, so the number stays. It at most doubles
    per call: each doubling is checked against the peaks of the tasks that ran beside each other
    before the next. It shrinks at once when a peak or somebody else leaves less room. Raises
    ValueError for a ``cap`` below 1 and for a ``headroom`` that is not a fraction.

    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=1, cap=16)
    2
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=6, cap=16)
    8
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=60000, current=8, cap=16)
    1
    """
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")
    if not 0.0 <= headroom < 1.0:
        raise ValueError(f"headroom must be a fraction from 0 up to 1, not {headroom}")
    current = min(max(current, 1), cap)
    seen = [peak for peak in peaks_mib if peak > 0]
    if not seen or total_mib is None:
        return current
    room_mib = total_mib * (1.0 - headroom) - others_mib
    fitting = int(room_mib // max(seen))
    return max(1, min(fitting, 2 * current, cap))


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

    def in_use(self, uuids: Collection[str]) -> int | None:
        """MiB of the devices ``uuids`` that anybody holds; None when it is not known."""
        if self.settings.device_facts is None:
            used = [nvml.memory_used_mib(uuid) for uuid in uuids]
        else:
            facts = read_facts(self.settings.device_facts).devices
            by_uuid = {device.uuid: device.memory_used_mib for device in facts}
            used = [by_uuid.get(uuid) for uuid in uuids]
        known = [mib for mib in used if mib is not None]
        return sum(known) if len(known) == len(used) else None

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
