"""The order of the last tasks: over sooner with what similar tasks took, and never later."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from muster.farm.backlog import Lengths, longest_first, makespan
from muster.farm.canonical import encode
from muster.farm.decide import Scheduler
from muster.farm.decisions import Policy
from muster.farm.events import Fetched, WorkerReady
from muster.farm.task import SlotSpec, TargetSpec, Task

SECONDS = st.floats(0.1, 1000.0)


def task(number: int, priority: int = 0, **params: object) -> Task:
    return Task(number, b"", 1, encode(params), 0, 1, priority=priority)


@given(st.lists(st.tuples(SECONDS, st.integers(-1, 1)), max_size=30), st.integers(1, 8))
def test_no_order_of_known_tasks_ends_later(world: list[tuple[float, int]], workers: int) -> None:
    tasks = [task(number, priority) for number, (_, priority) in enumerate(world)]
    found = longest_first(tasks, lambda one: world[one.task_id][0], workers)
    assert sorted(found) == sorted(tasks), "each is there once"
    assert [one.priority for one in found] == sorted((p for _, p in world), reverse=True)
    by_priority = sorted(tasks, key=lambda one: -one.priority)
    before, after = (
        makespan([world[one.task_id][0] for one in order], workers)
        for order in (by_priority, found)
    )
    assert after <= before


@given(
    st.lists(SECONDS, min_size=1, max_size=5),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_no_order_of_learnt_tasks_ends_later(
    widths: list[float], depths: list[float], workers: int
) -> None:
    """Every setting has had two seeds; the third is learnt from them."""
    settings = list(itertools.product(range(len(widths)), range(len(depths))))
    took = [max(0.1, widths[w] * depths[d]) for w, d in settings]
    is_product = all(widths[w] * depths[d] >= 0.1 for w, d in settings)
    lengths = Lengths()
    for seed in range(2):
        for (width, depth), seconds in zip(settings, took, strict=True):
            lengths.learn(1, encode({"width": width, "depth": depth, "seed": seed}), seconds)
    tasks = [
        task(number, width=width, depth=depth, seed=2)
        for number, (width, depth) in enumerate(settings)
    ]
    for one, seconds in zip(tasks, took, strict=True):
        expected = lengths.expected_s(one)
        assert expected is not None
        assert not is_product or abs(expected - seconds) < 1e-6 * seconds
    found = longest_first(tasks, lengths.expected_s, workers)
    after = makespan([took[one.task_id] for one in found], workers)
    assert not is_product or after <= makespan(took, workers) * (1 + 1e-6)


def test_what_is_not_known_keeps_its_order() -> None:
    tasks = [task(number, x=number) for number in range(9)]
    assert longest_first(tasks, Lengths().expected_s, 2) == tasks


def test_a_setting_that_has_not_run_is_known_by_its_values() -> None:
    lengths = Lengths()
    for width, depth, seconds in ((1, 1, 1.0), (2, 1, 4.0), (1, 2, 3.0)):
        lengths.learn(1, encode({"width": width, "depth": depth}), seconds)
    unseen, known = (lengths.expected_s(task(0, width=2, depth=d)) for d in (2, 1))
    assert unseen is not None and known is not None and known < unseen <= 4.0 + 1e-9
    assert lengths.expected_s(task(0, width="y" * 999, depth=[1])) is not None


def _fetched(params: list[dict[str, object]], target: TargetSpec, **kept: bool) -> list[int]:
    """The queue of a scheduler that has learnt that 9 is long, after the last fetch."""
    slots = [SlotSpec(slot_id=n, label=f"cpu{n}", devices=()) for n in range(2)]
    scheduler = Scheduler(Policy(), slots, {1: target})
    learnt = [(1, encode({"x": x, "seed": 0}), float(x)) for x in (1, 9)]
    scheduler.pace.remember(learnt)
    tasks = [task(number, **one) for number, one in enumerate(params)]
    scheduler.step([Fetched(tasks, **kept)], 0.0)
    return [one.task_id for one in scheduler.backlog.queue]


def test_only_the_last_tasks_and_only_single_ones_change_places() -> None:
    plain = TargetSpec(name="f", location="f.py", attribute="f")
    batched = TargetSpec(name="f", location="f.py", attribute="f", max_batch=8)
    chunks = TargetSpec(name="f", location="f.py", attribute="f", is_divisible=True)
    params: list[dict[str, object]] = [{"x": x, "seed": 1} for x in (1, 1, 1, 1, 9)]
    assert _fetched(params, plain, exhausted=True) == [4, 0, 1, 2, 3]
    assert _fetched(params, plain, exhausted=False) == [0, 1, 2, 3, 4]
    assert _fetched(params, batched, exhausted=True) == [0, 1, 2, 3, 4]
    assert _fetched(params, chunks, exhausted=True) == [0, 1, 2, 3, 4]


def test_seeds_of_which_each_is_seen_once_leave_room_for_what_tells() -> None:
    lengths = Lengths()
    for seed in range(12_000):
        lengths.learn(1, encode({"seed": seed}), 1.0)
    for seed, (width, seconds) in enumerate(((1, 1.0), (9, 9.0)) * 500):
        lengths.learn(1, encode({"width": width, "seed": 50_000 + seed}), seconds)
    short, long = (lengths.expected_s(task(0, width=w, seed=-1)) for w in (1, 9))
    assert short is not None and long is not None and short < 2 < 8 < long


def test_the_two_longest_go_to_two_workers() -> None:
    """Although tasks of this length are kept ready in a worker, to hide the commit."""
    slots = [SlotSpec(slot_id=n, label=f"cpu{n}", devices=()) for n in range(2)]
    target = TargetSpec(name="f", location="f.py", attribute="f")
    scheduler = Scheduler(Policy(), slots, {1: target})
    for x in (1, 9):
        scheduler.pace.learn([(task(0, x=x), x / 10)])
    assert scheduler.pace.lead(1) == 2
    tasks = [task(number, x=x) for number, x in enumerate((1, 1, 1, 1, 9, 9, 9))]
    out = scheduler.step([Fetched(tasks, exhausted=True)], 0.0)
    workers = [worker for _, worker in out.starts]
    out = scheduler.step([WorkerReady(worker, 1) for worker in workers], 0.0)
    sent = {send.worker_id: [one.task_id for one in send.tasks] for send in out.sends}
    assert sorted(sent.values()) == [[4], [5]]
