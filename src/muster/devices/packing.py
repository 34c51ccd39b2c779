"""How many workers there is room for: on a GPU, by the memory that tasks take there; and on the
machine, by the host memory that ``--memory`` allows each.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from muster.base.errors import UsageError
from muster.base.host_memory import host_memory_mib, part_mib, tree
from muster.base.settings import Settings
from muster.base.shown_text import count, shown_mib
from muster.devices import nvml
from muster.devices.inventory import read_facts
from muster.devices.placement import Placement

#: What CUDA and its libraries hold on a GPU for each process, beside tensors: 450 to 700 MiB.
CONTEXT_MIB = 700
#: The share of a GPU's memory that stays free, for a task larger than all before.
_HEADROOM = 0.1
#: Workers that share a GPU with --per-gpu auto.
MOST_PER_GPU = 8


def workers_that_fit(
    *,
    peaks_mib: Sequence[int],
    total_mib: int | None,
    others_mib: int,
    current: int,
    cap: int,
) -> int:
    """The number of workers that this GPU should have now, between 1 and ``cap``.

    ``peaks_mib``: the highest memory of each finished task on this GPU; values of 0 mean that the
    sampler saw nothing and are left out. ``others_mib``: what processes that are not ours hold.

    Without a peak or a total there is nothing to go by, so the number stays. It at most doubles
    per call: each doubling is checked against the peaks of the tasks that ran beside each other
    before the next. It shrinks at once when a peak or somebody else leaves less room. Raises
    ValueError for a ``cap`` below 1.

    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=1, cap=16)
    2
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=0, current=6, cap=16)
    8
    >>> workers_that_fit(peaks_mib=[9000], total_mib=80000, others_mib=60000, current=8, cap=16)
    1
    """
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")

    current = min(max(current, 1), cap)
    seen = [peak for peak in peaks_mib if peak > 0]
    if not seen or total_mib is None:
        return current
    room_mib = total_mib * (1.0 - _HEADROOM) - others_mib
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


def tasks_that_fit(most_mib: float | None) -> int | None:
    """How many tasks the memory of this machine has room for beside what others hold; None where
    ``--memory`` does not say what one takes, or the host does not say what is free.

    Raises UsageError where not even one fits.
    """
    if most_mib is None or (room_mib := host_memory_mib().available_mib) is None:
        return None
    room_mib += int(part_mib(tree(os.getpid())[1:]))  # what tasks of this run hold already
    if most := int(room_mib // most_mib):
        return most
    raise UsageError(
        f"--memory {shown_mib(most_mib)} is more than this machine has: "
        f"{shown_mib(room_mib)} are free.",
        hint="write less, end what holds it, or run elsewhere.",
    )


def within_memory(placement: Placement, most_mib: float | None, cpu_count: int) -> Placement:
    """The placement with as many workers as this machine has memory for.

    Raises UsageError where not even one fits.
    """
    return with_memory(placement, tasks_that_fit(most_mib), most_mib, cpu_count)


def with_memory(
    placement: Placement, most: int | None, most_mib: float | None, cpu_count: int
) -> Placement:
    """The placement without the workers for which there is no memory: the first of every device
    comes before the second of any."""
    slots = placement.slots
    if most is None or len(slots) <= most or most_mib is None:
        return placement
    num_before = Counter[tuple[str, ...]]()
    turns = []
    for slot in slots:
        turns.append(num_before[slot.device_uuids] if slot.device_uuids else 0)
        num_before[slot.device_uuids] += 1
    kept = sorted(sorted(range(len(slots)), key=lambda at: turns[at])[:most])
    threads = max(1, cpu_count // most)
    note = (
        f"{count(len(slots) - most, 'worker')} fewer than there is room for otherwise: each may "
        f"take {shown_mib(most_mib)} of memory (--memory), and {most} fit."
    )
    return dataclasses.replace(
        placement,
        slots=tuple(
            dataclasses.replace(slots[at], slot_id=number, num_threads=threads)
            for number, at in enumerate(kept)
        ),
        notes=(*placement.notes, note),
    )
