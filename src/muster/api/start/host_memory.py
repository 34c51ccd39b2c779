"""How many tasks the memory of this machine has room for, and a placement with no more workers."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter

from muster.base.errors import UsageError
from muster.base.host_memory import host_memory_mib, part_mib, tree
from muster.base.shown_text import shown_mib
from muster.devices.placement import Placement


def tasks_that_fit(most_mib: float | None) -> int | None:
    """How many tasks the memory of this machine has room for beside what others hold; None where
    ``--memory`` does not say what one takes, or nobody knows what there is.

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
        f"{len(slots) - most} workers fewer than there is room for otherwise: each may take "
        f"{shown_mib(most_mib)} of memory (--memory), and {most} fit."
    )
    return dataclasses.replace(
        placement,
        slots=tuple(
            dataclasses.replace(slots[at], slot_id=number, num_threads=threads)
            for number, at in enumerate(kept)
        ),
        notes=(*placement.notes, note),
    )
