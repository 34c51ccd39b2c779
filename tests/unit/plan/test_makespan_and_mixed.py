from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.plan.compute import (
    ComputeTime,
    Member,
    balanced_shares,
    least_makespan,
    list_schedule,
    makespans,
    plan_mixed,
)
from muster.plan.units import Seconds, assumed, measured

TIMES = st.lists(st.floats(0.01, 100).map(Seconds), min_size=1, max_size=40)


def seconds(*values: float) -> list[Seconds]:
    return [Seconds(value) for value in values]


def test_a_sweep_by_hand() -> None:
    # In order on 2: 3|., 3|3 -> 6|3 -> 6|5 -> 6|7 -> 8|7; longest first: 3,3 -> 2,2 -> 2: 5|5 -> 7.
    times = seconds(3, 3, 2, 2, 2)
    (one, two) = makespans(times, [1, 2])
    assert one.in_order == Seconds(12.0) and one.speed_up == 1.0
    assert two.in_order == Seconds(7.0)
    assert two.least == Seconds(6.0)
    assert two.efficiency == pytest.approx(12 / 7 / 2)
    # Graham's example for longest first: 7 on 2, where 6 is possible (3+3, 2+2+2).
    assert two.longest_first == Seconds(7.0)


def test_order_matters() -> None:
    assert list_schedule(seconds(1, 1, 1, 1, 4), 2) == Seconds(6.0)
    assert list_schedule(seconds(4, 1, 1, 1, 1), 2) == Seconds(4.0)


@given(TIMES, st.integers(1, 12))
def test_grahams_bounds_hold(times: list[Seconds], workers: int) -> None:
    (found,) = makespans(times, [workers])
    slack = 1 + 1e-9
    assert found.least <= found.in_order * slack
    # least <= optimum, so these follow from the theorems only where least is near it: the first
    # bound is proven from least itself (Graham 1966).
    assert found.in_order <= found.least * (2 - 1 / workers) * slack
    assert found.longest_first <= found.least * (2 - 1 / workers) * slack


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_best(values: list[int], workers: int) -> None:
    best = min(
        max(
            sum(v for v, w in zip(values, chosen, strict=True) if w == worker)
            for worker in range(workers)
        )
        for chosen in itertools.product(range(workers), repeat=len(values))
    )
    times = sorted(seconds(*values), reverse=True)
    assert least_makespan(times, workers).value <= best + 1e-9
    limit = best * (4 / 3 - 1 / (3 * workers))
    assert list_schedule(times, workers).value <= limit + 1e-9


@given(TIMES, st.integers(1, 8))
def test_one_worker_does_everything_one_after_the_other(times: list[Seconds], more: int) -> None:
    total = sum(time.value for time in times)
    assert list_schedule(times, 1).value == pytest.approx(total)
    assert list_schedule(times, len(times) + more) == max(times)


def member(per_sample_s: float, fixed_s: float = 0.0, most: int | None = None) -> Member:
    compute = ComputeTime(
        fixed=measured(Seconds(fixed_s), ""), per_sample=assumed(Seconds(per_sample_s), "")
    )
    return Member(name="card", compute=compute, most_samples=most)


def test_equal_shares_wait_for_the_slower_card() -> None:
    # 90 samples; 1 ms and 2 ms each. Equal: 45 and 45: 45 and 90 ms. Balanced: 60 and 30: 60 ms
    # both. Lost: 1 - 60/90 = a third.
    plan = plan_mixed([member(0.001), member(0.002)], 90)
    assert plan is not None
    assert plan.equal.shares == (45, 45)
    assert plan.equal.step.value == pytest.approx(0.090)
    assert [idle.value for idle in plan.equal.idle] == pytest.approx([0.045, 0.0])
    assert plan.balanced.shares == (60, 30)
    assert plan.balanced.step.value == pytest.approx(0.060)
    assert plan.lost == pytest.approx(1 / 3)
    assert plan.origin == "assumed"


def test_the_memory_of_a_card_limits_its_share() -> None:
    plan = plan_mixed([member(0.001, most=40), member(0.002)], 90)
    assert plan is not None
    assert plan.balanced.shares == (40, 50)
    assert plan_mixed([member(0.001, most=40), member(0.002, most=49)], 90) is None


def test_like_cards_lose_nothing() -> None:
    plan = plan_mixed([member(0.001)] * 4, 64)
    assert plan is not None
    assert plan.lost == 0.0
    assert plan.balanced.shares == (16, 16, 16, 16)


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=1, max_size=3),
    st.integers(3, 14),
)
def test_no_other_split_is_better(speeds: list[tuple[float, float]], batch: int) -> None:
    members = [member(each, fixed) for each, fixed in speeds]
    shares = balanced_shares(members, batch)
    assert sum(shares) == batch and min(shares) >= 1
    best = min(
        max(m.compute.of(s).value.value for m, s in zip(members, split, strict=True))
        for split in itertools.product(range(1, batch + 1), repeat=len(members))
        if sum(split) == batch
    )
    taken = max(m.compute.of(s).value.value for m, s in zip(members, shares, strict=True))
    assert taken == pytest.approx(best)
