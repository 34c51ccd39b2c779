"""The order in which runs that wait get GPUs: by table, and by many random machines."""

from __future__ import annotations

import dataclasses
import doctest
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from muster.devices import queue
from muster.devices.queue import (
    AGEING_S,
    PATIENCE_S,
    Holding,
    Reservation,
    Rules,
    Standing,
    Terms,
    Ticket,
    World,
    decayed_s,
    not_for,
    standings,
)

HOUR_S, DAY_S = 3600.0, 86_400.0
GPUS = tuple(f"GPU-{letter}" for letter in "abcdefgh")


def ticket(name: str, uid: int = 1, *, at: float = 0.0, gpus: int = 4, **more: object) -> Ticket:
    return Ticket(name=name, uid=uid, since_s=at, devices=GPUS[:gpus], **more)  # type: ignore[arg-type]


def world(*tickets: Ticket, free: int = 4, now: float = 100.0, **more: object) -> World:
    return World(now_s=now, free=frozenset(GPUS[:free]), tickets=tickets, **more)  # type: ignore[arg-type]


def names(found: list[Standing]) -> list[str]:
    return [one.ticket.name for one in found]


def test_the_examples_hold() -> None:
    assert doctest.testmod(queue).failed == 0


def test_who_has_used_less_comes_first_and_among_equals_who_waits_longer() -> None:
    waiting = (ticket("late", 1, at=50), ticket("early", 2, at=10), ticket("heavy", 3, at=0))
    found = standings(world(*waiting, used={3: 3600.0}))
    assert names(found) == ["early", "late", "heavy"]
    assert [one.position for one in found] == [1, 2, 3]
    assert [len(one.gets) for one in found] == [1, 1, 1]


def test_a_larger_share_makes_the_same_use_count_less() -> None:
    rules = Rules(users={2: Terms(share=4.0)})
    waiting = (ticket("one", 1), ticket("two", 2, at=1))
    assert names(standings(world(*waiting, used={1: 1000, 2: 3000}, rules=rules))) == ["two", "one"]


def test_users_take_turns_however_many_tickets_one_of_them_has() -> None:
    many = [ticket(f"a{i}", 1, at=i) for i in range(3)]
    assert names(standings(world(*many, ticket("b", 2, at=90)))) == ["a0", "b", "a1", "a2"]


def test_a_priority_holds_only_as_far_as_the_rules_allow_it() -> None:
    waiting = (ticket("polite", 1, priority=-1), ticket("pushy", 2, at=1, priority=100))
    assert names(standings(world(*waiting))) == ["pushy", "polite"]
    level = ticket("level", 1)
    assert names(standings(world(level, waiting[1]))) == ["level", "pushy"]
    rules = Rules(users={2: Terms(max_priority=5)})
    assert names(standings(world(level, waiting[1], rules=rules))) == ["pushy", "level"]


def test_hours_of_waiting_raise_a_ticket_up_to_the_highest_level() -> None:
    low, high = ticket("low", 1, priority=-3), ticket("high", 2, at=3 * AGEING_S)
    young = world(low, high, now=3 * AGEING_S - 1, used={2: 10.0})
    assert names(standings(young)) == ["high", "low"]
    old = dataclasses.replace(young, now_s=3 * AGEING_S)
    assert names(standings(old)) == ["low", "high"]


def test_a_large_request_is_passed_for_some_minutes_and_then_collects() -> None:
    large, small = ticket("large", 1, least=4, most=4), ticket("small", 2, at=50, gpus=1)
    held = Holding(uid=3, device="GPU-d", since_s=0.0)
    now = world(large, small, free=3, holdings=(held,))
    assert [(one.why, one.gets) for one in standings(now)] == [("held", ()), ("turn", ("GPU-a",))]
    later = dataclasses.replace(now, now_s=PATIENCE_S)
    first, second = standings(later)
    assert (first.keeps, first.gets) == (GPUS[:3], ())
    assert (second.why, second.gets) == ("behind", ())
    assert not_for(9, later, [first, second]) == dict.fromkeys(GPUS[:3], "large")


def test_nothing_is_kept_beside_a_gpu_that_no_lease_has() -> None:
    """It is lost, or another program uses it, maybe for ever: the others would lie idle."""
    large, small = ticket("large", 1, least=4, most=4), ticket("small", 2, at=50, gpus=1)
    first, second = standings(world(large, small, free=3, now=PATIENCE_S))
    assert (first.why, first.keeps) == ("held", ())
    assert (second.why, second.gets) == ("turn", ("GPU-a",))


def test_a_stopped_process_keeps_nothing_from_others() -> None:
    stopped = ticket("stopped", 1, least=4, most=4, is_awake=False)
    found = standings(world(stopped, ticket("small", 2, at=1), free=4, now=PATIENCE_S))
    assert [(one.why, len(one.gets)) for one in found] == [("asleep", 0), ("turn", 1)]


def test_who_can_use_more_gets_it_when_everybody_has_what_he_needs() -> None:
    greedy = ticket("greedy", 1, most=4)
    found = standings(world(greedy, ticket("other", 2, at=1)))
    assert [len(one.gets) for one in found] == [3, 1]
    pairs = ticket("pairs", 1, least=2, most=4, group=2)
    assert [len(one.gets) for one in standings(world(pairs, free=3))] == [2]


def test_a_quota_counts_what_the_user_holds() -> None:
    rules = Rules(default=Terms(max_gpus=2))
    held = Holding(uid=1, device="GPU-h", since_s=0.0)
    wide = ticket("wide", 1, least=2, most=2)
    found = standings(world(wide, ticket("other", 2), rules=rules, holdings=(held,)))
    assert {one.ticket.name: one.why for one in found} == {"wide": "quota", "other": "turn"}
    assert len(standings(world(ticket("all", 3, most=4), rules=rules))[0].gets) == 2


def test_a_reservation_keeps_others_off_for_its_time() -> None:
    mine = Reservation(uids=frozenset({1}), devices=frozenset(GPUS[:3]), until_s=500.0)
    rules = Rules(reservations=(mine,))
    now = world(ticket("own", 1, least=3, most=3), ticket("other", 2, least=2), rules=rules)
    found = {one.ticket.name: one for one in standings(now)}
    assert found["own"].gets == GPUS[:3]
    assert (found["other"].why, found["other"].gets) == ("reserved", ())
    assert not_for(2, now, list(found.values()), "other").keys() == set(GPUS[:3])
    later = dataclasses.replace(now, now_s=500.0, tickets=now.tickets[1:])
    assert standings(later)[0].why == "turn"


def test_an_expected_start_is_said_where_the_ends_of_those_ahead_are_known() -> None:
    ends = (("GPU-a", 160.0), ("GPU-b", 130.0))
    held = tuple(Holding(uid=9, device=d, since_s=0.0, ends_s=e) for d, e in ends)
    waiting = (ticket("one", 1, gpus=2), ticket("two", 2, at=1, gpus=2), ticket("three", 3, at=2))
    found = standings(world(*waiting, free=0, holdings=held))
    assert [one.starts_in_s for one in found] == [30.0, 60.0, None]
    guessed = standings(world(*waiting, free=0, holdings=held, typical_s=600.0))
    assert guessed[2].starts_in_s == 630.0


# ---------------------------------------------------------------------- random machines


@dataclass
class Machine:
    """A machine whose users wait, run and leave, in simulated time."""

    num_gpus: int
    rules: Rules
    now_s: float = 0.0
    waiting: list[Ticket] = field(default_factory=list)
    running: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # uid, begin, end
    used: dict[int, float] = field(default_factory=dict)
    used_at_s: float = 0.0
    begun: dict[str, float] = field(default_factory=dict)
    served: Counter[int] = field(default_factory=Counter)

    def look(self) -> World:
        self.age()
        return World(
            now_s=self.now_s,
            free=frozenset(GPUS[: self.num_gpus]) - self.running.keys(),
            tickets=tuple(self.waiting),
            holdings=tuple(
                Holding(uid=uid, device=device, since_s=begin_s)
                for device, (uid, begin_s, _) in self.running.items()
            ),
            used=dict(self.used),
            rules=self.rules,
        )

    def age(self) -> None:
        left = math.exp2((self.used_at_s - self.now_s) / self.rules.half_life_s)
        self.used = {uid: used_s * left for uid, used_s in self.used.items()}
        self.used_at_s = self.now_s

    def step(self, lasts_s: dict[str, float]) -> list[Standing]:
        """End what is over, and begin what has its turn."""
        self.age()
        for device, (uid, begin_s, end_s) in list(self.running.items()):
            if end_s <= self.now_s:
                del self.running[device]
                half_life_s = self.rules.half_life_s
                counted_s = decayed_s(begin_s, end_s, self.now_s, half_life_s)
                self.used[uid] = self.used.get(uid, 0.0) + counted_s
                self.served[uid] += end_s - begin_s  # type: ignore[assignment]
        now = self.look()
        found = standings(now)
        check(now, found)
        for one in found:
            for device in one.gets:
                assert device not in self.running, "leased twice"
                end_s = self.now_s + lasts_s[one.ticket.name]
                self.running[device] = (one.ticket.uid, self.now_s, end_s)
            if one.gets:
                self.waiting.remove(one.ticket)
                self.begun[one.ticket.name] = self.now_s
        return found


def check(now: World, found: list[Standing]) -> None:
    """What holds in every world."""
    assert sorted(one.ticket.name for one in found) == sorted(one.name for one in now.tickets)
    given = [device for one in found for device in (*one.gets, *one.keeps)]
    assert len(given) == len(set(given)), "one GPU for two"
    assert now.free.issuperset(given)
    has = Counter(holding.uid for holding in now.holdings)
    ahead: set[str] = set()
    for one in found:
        asked, uid = one.ticket, one.ticket.uid
        terms = now.rules.terms(uid)
        room = math.inf if terms.max_gpus is None else terms.max_gpus - has[uid]
        usable = [
            device for device in asked.devices
            if device in now.free and not now.rules.keeps_off(uid, device, now.now_s)
        ]  # fmt: skip
        assert set(one.gets) <= set(usable)
        if one.gets:
            assert asked.least <= len(one.gets) <= asked.most
            assert len(one.gets) % asked.group == 0
            assert len(one.gets) <= room
        elif asked.is_awake and room >= asked.least:
            # Nothing lies idle that the first who can use it may have.
            others = {device for other in found if other is not one for device in other.gets}
            idle = [device for device in usable if device not in ahead | others]
            assert len(idle) < asked.least, "idle GPUs, and a run waits"
        has[uid] += len(one.gets)
        ahead.update(one.keeps)


def random_machine(seed: int) -> None:
    """Some users with random runs; all of them begin in the end, and in every look all holds."""
    draw = random.Random(seed)
    num_gpus, uids = draw.randint(1, 8), range(1, draw.randint(2, 6))
    rules = Rules(
        half_life_s=draw.choice([HOUR_S, DAY_S]),
        users={
            uid: Terms(
                share=draw.choice([0.5, 1.0, 3.0]),
                max_gpus=draw.choice([None, None, draw.randint(1, num_gpus)]),
                max_priority=draw.choice([0, 0, 3]),
            )
            for uid in uids
        },
        reservations=tuple(
            Reservation(
                uids=frozenset({draw.choice(uids)}),
                devices=frozenset(draw.sample(GPUS[:num_gpus], draw.randint(1, num_gpus))),
                from_s=draw.uniform(0, HOUR_S),
                until_s=draw.uniform(HOUR_S, 2 * HOUR_S),
            )
            for _ in range(draw.choice([0, 0, 1]))
        ),
    )
    machine, lasts_s, arrivals = Machine(num_gpus, rules), {}, []
    for number in range(draw.randint(1, 14)):
        uid = draw.choice(uids)
        most_gpus = min(num_gpus, rules.terms(uid).max_gpus or num_gpus)
        group = draw.choice([1, 1, 2]) if most_gpus > 1 else 1
        least = group * draw.randint(1, most_gpus // group)
        among = draw.sample(GPUS[:num_gpus], draw.randint(least, num_gpus))
        one = Ticket(
            name=f"t{number}", uid=uid, since_s=draw.uniform(0, 2 * HOUR_S), devices=tuple(among),
            least=least, most=draw.choice([least, num_gpus]), group=group,
            priority=draw.randint(-5, 5),
        )  # fmt: skip
        lasts_s[one.name] = draw.expovariate(1 / 1800)
        arrivals.append(one)
    arrivals.sort(key=lambda one: one.since_s)
    total = len(arrivals)
    while arrivals or machine.waiting:
        ends = [end_s for _, _, end_s in machine.running.values()]
        nexts = [*ends, *(one.since_s for one in arrivals[:1])]
        soon = machine.now_s + PATIENCE_S
        machine.now_s = min([one for one in nexts if one > machine.now_s] + [soon])
        assert machine.now_s < 30 * DAY_S, "somebody waits for ever"
        while arrivals and arrivals[0].since_s <= machine.now_s:
            machine.waiting.append(arrivals.pop(0))
        machine.step(lasts_s)
    assert len(machine.begun) == total


@pytest.mark.parametrize("first", [0, 100])
def test_in_random_machines_nothing_is_given_twice_and_everybody_begins(first: int) -> None:
    for seed in range(first, first + 100):
        random_machine(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_in_ten_thousand_random_machines_too(first: int) -> None:
    for seed in range(first, first + 1000):
        random_machine(seed)


def saturated(shares: dict[int, float], days: float, seed: int = 0) -> dict[int, float]:
    """What each user gets of a machine for which all of them always wait; as a part of it all."""
    draw = random.Random(seed)
    rules = Rules(users={uid: Terms(share=share) for uid, share in shares.items()})
    machine, lasts_s, number = Machine(8, rules), {}, 0
    while machine.now_s < days * DAY_S:
        for uid in shares:
            while sum(one.uid == uid for one in machine.waiting) < 2:
                number += 1
                width = draw.choice([1, 1, 1, 2, 4])
                machine.waiting.append(
                    ticket(f"t{number:06}", uid, at=machine.now_s, gpus=8, least=width, most=width)
                )
                # Who asks for longer runs gets no more of the machine by it.
                lasts_s[f"t{number:06}"] = draw.uniform(0.5, 1.5) * HOUR_S * (1 + uid % 3)
        machine.step(lasts_s)
        machine.now_s = min(end_s for _, _, end_s in machine.running.values())
    total = sum(machine.served.values())
    assert total > 0.8 * 8 * days * DAY_S, "the machine stands idle"
    return {uid: machine.served[uid] / total for uid in shares}


@pytest.mark.parametrize(
    "days", [40, pytest.param(400, marks=pytest.mark.slow)]
)  # fmt: skip
@pytest.mark.parametrize("shares", [{1: 1.0, 2: 1.0, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 2.0, 4: 4.0}])
def test_over_a_long_time_each_user_gets_the_share_that_he_is_to_have(
    shares: dict[int, float], days: float
) -> None:
    got = saturated(shares, days)
    for uid, share in shares.items():
        target = share / sum(shares.values())
        assert abs(got[uid] - target) < 0.05 * target, got


def test_a_large_request_begins_however_many_small_ones_keep_coming() -> None:
    """The others have used nothing so far, and there is always one of theirs in line."""
    draw = random.Random(1)
    machine, lasts_s = Machine(8, Rules()), {"large": HOUR_S}
    machine.used[1] = DAY_S
    machine.waiting.append(ticket("large", 1, gpus=8, least=8, most=8))
    number = 0
    while "large" not in machine.begun:
        for uid in range(2, 6):
            if not any(one.uid == uid for one in machine.waiting):
                number += 1
                machine.waiting.append(ticket(f"s{number}", uid, at=machine.now_s, gpus=8))
                lasts_s[f"s{number}"] = draw.uniform(0.1, 1.0) * HOUR_S
        machine.step(lasts_s)
        machine.now_s += 60.0
        # 24 GPU hours of one against four others on 8 GPUs: even when nothing decays, 12 hours.
        assert machine.now_s < 14 * HOUR_S, "passed for ever"
