"""The devices of a run that is at work: which of them it gives back, and which it takes.

What somebody asked for last is in the run's folder before it is done, so it outlives the
coordinator: a resumed run begins with it, unless its command chooses other devices by then.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.api.start.options import SweepOptions
from muster.api.start.placing import (
    Wanted,
    holds,
    per_gpu_of,
    read_wanted,
    slots_of,
)
from muster.base.atomic_files import explain_os_error
from muster.base.codec import write_json
from muster.base.errors import MusterError, PlacementError, SetupError, UsageError
from muster.base.settings import Settings
from muster.base.shown_text import shell_word, shown_mib
from muster.devices.discovery import discover
from muster.devices.inventory import (
    MOST_CPU_WORKERS,
    DeviceRequest,
    Inventory,
    parse_devices,
    parse_gpu_ids,
)
from muster.devices.packing import tasks_that_fit
from muster.devices.placement import Placement, place
from muster.farm.events import Event, Slots
from muster.farm.executors.cluster import CLUSTERS
from muster.farm.task import SlotSpec
from muster.farm.view import GIVEN_BACK, QUARANTINED, RunView
from muster.run.folder import RunFolder
from muster.run.requests import Ask

if TYPE_CHECKING:
    from muster.devices.leases import Lease


class Lending:
    """The devices of one start of a run. ``leases`` become its own: `close` releases them all."""

    def __init__(
        self,
        folder: RunFolder,
        options: SweepOptions,
        settings: Settings,
        slots: Sequence[SlotSpec],
        leases: Iterable[Lease] = (),
    ) -> None:
        self._folder = folder
        self._options = options
        self._settings = settings
        self._slots = list(slots)  # all that it has had
        self._leases = {lease.uuid: lease for lease in leases}
        self._wanted = list(dict.fromkeys(slot.device_key for slot in slots))
        self._is_gpu = any(slot.devices for slot in slots)
        self._ill: set[str] = set()  # in quarantine, or given back from there

    def close(self) -> None:
        for lease in self._leases.values():
            lease.release()

    def keep(self) -> dict[str, Lease]:
        """The leases of what the run is to have, which are the caller's from now on; others get
        the rest."""
        by_key = self._by_key()
        wanted = {uuid for key in self._wanted for uuid in by_key[key][0].devices}
        kept = {uuid: self._leases.pop(uuid) for uuid in wanted & self._leases.keys()}
        self.close()
        return kept

    def forget_other_choice(self) -> None:
        """Remove what was asked for where the command chooses other devices by now; where it holds,
        write down what these are called here.
        """
        wanted = read_wanted(self._folder)
        if wanted is None:
            return
        if not holds(wanted, self._options):
            self._folder.devices_json.unlink(missing_ok=True)
        elif len(wanted.devices) == len(self._devices) and self._record != wanted:
            self._write("choose another --run-dir")

    def hear(self, asked: Ask, view: RunView | None = None) -> list[Event]:
        """Do what is asked for, and answer; nothing has changed where that is refused."""
        held = set(self._leases)
        before = list(self._wanted)
        ill_now = self._quarantined(view)
        self._ill = self._ill.difference(before) | ill_now
        try:
            wanted = self._choose(asked.what.get("devices") or {}, view)
            if ill_now.issuperset(wanted):
                raise UsageError(
                    f"{self._folder.path} would have nothing but "
                    f"{', '.join(self._labels(wanted))}, which gets no tasks: it is in quarantine.",
                    hint="keep another device, or take one more first: --add 1.",
                )
            self._check_memory(wanted)
            self._wanted = wanted
            # On disk before anything is answered or changes hands: a run that is killed from here
            # on begins again with what it has promised.
            self._write()
        except (MusterError, OSError, ValueError, TypeError, OverflowError) as error:
            # A choice of several devices may fail at the last one: those leased for it go back, and
            # what the run had before is untouched.
            self._wanted = before
            for uuid in self._leases.keys() - held:
                self._leases.pop(uuid).release()
            text, _, hint = str(error).partition("\nHint: ")
            if not isinstance(error, (MusterError, OSError)):
                text = f"A request for devices cannot be read: {text}."
            is_setup = isinstance(error, SetupError)
            asked.answer({"refused": text, "hint": hint, "is_setup": is_setup})
            return []
        labels = self._labels(wanted)
        asked.answer(
            {
                "has": labels,
                "gives_back": self._labels([key for key in before if key not in wanted]),
                "takes": self._labels([key for key in wanted if key not in before]),
            }
        )
        return [
            Slots([s for s in self._slots if s.device_key in wanted], bool(asked.what.get("now")))
        ]

    def look(self, view: RunView) -> list[str]:
        """Let others have the devices that no worker is on any more; returns what `touch` does."""
        told = self.touch(None if view.eta is None else (view.eta.low_s + view.eta.high_s) / 2)
        states = {line.slot: line.state for line in view.workers}
        for key, slots in self._by_key().items():
            # A worker that was told to give a GPU back holds its memory until its process is gone.
            # Only then is the lease released; others would start on a GPU that is half full.
            is_free = all(states.get(slot.label) == GIVEN_BACK for slot in slots)
            if key not in self._wanted and is_free:
                for uuid in slots[0].devices:
                    if (lease := self._leases.pop(uuid, None)) is not None:
                        lease.release()
        return told

    def touch(self, left_s: float | None = None) -> list[str]:
        """Tell those who wait that the devices are in use, and for how long yet if it is known.
        Returns what the user should know of leases that are lost."""
        return [told for lease in self._leases.values() if (told := lease.touch(left_s))]

    @property
    def slots(self) -> list[SlotSpec]:
        return self._slots

    def uuids(self) -> set[str]:
        """The GPUs that it has at this moment, also those that it is giving back. Other threads
        may call it: what it reads is replaced or appended to, and copied in one step.
        """
        by_key = self._by_key()
        return set(self._leases).union(*(by_key[key][0].devices for key in self._wanted))

    # ------------------------------------------------------------------ what is asked for

    def _choose(self, what: Mapping[str, Any], view: RunView | None) -> list[str]:
        if self._options.executor in CLUSTERS:
            raise UsageError(
                f"The workers of {self._folder.path} are on {self._options.executor}, which gives "
                "them their devices.",
                hint=f"end the run, and go on with another number of workers: "
                f"muster resume {shell_word(self._folder.path)} --workers N",
            )
        if "only" in what:
            text = str(what["only"])
            return self._only_gpus(text) if self._is_gpu else self._only_cpus(text)
        word, count = next(((w, what[w]) for w in ("release", "add") if w in what), ("add", 0))
        num_groups, rest = divmod(int(count), self._group)
        if rest or count < 1:
            raise UsageError(
                f"--{word} {count} is not a number of workers of this run: each has "
                f"{_gpus(self._group)}." if rest else f"--{word} {count} asks for nothing.",
                hint=f"write a multiple of {self._group}." if rest else "write 1 or more.",
            )  # fmt: skip
        if word == "release":
            return self._without(num_groups, view)
        return self._with_more(num_groups) if self._is_gpu else self._with_cpus(num_groups)

    def _check_memory(self, wanted: Sequence[str]) -> None:
        """UsageError where the workers of these devices would hold more than the machine has."""
        is_more = not set(wanted) <= set(self._wanted)
        if not is_more or (most := tasks_that_fit(self._options.memory_mib)) is None:
            return
        by_key = self._by_key()
        if (count := sum(len(by_key[key]) for key in wanted)) > most:
            raise UsageError(
                f"{count} workers do not fit: the memory of this machine has room for {most}, at "
                f"{shown_mib(self._options.memory_mib or 0)} for each task (--memory).",
                hint="ask for fewer.",
            )

    @property
    def _group(self) -> int:
        return self._options.gpus_per_task if self._is_gpu else 1

    def _without(self, count: int, view: RunView | None) -> list[str]:
        if count >= len(self._wanted):
            raise UsageError(
                f"{self._folder.path} has {', '.join(self._labels(self._wanted))}, and keeps one "
                "of them at least while it goes on.",
                hint="end it with Ctrl-C or TERM to have all of them; muster resume goes on with "
                "it later.",
            )
        busy = {line.slot for line in view.workers if line.task} if view is not None else set()
        by_key = self._by_key()

        def cost(key: str) -> tuple[bool, bool, int]:  # of no use, then the idle, then the last
            is_busy = any(s.label in busy for s in by_key[key])
            return key not in self._ill, is_busy, -self._wanted.index(key)

        gone = sorted(self._wanted, key=cost)[:count]
        return [key for key in self._wanted if key not in gone]

    def _with_cpus(self, count: int) -> list[str]:
        if len(self._wanted) + count > MOST_CPU_WORKERS:
            raise UsageError(f"--add {count} makes more CPU workers than {MOST_CPU_WORKERS:,}.")
        taken = self._ill.union(self._wanted)
        free = (f"cpu:{i}" for i in itertools.count() if f"cpu:{i}" not in taken)
        new = list(itertools.islice(free, count))
        self._add_cpus(new)
        return [*self._wanted, *new]

    def _only_cpus(self, text: str) -> list[str]:
        begun = parse_devices(self._options.devices).count or 0
        most = max(self._settings.cpu_count, len(self._slots), begun)
        if text.startswith("cpu:") and text[4:].isdecimal() and int(text[4:]) > 0:
            count = int(text[4:])
            if count > MOST_CPU_WORKERS:
                raise UsageError(f"--only {text} asks for more than {MOST_CPU_WORKERS:,} workers.")
            missing = max(0, count - len(self._wanted))
            return self._with_cpus(missing) if missing else self._wanted[:count]
        if not all(part.strip().isdecimal() for part in text.split(",")):
            raise UsageError(
                f"--only {text} does not choose CPU workers, and a run on the CPU has no others.",
                hint="write cpu:4 for four of them, or their numbers, such as 0,3.",
            )
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
        if wrong := [n for n in numbers if n >= most]:
            raise UsageError(
                f"--only {text}: there is no CPU worker {wrong[0]}; they are numbered 0 to "
                f"{most - 1} here.",
                hint="--only cpu:N asks for N workers, also more than there are cores.",
            )
        chosen = [f"cpu:{number}" for number in numbers]
        self._add_cpus(chosen)
        return chosen

    def _add_cpus(self, labels: Iterable[str]) -> None:
        known = {slot.label for slot in self._slots}
        for label in labels:
            if label not in known:
                like = self._slots[0]
                number = len(self._slots)
                self._slots.append(dataclasses.replace(like, slot_id=number, label=label))

    def _with_more(self, count: int) -> list[str]:
        by_key = self._by_key()
        leaving = [
            key for key in by_key
            if key not in self._ill.union(self._wanted)
            and all(uuid in self._leases for uuid in by_key[key][0].devices)
        ][:count]  # fmt: skip
        wanted = [*self._wanted, *leaving]
        missing = (count - len(leaving)) * self._group
        if missing:
            inventory = discover(self._settings)
            not_new = self._ill.union(wanted)
            ours = {uuid for key in not_new for uuid in by_key[key][0].devices} | {*self._leases}
            others = [d.uuid for d in inventory.devices if d.kind == "cuda" and d.uuid not in ours]
            wanted += self._take(others, missing, inventory)
        return wanted

    def _only_gpus(self, text: str) -> list[str]:
        inventory = discover(self._settings)
        request = dataclasses.replace(parse_gpu_ids(text), text=f"--only {text}")
        # Busy or not: what is ours is in use. What is not is asked for below.
        placement = place(
            request, inventory, per_gpu=1, gpus_per_task=self._group,
            cpu_count=self._settings.cpu_count, force=True,
        )  # fmt: skip
        if placement.skipped:
            raise _not_free(f"Not all of --only {text} can be had:", placement)
        by_key, wanted = self._by_key(), []
        ours = {u for key in self._wanted for u in by_key[key][0].devices} | {*self._leases}
        new: list[str] = []
        for slot in placement.slots:
            key = "+".join(slot.device_uuids)
            if key in by_key and all(uuid in ours for uuid in slot.device_uuids):
                wanted.append(key)
            elif any(uuid in ours for uuid in slot.device_uuids):
                raise UsageError(
                    f"--only {text} takes GPUs of one worker apart: each has {_gpus(self._group)}.",
                    hint="name the GPUs of whole workers: "
                    + "; ".join(self._labels([*by_key])),
                )  # fmt: skip
            else:
                new += slot.device_uuids
        return [*wanted, *self._take(new, len(new), inventory)] if new else wanted

    def _take(self, uuids: Sequence[str], count: int, inventory: Inventory) -> list[str]:
        """Lease ``count`` of these GPUs and make slots on them; UsageError where fewer are free."""
        text = "1 more GPU" if count == 1 else f"{count} more GPUs"
        if len(uuids) < count:
            raise UsageError(
                f"Cannot take {text}: this machine shows {_gpus(len(inventory.devices))}, and "
                f"{self._folder.path} has {', '.join(self._labels(self._wanted))}."
            )
        from muster.devices.waiting import lease_in_turn  # here: few runs are lent any

        options = self._options
        try:
            placement, leases = lease_in_turn(
                DeviceRequest(kind="ids", ids=tuple(uuids), count=count, text=text),
                self._settings,
                per_gpu=partial(per_gpu_of, options),
                gpus_per_task=options.gpus_per_task,
                force=options.force,
                run_name=self._folder.whole.name,
            )
        except PlacementError as error:
            lines = str(error).partition("\nHint: ")[0].splitlines()[1:]
            raise UsageError("\n".join([f"Cannot take {text}: none is free.", *lines])) from None
        self._leases |= {lease.uuid: lease for lease in leases}
        found = list(dict.fromkeys("+".join(slot.device_uuids) for slot in placement.slots))
        if len(found) * self._group < count:
            raise _not_free(
                f"Cannot take {text}: only {len(found) * self._group} can be had.", placement
            )
        known = self._by_key()
        for slot in slots_of(placement, options):
            if slot.device_key not in known:
                slot = dataclasses.replace(
                    slot, slot_id=len(self._slots), num_threads=self._slots[0].num_threads
                )
                self._slots.append(slot)
        return found

    # ------------------------------------------------------------------ small answers

    def _by_key(self) -> dict[str, list[SlotSpec]]:
        found: dict[str, list[SlotSpec]] = {}
        for slot in self._slots:
            found.setdefault(slot.device_key, []).append(slot)
        return found

    def _quarantined(self, view: RunView | None) -> set[str]:
        lines = () if view is None else view.workers
        ill = {line.slot for line in lines if line.state == QUARANTINED}
        slots_by_key = self._by_key().items()
        return {key for key, slots in slots_by_key if ill.issuperset(s.label for s in slots)}

    def _labels(self, keys: Iterable[str]) -> list[str]:
        by_key = self._by_key()
        return [by_key[key][0].label.partition("/")[0] for key in keys]

    @property
    def _devices(self) -> tuple[str, ...]:
        by_key = self._by_key()
        uuids = (uuid for key in self._wanted for uuid in by_key[key][0].devices)
        return tuple(uuids if self._is_gpu else self._wanted)

    @property
    def _record(self) -> Wanted:
        return Wanted(
            kind="cuda" if self._is_gpu else "cpu",
            devices=self._devices,
            labels=tuple(self._labels(self._wanted)),
            against=self._options.choice,
        )

    def _write(self, other: str = "leave the run on the devices that it has") -> None:
        """``other``: what helps where the disk is full, beside making room."""
        path = self._folder.devices_json
        try:
            write_json(path, self._record)
        except OSError as error:
            raise explain_os_error(error, "write", path, other=other) from None


def _not_free(what: str, placement: Placement) -> UsageError:
    return UsageError(
        "\n".join([what, *(f"  {item.device}: {item.reason}" for item in placement.skipped)])
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
