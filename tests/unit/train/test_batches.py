"""How global batches are cut and samples ordered, as properties over all sizes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import UsageError
from muster.rank.seeding import DataOrder, Position
from muster.train.config import BatchPlan, TrainConfig, learning_rate, plan_batches
from muster.train.progress import factor_at

RANKS = st.integers(1, 9)
SPEEDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8)


def plans() -> st.SearchStrategy[BatchPlan]:
    def make(ranks: int, extra: int, micro: int) -> BatchPlan:
        whole = ranks + extra
        return plan_batches(TrainConfig(global_batch=whole, batch_size=micro), ranks)

    return st.builds(make, RANKS, st.integers(0, 300), st.integers(1, 64))


@given(plan=plans(), speeds=st.none() | SPEEDS, count=st.integers(1, 400))
def test_every_sample_of_a_window_is_in_one_micro_batch_of_one_rank(
    plan: BatchPlan, speeds: list[float] | None, count: int
) -> None:
    if speeds is not None:
        plan = plan.with_shares([*speeds, *[1.0] * plan.num_ranks][: plan.num_ranks])
    count = min(count, plan.global_batch)
    windows = [plan.windows(count, rank) for rank in range(plan.num_ranks)]
    times = Counter(i for cuts in windows for start, end in cuts for i in range(start, end))
    assert times == Counter(range(count))
    assert {len(cuts) for cuts in windows} == {plan.rounds(count)}, "the same number of collectives"
    assert max(end - start for cuts in windows for start, end in cuts) <= plan.micro_batch


@given(plan=plans())
def test_halving_keeps_the_global_batch_until_one_sample_is_left(plan: BatchPlan) -> None:
    for _ in range(12):
        smaller = plan.halved()
        if smaller is None:
            assert plan.micro_batch == 1
            return
        assert smaller.global_batch == plan.global_batch
        assert smaller.micro_batch == math.ceil(plan.micro_batch / 2)
        assert smaller.micro_batch * smaller.accumulation >= max(
            smaller.per_rank(plan.global_batch)
        )
        plan = smaller
    pytest.fail("it never came to one sample")


@given(samples=st.integers(1, 200), batch=st.integers(1, 50), seed=st.integers(0, 9))
def test_an_epoch_is_every_sample_once_and_the_next_has_another_order(
    samples: int, batch: int, seed: int
) -> None:
    order = DataOrder(samples, seed)
    position, epochs = Position(0, 0), ([], [])  # type: tuple[Position, tuple[list[int], list[int]]]
    while position.epoch < 2:
        count = order.window(position, batch)
        start = position.offset
        epochs[position.epoch].extend(order.indices(position.epoch, start, start + count))
        position = order.after(position, count)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(samples))
    if samples > 20:
        assert epochs[0] != epochs[1]


@given(first=st.integers(1, 60), second=st.integers(1, 60), seed=st.integers(0, 99))
def test_the_order_does_not_depend_on_how_it_is_read(first: int, second: int, seed: int) -> None:
    def whole(batch: int) -> list[int]:
        order = DataOrder(60, seed)
        return [i for at in range(0, 60, batch) for i in order.indices(3, at, min(60, at + batch))]

    assert whole(first) == whole(second)


@given(
    step=st.integers(0, 500), warmup=st.integers(0, 100), total=st.integers(1, 400),
    floor=st.floats(0.0, 0.5), schedule=st.sampled_from(["cosine", "linear", "constant"]),
)  # fmt: skip
def test_schedules_rise_then_never_rise_again(
    step: int, warmup: int, total: int, floor: float, schedule: str
) -> None:
    def at(number: int) -> float:
        return factor_at(
            number, schedule=schedule, warmup_steps=warmup, total_steps=total, floor=floor
        )  # type: ignore[arg-type]

    now, then = at(step), at(step + 1)
    assert 0 < now <= 1 or (now == floor == 0)
    assert then > now or step >= warmup
    assert then <= now or step < warmup
    if schedule != "constant" and step >= max(total, warmup + 1):
        assert now == pytest.approx(floor)


@pytest.mark.parametrize(
    ("rule", "ranks", "rounds", "wanted"),
    [("none", 4, 2, 1e-3), ("linear", 4, 2, 8e-3), ("sqrt", 4, 1, 2e-3), ("linear", 1, 1, 1e-3)],
)
def test_learning_rates_follow_the_rule_that_is_named(
    rule: str, ranks: int, rounds: int, wanted: float
) -> None:
    config = TrainConfig.of(
        {}, base_lr=1e-3, lr_scaling=rule, batch_size=32, grad_accum_steps=rounds
    )
    lr, words = learning_rate(config, plan_batches(config, ranks))
    assert lr == pytest.approx(wanted)
    assert rule in words or "not scaled" in words


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_same_global_batch_has_the_same_rate_on_any_number_of_ranks(ranks: int) -> None:
    config = TrainConfig.of({}, base_lr=1e-3, lr_scaling="linear", global_batch=512)
    lr, _ = learning_rate(config, plan_batches(config, ranks))
    assert lr == pytest.approx(1e-3 * 512 / 32)


def test_a_rate_that_follows_the_batch_takes_the_place_of_a_recipes_own() -> None:
    """``--base-lr 0.1 --lr-scaling sqrt`` was passed over wherever a recipe names a rate."""
    recipe = {"lr": 3e-3, "batch_size": 32, "grad_accum_steps": 4}
    for asked, wanted in (
        ({}, 3e-3),
        ({"lr_scaling": "linear"}, 4e-3),
        ({"base_lr": 0.1}, 0.1),
        ({"base_lr": 0.1, "lr_scaling": "sqrt"}, 0.2),
        ({"lr": 0.5}, 0.5),
    ):
        config = TrainConfig.of(recipe, **asked)
        assert learning_rate(config, plan_batches(config, 1))[0] == pytest.approx(wanted)
    with pytest.raises(UsageError, match=r"--lr 0\.5 is never scaled: --lr-scaling sqrt would"):
        TrainConfig.of(recipe, lr=0.5, lr_scaling="sqrt")


def test_a_recipes_warm_up_gives_way_to_a_short_training_and_a_users_does_not() -> None:
    recipe = {"epochs": 30, "warmup_epochs": 2.0}
    assert TrainConfig.of(recipe).warmup_epochs == 2.0
    assert TrainConfig.of(recipe, epochs=3).warmup_epochs == 2.0
    assert TrainConfig.of(recipe, epochs=1).warmup_epochs == pytest.approx(2 / 30)
    with pytest.raises(UsageError, match="--warmup-epochs 2 is longer than --epochs 1"):
        TrainConfig.of(recipe, epochs=1, warmup_epochs=2.0)


def test_where_a_learning_rate_comes_from_claims_nothing_that_was_not_given() -> None:
    config = TrainConfig.of({"lr": 3e-3})
    assert learning_rate(config, plan_batches(config, 2)) == (
        3e-3, "0.003 (of the global batch, not scaled)",
    )  # fmt: skip
