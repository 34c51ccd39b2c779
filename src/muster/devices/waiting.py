"""Taking GPUs in turn: those that are not kept for waiting runs, or in the queue by waiting."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from muster.base.clock import human_duration
from muster.base.errors import PlacementError, SetupError
from muster.base.processes import lineage
from muster.base.settings import Settings
from muster.base.shown_text import count
from muster.base.signals import Interrupted, listening
from muster.devices.discovery import discover
from muster.devices.inventory import Device, DeviceRequest, Inventory
from muster.devices.leases import Lease, make_shared_folder, place_and_lease
from muster.devices.placement import Placement, busy_reason, place
from muster.devices.queue import Rules, Standing, World, not_for, num_held, standings
from muster.devices.queue_rules import read_rules
from muster.devices.tickets import (
    Found,
    Note,
    add_up,
    as_holding,
    as_ticket,
    own_uid,
    read_notes,
    use_of,
    user_name,
)

#: How often a waiting run looks. It looks less often when it is far behind, when many wait, and
#: when a look takes long (a slow driver, a folder that somebody has filled).
_LOOK_EVERY_S, _LOOK_AT_LEAST_EVERY_S, _LOOK_SHARE = 0.4, 15.0, 0.05
#: A GPU that could not be leased is tried again after this.
_TRY_AGAIN_S = 10.0
_SAY_NEWS_EVERY_S, _SAY_EVERY_S = 5.0, 600.0
#: Each is called once, with the place in the queue and what ``Wait`` says, when a run of this
#: process begins to wait.
on_wait: list[Callable[[str, Wait], None]] = []


@dataclass(frozen=True, kw_only=True)
class Wait:
    """How long a run waits for its GPUs at most (0: not at all), and who is told how it stands.
    ``folder``: that of the run, by which others name it."""

    most_s: float = 0.0
    priority: int = 0
    say: Callable[[str], None] = lambda line: None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The queue as one look has shown it."""

    world: World
    standings: tuple[Standing, ...]
    notes: Mapping[str, Found]
    holders: Mapping[str, Found]

    def of(self, name: str) -> Standing | None:
        return next((one for one in self.standings if one.ticket.name == name), None)


def look(inventory: Inventory, settings: Settings, rules: Rules) -> Line:
    """Who waits for what in which order, and who has it."""
    now_s = time.time()
    notes = {note.path.name: note for note in read_notes(settings.lease_folder)}
    tickets, holders, used, num_leases = [], {}, dict[int, float](), 0.0
    for note in notes.values():
        if note.kind == "ticket":
            if (ticket := as_ticket(note, now_s)) is not None:
                tickets.append(ticket)
        elif note.kind == "claim" and note.is_alive:
            holders[str(note.record.get("device"))] = note
        else:
            use = use_of(note, now_s, rules.half_life_s)
            used[note.uid] = used.get(note.uid, 0.0) + use.gpu_s
            num_leases += use.leases
    own_pids = lineage()
    free = [
        device for device in inventory.devices
        if _works(device) and device.uuid not in holders
        and busy_reason(device, own_pids=own_pids) is None
    ]  # fmt: skip
    # A GPU that only this process uses is free for it alone; the others see it in use.
    ours = frozenset(device.uuid for device in free if busy_reason(device) is not None)
    for at, ticket in enumerate(tickets):
        note = notes[ticket.name]
        if ours and not (note.uid == own_uid() and note.pid in own_pids):
            tickets[at] = dataclasses.replace(ticket, not_now=ticket.not_now | ours)
    world = World(
        now_s=now_s,
        free=frozenset(device.uuid for device in free),
        tickets=tuple(tickets),
        holdings=tuple(as_holding(note, now_s) for note in holders.values()),
        used=used,
        rules=rules,
        typical_s=sum(used.values()) / num_leases if num_leases > 0.01 else None,
    )
    return Line(world=world, standings=tuple(standings(world)), notes=notes, holders=holders)


def _works(device: Device) -> bool:
    is_usable = device.lost is None and device.compute_mode != "prohibited"
    return device.kind == "cuda" and is_usable


def lease_in_turn(
    request: DeviceRequest,
    settings: Settings,
    *,
    per_gpu: Callable[[Inventory], int] = lambda inventory: 1,
    gpus_per_task: int = 1,
    force: bool = False,
    run_name: str,
    place: str = "",
    kept: Mapping[str, Lease] = MappingProxyType({}),
    wait: Wait | None = None,
) -> tuple[Placement, list[Lease]]:
    """Place and lease as ``place_and_lease`` does, in the order of the queue.

    A run that does not wait gets what is free and not kept for one that does; one that waits
    returns when it has its GPUs. ``place``: `id_of` the run's folder, by which others see which run
    it is that waits. ``kept``: leases that the caller has. ``force`` asks nobody, and
    neither does a task, which has the GPUs of its sweep. Raises what ``place_and_lease`` raises,
    PlacementError too when the time is over or the rules never allow it, SetupError for rules or
    a folder that cannot be used, and Interrupted when it is asked to end meanwhile.
    """
    inventory = discover(settings)
    asked = _Asked(request, settings, per_gpu, gpus_per_task, force, run_name, kept, place)
    has_gpus = any(map(_works, inventory.devices))
    if request.kind == "cpu" or not has_gpus or force or settings.is_task:
        return asked.lease(inventory, {}, None)
    rules = read_rules(settings)
    if wait is not None and wait.most_s > 0 and not kept:
        return _Waiting(asked, wait, rules).run(inventory)
    line = look(inventory, settings, rules)
    return asked.lease(inventory, *_left_for(line, rules))


def not_free(inventory: Inventory, settings: Settings) -> dict[str, str]:
    """The GPUs that a run could not have at once, by its reason; it takes no lock."""
    rules = read_rules(settings)
    line = look(inventory, settings, rules)
    return {**_leased(line), **_left_for(line, rules)[0]}


def _leased(line: Line) -> dict[str, str]:
    return {device: f"leased by {note.whose}" for device, note in line.holders.items()}


def _left_for(line: Line, rules: Rules, name: str = "") -> tuple[dict[str, str], int | None]:
    """What this user's run may not have, with the reasons, and how many more it may have."""
    uid = own_uid()
    whose = not_for(uid, line.world, line.standings, name)
    most = rules.terms(uid).max_gpus
    return (
        {device: _kept_for(line, ticket) for device, ticket in whose.items()},
        None if most is None else max(0, most - num_held(uid, line.world)),
    )


def _kept_for(line: Line, ticket: str) -> str:
    if not ticket:
        return "reserved for other users by the rules of this machine"
    return f"kept for {line.notes[ticket].whose}, which waits"


@dataclass(frozen=True)
class _Asked:
    """What a run asks for."""

    request: DeviceRequest
    settings: Settings
    per_gpu: Callable[[Inventory], int]
    gpus_per_task: int
    force: bool
    run_name: str
    kept: Mapping[str, Lease]
    place: str

    def lease(
        self, inventory: Inventory, not_these: Mapping[str, str], most: int | None,
        refused: set[str] | None = None,
    ) -> tuple[Placement, list[Lease]]:  # fmt: skip
        return place_and_lease(
            self.request, inventory, per_gpu=self.per_gpu(inventory),
            gpus_per_task=self.gpus_per_task, force=self.force, run_name=self.run_name,
            settings=self.settings, kept=self.kept, not_these=not_these, most=most,
            refused=refused,
        )  # fmt: skip

    def ticket(self, inventory: Inventory) -> tuple[tuple[str, ...], int, int]:
        """Which GPUs would do, with how many it begins, and how many it can use at most."""
        # As if nobody used any of them: what can never be is refused at once.
        there = place(
            self.request, inventory, per_gpu=self.per_gpu(inventory),
            gpus_per_task=self.gpus_per_task, cpu_count=self.settings.cpu_count, force=True,
        )  # fmt: skip
        named = dict.fromkeys(uuid for slot in there.slots for uuid in slot.device_uuids)
        usable = [device for device in inventory.devices if _works(device)]
        if self.request.is_exact or self.gpus_per_task > 1:
            usable = [device for device in usable if device.parent_uuid is None] or usable
        devices = tuple(named)
        if self.request.kind != "ids":
            devices = tuple(device.uuid for device in usable)
        most = len(named)
        is_fixed = self.request.is_exact and self.request.kind != "auto"
        least = most if is_fixed else self.gpus_per_task
        if len(devices) < least:
            raise PlacementError(
                f"Cannot wait for {count(least, 'GPU')} ({self.request.text}): programs can use "
                f"only {len(devices)} here.", hint="`muster doctor` says what is wrong."
            )  # fmt: skip
        return devices, least, most


class _Waiting:
    """One run in the queue, from its ticket to its leases."""

    def __init__(self, asked: _Asked, wait: Wait, rules: Rules) -> None:
        self._asked = asked
        self._wait = wait
        self._rules = rules
        self._refused: dict[str, float] = {}  # the time of each GPU that could not be leased
        self._said, self._said_s = "", 0.0

    def run(self, inventory: Inventory) -> tuple[Placement, list[Lease]]:
        record: dict[str, object] = {
            "pid": os.getpid(),
            "run": self._asked.run_name,
            "place": self._asked.place,
            "since_s": time.time(),
            "priority": self._wait.priority,
            "not_now": [],
            **self._wants(inventory),
        }
        folder = self._asked.settings.lease_folder
        try:
            make_shared_folder(folder)
            add_up(folder, self._rules.half_life_s)  # this clears away what was killed
            ticket = Note(folder, "ticket", record)
        except OSError as error:
            raise SetupError(
                f"Cannot queue in {folder}: {error.strerror or error}.",
                hint="make the folder writable for everybody (chmod 1777), make room on its disk, "
                "or start without --wait.",
            ) from None
        try:
            # The first request to end leaves the queue, also one from before.
            with listening(may_wait=False) as requests:
                if requests.heard:
                    raise Interrupted(requests.heard[0])
                return self._until_leased(ticket, record, inventory)
        finally:
            ticket.remove()

    def _until_leased(
        self, ticket: Note, record: dict[str, object], inventory: Inventory
    ) -> tuple[Placement, list[Lease]]:
        asked_s = begun_s = time.monotonic()
        cost_s, seen, has_changed = 0.0, None, False
        while True:
            now_s = time.monotonic()
            if has_changed or now_s - asked_s > max(_LOOK_EVERY_S, cost_s / _LOOK_SHARE):
                asked_s, inventory = now_s, discover(self._asked.settings)
                with suppress(SetupError):  # they are being edited: what was read still holds
                    self._rules = read_rules(self._asked.settings)
                if inventory.devices:  # a driver that fails for a moment ends nobody's wait
                    record |= self._wants(inventory)
                cost_s = time.monotonic() - asked_s
            began_s = time.thread_time()
            line = look(inventory, self._asked.settings, self._rules)
            took_s = time.thread_time() - began_s
            mine = line.of(ticket.path.name)
            # Only of these GPUs: anybody may claim what is not there, as often as they like.
            holders = frozenset(
                line.holders[device.uuid].path.name
                for device in inventory.devices if device.uuid in line.holders
            )  # fmt: skip
            has_just_asked = has_changed
            has_changed, seen = seen is not None and holders != seen, holders
            # Only the driver knows whether what was given back is free, so it is asked again. Not
            # twice in a row: where somebody takes and gives back all the time, this loop would
            # never come to the lease, nor to the end of the wait.
            if has_changed and not has_just_asked:
                continue
            if mine is not None and mine.gets:
                found = self._try(line, mine, inventory)
                if found is not None:
                    return found
            if (waited_s := now_s - begun_s) >= self._wait.most_s:
                raise self._too_long(line, mine, waited_s)
            if mine is not None:
                self._tell(line, mine, now_s)
            self._refresh(ticket, record, now_s)
            position = 1 if mine is None else mine.position
            rare_s = max(position / 20, len(line.standings) / 40, took_s / _LOOK_SHARE)
            pause_s = min(_LOOK_AT_LEAST_EVERY_S, max(_LOOK_EVERY_S, rare_s))
            time.sleep(min(pause_s, self._wait.most_s - waited_s))

    def _try(
        self, line: Line, mine: Standing, inventory: Inventory
    ) -> tuple[Placement, list[Lease]] | None:
        """Lease what it gets; None where another run was faster, or holds it without a note."""
        name = mine.ticket.name
        kept, _ = _left_for(line, self._rules, name)
        others = {
            device.uuid: "not in its turn" for device in inventory.devices
            if device.uuid in line.world.free and device.uuid not in mine.gets
        }  # fmt: skip
        refused: set[str] = set()
        try:
            placement, leases = self._asked.lease(
                inventory, {**others, **kept, **_leased(line)}, None, refused
            )
        except PlacementError:
            placement, leases = None, []
        if leases and placement is not None:
            return placement, leases
        self._refused |= dict.fromkeys(refused or mine.gets, time.monotonic())
        return None

    def _refresh(self, ticket: Note, record: dict[str, object], now_s: float) -> None:
        self._refused = {
            device: at for device, at in self._refused.items() if now_s - at < _TRY_AGAIN_S
        }
        record["not_now"] = sorted(self._refused)
        # Something may clear old files away, and a run without a ticket would wait for ever.
        if record != ticket.record or not ticket.path.exists():
            with suppress(OSError, SetupError):  # a full disk: the old text still holds
                make_shared_folder(ticket.path.parent)
                ticket.put(record)
        ticket.touch()

    def _wants(self, inventory: Inventory) -> dict[str, object]:
        """What the ticket asks for. Raises PlacementError for what can never be."""
        devices, least, most = self._asked.ticket(inventory)
        terms = self._rules.terms(own_uid())
        if terms.max_gpus is not None and terms.max_gpus < least:
            raise PlacementError(
                f"Cannot wait for {count(least, 'GPU')} ({self._asked.request.text}): the rules of "
                f"this machine allow {user_name(own_uid())} {terms.max_gpus} at the same time.",
                hint=f"ask for fewer; {self._asked.settings.queue_rules} is the administrator's.",
            )
        group = self._asked.gpus_per_task
        return {"devices": list(devices), "least": least, "most": most, "group": group}

    def _tell(self, line: Line, mine: Standing, now_s: float) -> None:
        place_of = f"{mine.position} of {len(line.standings)}"
        text = f"{place_of} in the queue for {mine.ticket.asks}: {reason(line, mine)}"
        if text == self._said and now_s - self._said_s < _SAY_EVERY_S:
            return
        if self._said and now_s - self._said_s < _SAY_NEWS_EVERY_S:
            return
        self._said, self._said_s = text, now_s
        self._wait.say(f"waiting: {text}; {mine.expected}")
        while on_wait:
            on_wait.pop()(text, self._wait)

    def _too_long(self, line: Line, mine: Standing | None, waited_s: float) -> PlacementError:
        why = "" if mine is None else f": {reason(line, mine)}"
        what = "its GPUs" if mine is None else mine.ticket.asks
        return PlacementError(
            f"Waited {human_duration(waited_s)} for {what}{why}.",
            hint="nothing was started. Wait longer (--wait alone has no limit), or ask for fewer.",
        )


def reason(line: Line, one: Standing) -> str:
    """Why a ticket has not begun."""
    ticket = one.ticket
    if one.why == "turn":
        return "it is its turn"
    if one.why == "asleep":
        return "its process is stopped; others go past it"
    if one.why == "reserved":
        return "too many of them are reserved for other users"
    if one.why == "quota":
        most = line.world.rules.terms(ticket.uid).max_gpus
        held = num_held(ticket.uid, line.world)
        return f"{user_name(ticket.uid)} holds {count(held, 'GPU')} and may hold {most}"
    if one.why == "behind":
        ahead = [
            other.ticket.name for other in line.standings
            if {*other.keeps, *other.gets}.intersection(ticket.devices) and other is not one
        ]  # fmt: skip
        if ahead:
            return f"what is free is kept for {line.notes[ahead[0]].whose}"
    holders = [line.holders[device] for device in ticket.devices if device in line.holders]
    runs = dict.fromkeys(note.whose for note in holders)
    free = sum(device in line.world.free for device in ticket.devices)
    there = f"{free} {'is' if free == 1 else 'are'} free" if free else "none is free"
    if not runs:
        return f"{there}; programs without a lease use the others"
    more = f" and {count(len(runs) - 2, 'other run')}" if len(runs) > 2 else ""
    have = "has" if len(runs) == 1 else "have"
    return f"{there}; {', '.join([*runs][:2])}{more} {have} {len(holders)}"
