"""Whose turn it is on a shared machine: who gets which GPU, by what waits, is held and was used.

Pure. Every process that waits computes the same from the same folder, so nobody has to be asked.
What is decided here is only an order: that no GPU is taken twice is the work of the leases.

The order: the higher level first; then who has used less, by what each user is to have; then who
waits longer. A level is a priority, and grows with the hours of waiting up to the highest that
there is, so a low one waits long and not for ever. What was used counts half as much after a
half-life. A request that needs several GPUs at once is passed by smaller ones behind it for some
minutes; from then on free GPUs are kept for it, if the others that it needs are leased, since
leases end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from muster.base.clock import human_duration
from muster.base.shown_text import count

#: How long a request that needs several GPUs lets smaller ones behind it pass.
PATIENCE_S = 300.0
#: A ticket rises by a level each time that it has waited for this long.
AGEING_S = 3600.0
#: A user is charged at least this much for each GPU, so that several that become free at the same
#: time go to several users.
LEAST_CHARGE_S = 600.0

Why = Literal["turn", "held", "behind", "quota", "reserved", "asleep"]


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A run that waits. It begins with ``least`` of ``devices``, and takes up to ``most`` of them
    in groups of ``group``. ``not_now``: those that it has found to be taken although nobody says
    so. ``is_awake``: it has looked lately; others go past one that is stopped.
    """

    name: str
    uid: int
    since_s: float
    devices: tuple[str, ...]
    least: int = 1
    most: int = 1
    group: int = 1
    priority: int = 0
    not_now: frozenset[str] = frozenset()
    is_awake: bool = True

    @property
    def asks(self) -> str:
        """How many of how many, in words.

        >>> Ticket(name="a", uid=1, since_s=0, devices=("GPU-a", "GPU-b"), least=1, most=2).asks
        'at least 1 of 2 GPUs'
        """
        many = str(self.least)
        if self.least < self.most:
            is_all = self.most == len(self.devices)
            many = f"at least {many}" if is_all else f"{many} to {self.most}"
        return f"{many} of {count(len(self.devices), 'GPU')}"


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A lease: who has which GPU, since when, and until when as far as anybody knows."""

    uid: int
    device: str
    since_s: float
    ends_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Some GPUs (all, where none is named) are for some users only, for some time."""

    uids: frozenset[int]
    devices: frozenset[str] = frozenset()
    from_s: float = -math.inf
    until_s: float = math.inf

    def keeps_off(self, uid: int, device: str, now_s: float) -> bool:
        is_now = self.from_s <= now_s < self.until_s
        return is_now and uid not in self.uids and (not self.devices or device in self.devices)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What one user may: ``share`` is relative to the others'."""

    share: float = 1.0
    max_gpus: int | None = None
    max_priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the administrator of the machine has laid down."""

    half_life_s: float = 7 * 86_400.0
    default: Terms = Terms()
    users: Mapping[int, Terms] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()

    def terms(self, uid: int) -> Terms:
        return self.users.get(uid, self.default)

    @property
    def top(self) -> int:
        """The highest level that a ticket can have."""
        return max(terms.max_priority for terms in (self.default, *self.users.values()))

    def keeps_off(self, uid: int, device: str, now_s: float) -> bool:
        return any(one.keeps_off(uid, device, now_s) for one in self.reservations)


@dataclass(frozen=True, kw_only=True)
class World:
    """What one look at the machine has shown. ``free``: nobody uses or holds them; ``used``: GPU
    seconds of what has ended by user, decayed until now; ``typical_s``: how long a GPU was held.
    """

    now_s: float
    free: frozenset[str]
    tickets: tuple[Ticket, ...] = ()
    holdings: tuple[Holding, ...] = ()
    used: Mapping[int, float] = field(default_factory=dict)
    rules: Rules = Rules()
    typical_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a ticket stands. ``gets``: it may lease these now; ``keeps``: free, and kept for it;
    ``starts_in_s``: from what is known of those ahead; None where that is nothing.
    """

    ticket: Ticket
    position: int
    why: Why
    gets: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    starts_in_s: float | None = None

    @property
    def expected(self) -> str:
        """When it is to begin, in words."""
        if self.starts_in_s is None:
            return "when it begins cannot be estimated"
        if self.starts_in_s < 1:
            return "expected to begin now"
        return f"expected to begin in about {human_duration(self.starts_in_s)}"


def decayed_s(begin_s: float, end_s: float, now_s: float, half_life_s: float) -> float:
    """What a time of use counts for now.

    >>> decayed_s(0.0, 10.0, 10.0, half_life_s=1e9)
    10.0
    >>> decayed_s(0.0, 10.0, 110.0, half_life_s=100.0) / decayed_s(0.0, 10.0, 10.0, 100.0)
    0.5
    """
    begin_s = min(begin_s, end_s)
    span_s = min(end_s, now_s) - min(begin_s, now_s)
    if span_s < half_life_s * 1e-6:  # the difference of two numbers that are almost the same
        return span_s * part_left(end_s, now_s, half_life_s)
    lost = part_left(end_s, now_s, half_life_s) - part_left(begin_s, now_s, half_life_s)
    return half_life_s / math.log(2.0) * lost


def part_left(then_s: float, now_s: float, half_life_s: float) -> float:
    """How much of what was used then still counts."""
    return math.exp2(-max(0.0, now_s - then_s) / half_life_s)


def standings(world: World) -> list[Standing]:
    """Every ticket, in its place, with what it gets now."""
    walk = _Walk(world)
    order = _order(world)
    for ticket in order:
        walk.begin(ticket)
    for ticket in order:
        walk.add_more(ticket)
    starts = _starts(world, order, walk.why)
    return [
        Standing(
            ticket=ticket,
            position=position,
            why=walk.why[ticket.name],
            gets=tuple(walk.gets.get(ticket.name, ())),
            keeps=tuple(walk.keeps.get(ticket.name, ())),
            starts_in_s=starts.get(ticket.name),
        )
        for position, ticket in enumerate(order, start=1)
    ]


def not_for(uid: int, world: World, found: Sequence[Standing], name: str = "") -> dict[str, str]:
    """The free GPUs that this user's run may not have, each with whom it is kept for: a ticket's
    name, or "" where the rules keep it for others. ``name``: the run's own ticket, if it waits.

    A run that does not wait comes after all that do: it gets what none of them gets or keeps.
    """
    kept: dict[str, str] = {}
    own: frozenset[str] | None = None
    for one in found:
        if one.ticket.name == name:
            own = frozenset(one.gets)
        else:
            kept |= dict.fromkeys((*one.gets, *one.keeps), one.ticket.name)
    for device in world.free:
        if world.rules.keeps_off(uid, device, world.now_s):
            kept[device] = ""
    if own is not None:
        kept = {device: whose for device, whose in kept.items() if device not in own}
    return kept


def num_held(uid: int, world: World) -> int:
    return len({one.device for one in world.holdings if one.uid == uid})


# ---------------------------------------------------------------------- the order


def _order(world: World) -> list[Ticket]:
    """Each user's tickets by level and age, and the users by what they have used: whoever is next
    in line is charged for it, so that users take turns."""
    used = {uid: world.used.get(uid, 0.0) for uid in {ticket.uid for ticket in world.tickets}}
    for one in world.holdings:
        if one.uid in used:
            half_life_s = world.rules.half_life_s
            so_far_s = decayed_s(one.since_s, world.now_s, world.now_s, half_life_s)
            used[one.uid] += max(LEAST_CHARGE_S, so_far_s)
    waiting: dict[int, list[tuple[int, float, Ticket]]] = {uid: [] for uid in used}
    for ticket in world.tickets:
        waiting[ticket.uid].append((-_level(ticket, world), ticket.since_s, ticket))
    for line in waiting.values():
        line.sort(key=lambda entry: (entry[0], entry[1], entry[2].name), reverse=True)

    def rank(uid: int) -> tuple[int, float, float, str]:
        level, since_s, ticket = waiting[uid][-1]
        return level, used[uid] / world.rules.terms(uid).share, since_s, ticket.name

    order: list[Ticket] = []
    while waiting:
        uid = min(waiting, key=rank)
        _, _, ticket = waiting[uid].pop()
        used[uid] += LEAST_CHARGE_S * ticket.least
        order.append(ticket)
        if not waiting[uid]:
            del waiting[uid]
    return order


def _level(ticket: Ticket, world: World) -> int:
    rules = world.rules
    own = min(ticket.priority, rules.terms(ticket.uid).max_priority)
    hours = int(max(0.0, world.now_s - ticket.since_s) // AGEING_S)
    return max(own, min(rules.top, own + hours))


# ---------------------------------------------------------------------- who gets what


@dataclass
class _Walk:
    """From the first in line to the last, with what is left."""

    world: World
    left: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)  # what is free, or will be when a lease ends
    has: Counter[int] = field(default_factory=Counter)
    gets: dict[str, list[str]] = field(default_factory=dict)
    keeps: dict[str, list[str]] = field(default_factory=dict)
    why: dict[str, Why] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = set(self.world.free)
        self.due = self.left | {one.device for one in self.world.holdings}
        for uid in {one.uid for one in self.world.holdings}:
            self.has[uid] = num_held(uid, self.world)

    def begin(self, ticket: Ticket) -> None:
        """Give it as many as it needs, or say why not."""
        world, uid = self.world, ticket.uid
        allowed = self._allowed(ticket)
        usable = self._usable(ticket)
        if not ticket.is_awake:
            self.why[ticket.name] = "asleep"
        elif len(allowed) < ticket.least:
            self.why[ticket.name] = "reserved"
        elif self._room(uid) < ticket.least:
            self.why[ticket.name] = "quota"
        elif len(usable) >= ticket.least:
            self.why[ticket.name] = "turn"
            self._give(ticket, usable[: ticket.least])
        else:
            is_behind = any(device in world.free for device in allowed if device not in self.left)
            self.why[ticket.name] = "behind" if is_behind else "held"
            # Beside a GPU that is lost, or used by who knows whom for ever, nothing is kept.
            due = self.due.intersection(allowed) - ticket.not_now
            has_let_pass = world.now_s - ticket.since_s >= PATIENCE_S
            if usable and has_let_pass and len(due) >= ticket.least:
                self.keeps[ticket.name] = usable
                self.left.difference_update(usable)

    def add_more(self, ticket: Ticket) -> None:
        """What is left when everybody has what they need goes to those who can use more."""
        if self.why[ticket.name] != "turn":
            return
        usable = self._usable(ticket)
        room = int(min(ticket.most - ticket.least, self._room(ticket.uid), len(usable)))
        self._give(ticket, usable[: room - room % ticket.group])

    def _allowed(self, ticket: Ticket) -> list[str]:
        rules, now_s = self.world.rules, self.world.now_s
        return [one for one in ticket.devices if not rules.keeps_off(ticket.uid, one, now_s)]

    def _usable(self, ticket: Ticket) -> list[str]:
        return [d for d in self._allowed(ticket) if d in self.left and d not in ticket.not_now]

    def _room(self, uid: int) -> float:
        most = self.world.rules.terms(uid).max_gpus
        return math.inf if most is None else most - self.has[uid]

    def _give(self, ticket: Ticket, devices: list[str]) -> None:
        self.gets.setdefault(ticket.name, []).extend(devices)
        self.left.difference_update(devices)
        self.has[ticket.uid] += len(devices)


def _starts(world: World, order: Sequence[Ticket], why: Mapping[str, Why]) -> dict[str, float]:
    """In how many seconds each begins, if the ends of those ahead are known or can be guessed."""
    ready: dict[str, float | None] = dict.fromkeys(world.free, 0.0)
    for one in world.holdings:
        ready[one.device] = _ends_in_s(one, world)
    found: dict[str, float] = {}
    for ticket in order:
        if why[ticket.name] in ("asleep", "quota", "reserved"):
            continue
        times = sorted((ready[d], d) for d in ticket.devices if ready.get(d) is not None)
        if len(times) < ticket.least:
            continue
        taken = times[: ticket.least]
        start_s = max(at or 0.0 for at, _ in taken)
        found[ticket.name] = start_s
        for _, device in taken:
            ready[device] = None if world.typical_s is None else start_s + world.typical_s
    return found


def _ends_in_s(one: Holding, world: World) -> float | None:
    if one.ends_s is not None:
        return max(0.0, one.ends_s - world.now_s)
    if world.typical_s is None:
        return None
    so_far_s = max(0.0, world.now_s - one.since_s)
    # Without a known end, what has taken longer than usual is expected to take as long again.
    return world.typical_s - so_far_s if so_far_s < world.typical_s else so_far_s
