"""The interval for the end of a run against simulated list scheduling."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable

import pytest

from muster.farm.view import Durations, Rate, remaining

SHAPES: dict[str, Callable[[random.Random], float]] = {
    "equal": lambda r: 10.0,
    "uniform": lambda r: r.uniform(5, 15),
    "exponential": lambda r: r.expovariate(0.1),
    "skewed": lambda r: r.lognormvariate(2, 0.8),
    "two kinds": lambda r: 1.0 if r.random() < 0.8 else 30.0,
}


def simulate(lengths: list[float], workers: int, look_after: int) -> tuple[object, float]:
    """The estimate when ``look_after`` tasks have ended, and the time that was really left."""
    queue = list(lengths)
    busy: list[tuple[float, float, float]] = []  # end, begin, length
    durations = Durations()
    now, ended = 0.0, 0
    estimate: object = None
    looked_at = 0.0
    while queue or busy:
        while queue and len(busy) < workers:
            length = queue.pop(0)
            heapq.heappush(busy, (now + length, now, length))
        now, _, length = heapq.heappop(busy)
        durations.add([length])
        ended += 1
        if ended == look_after:
            while queue and len(busy) < workers:
                length = queue.pop(0)
                heapq.heappush(busy, (now + length, now, length))
            elapsed = [now - begin for _, begin, _ in busy]
            estimate, looked_at = remaining(durations, len(queue), elapsed, workers), now
    return estimate, now - looked_at


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_interval_contains_the_truth_nine_times_in_ten(shape: str) -> None:
    draw = random.Random(7)
    hits = trials = 0
    for _ in range(300):
        count, workers = draw.randint(40, 400), draw.choice([1, 2, 4, 8, 16])
        lengths = [SHAPES[shape](draw) for _ in range(count)]
        estimate, truth = simulate(lengths, workers, draw.randint(count // 5, count - 1))
        assert estimate is not None
        low, high = estimate  # type: ignore[misc]
        assert 0 <= low <= high
        hits += low - 1e-6 <= truth <= high + 1e-6
        trials += 1
    assert hits / trials >= 0.9, hits / trials


def test_it_is_not_so_wide_that_it_says_nothing() -> None:
    draw = random.Random(3)
    lengths = [draw.uniform(5, 15) for _ in range(2000)]
    estimate, truth = simulate(lengths, 8, 400)
    assert estimate is not None
    low, high = estimate  # type: ignore[misc]
    assert high - low < 0.4 * truth


def test_nothing_is_claimed_before_a_task_has_ended() -> None:
    assert remaining(Durations(), 10, [1.0], 2) is None
    one = Durations()
    one.add([5.0])
    assert remaining(one, 10, [1.0], 0) is None
    assert remaining(one, 0, [], 4) == (0.0, 0.0)


def test_running_tasks_and_the_tail_count() -> None:
    durations = Durations()
    for _ in range(50):
        durations.add([10.0])
    alone = remaining(durations, 0, [4.0], 8)
    assert alone is not None
    assert alone.low_s <= 6.0 <= alone.high_s
    overdue = remaining(durations, 0, [40.0], 8)
    assert overdue is not None
    assert overdue.low_s == 0.0


def test_mean_and_variance_agree_with_the_definition() -> None:
    draw = random.Random(1)
    values = [draw.expovariate(1.0) for _ in range(500)]
    durations = Durations()
    for value in values:
        durations.add([value])
    mean = sum(values) / 500
    assert durations.mean_s == pytest.approx(mean)
    assert durations.variance == pytest.approx(sum((v - mean) ** 2 for v in values) / 499)
    assert durations.longest_s == max(values)


def test_the_rate_is_of_the_last_half_minute() -> None:
    rate = Rate(window_s=30.0)
    assert rate.per_second() is None
    for second in range(100):
        rate.add(float(second), second * (1 if second < 60 else 3))
    assert rate.per_second() == pytest.approx(3.0, rel=0.02)


def test_lengths_that_are_added_together_count_like_single_ones() -> None:
    lengths = [random.Random(1).lognormvariate(0, 2) for _ in range(500)]
    durations, at = Durations(), 0
    for size in (1, 0, 3, 200, 1, 295):
        durations.add(lengths[at : at + size])
        at += size
    assert durations.count == len(lengths)
    assert durations.mean_s == pytest.approx(statistics.mean(lengths), rel=1e-12)
    assert durations.variance == pytest.approx(statistics.variance(lengths), rel=1e-9)
    assert durations.longest_s == max(lengths)
