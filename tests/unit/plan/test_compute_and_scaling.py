from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from muster.base.errors import UsageError
from muster.plan.communication import Fabric, Link, find_link
from muster.plan.compute import ComputeTime, Timing, from_flops, from_timings
from muster.plan.prices import Price
from muster.plan.scaling import Crowding, Machine, Work, predict
from muster.plan.units import (
    Bytes,
    BytesPerSecond,
    Figure,
    Flops,
    FlopsPerSecond,
    Seconds,
    Watts,
    assumed,
    from_table,
    measured,
    weakest,
)
from muster.plan.units import given as as_given


def compute(fixed_s: float, per_sample_s: float) -> ComputeTime:
    return ComputeTime(
        fixed=measured(Seconds(fixed_s), ""), per_sample=measured(Seconds(per_sample_s), "")
    )


def work(
    fixed_s: float, per_sample_s: float, batch: int, size: float = 0.0, **rest: object
) -> Work:
    values: dict[str, object] = {
        "compute": compute(fixed_s, per_sample_s),
        "gradients": measured(Bytes(size), ""),
        "global_batch": batch,
        "loading": measured(Seconds(0.0), ""),
        **rest,
    }
    return Work(**values)  # type: ignore[arg-type]


def fabric(alpha_s: float = 0.0, beta: float = 1e30) -> Fabric:
    return Fabric(
        link=Link(
            name="test",
            alpha=as_given(Seconds(alpha_s), ""),
            bandwidth=as_given(BytesPerSecond(beta), ""),
            share=as_given(1.0, ""),
        )
    )


def test_a_line_through_two_batches() -> None:
    # 64 samples take 0.5 s, 16 take 0.2 s: 0.3 s / 48 = 6.25 ms each, and 0.2 - 16·0.00625 = 0.1 s.
    found = from_timings([Timing(64, Seconds(0.5)), Timing(16, Seconds(0.2))], "here")
    assert found.per_sample.value.value == pytest.approx(0.00625)
    assert found.fixed.value.value == pytest.approx(0.1)
    assert found.of(32).value.value == pytest.approx(0.3)
    # Three rounds of at most 12 samples: 3 x 0.1 + 32 x 0.00625.
    assert found.of(32, 12).value.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    "timings",
    [
        [Timing(64, Seconds(0.64))],
        [Timing(64, Seconds(0.64)), Timing(32, Seconds(0.7))],  # noise: less work took longer
        [Timing(64, Seconds(0.64)), Timing(32, Seconds(0.2))],  # noise: a negative fixed part
    ],
)
def test_noise_never_gives_negative_times(timings: list[Timing]) -> None:
    found = from_timings(timings, "here")
    assert found.fixed.value == Seconds(0.0)
    assert found.per_sample.value.value == pytest.approx(0.01)


def test_flops_over_peak_and_utilisation() -> None:
    # 2e12 FLOP / (312e12 FLOP/s x 0.4) = 16.03 ms
    found = from_flops(
        as_given(Flops(2e12), ""),
        from_table(FlopsPerSecond(312e12), "A100"),
        assumed(0.4, ""),
    )
    assert found.per_sample.value.value == pytest.approx(2e12 / 124.8e12)
    assert found.per_sample.origin == "assumed"


def test_the_weakest_input_decides() -> None:
    firm, weak = measured(1, ""), assumed(1, "")
    assert weakest([firm]) == "measured"
    assert weakest([firm, from_table(1, ""), None]) == "table"
    assert weakest([weak, firm, as_given(1, "")]) == "assumed"


def test_a_whole_prediction_by_hand() -> None:
    """Fixed 10 ms, 1 ms per sample, 64 samples; 8 MB of gradients at 1 GB/s, no latency.

    One device: 10 + 64 = 74 ms. Two: 10 + 32 = 42 ms of computing, 28 ms of it backward. Buckets:
    1 MiB and the rest, 8e6 - 1,048,576 = 6,951,424 bytes. On two ranks a ring sends each once:
    1.048576 and 6.951424 ms. The first is full at 28·0.131 = 3.67 ms and gone at 4.72; the second
    is full at 28 ms, so 6.951424 ms are waited for: 48.951424 ms.
    """
    one, two = predict(
        work(0.010, 0.001, 64, 8e6, num_steps=as_given(1000, "")),
        Machine(
            fabric=fabric(beta=1e9),
            power=from_table(Watts(500.0), ""),
            price=Price(
                currency="EUR", per_hour=3.6, per_kwh=None, origin="given", source="contract"
            ),
        ),
        [1, 2],
    )
    assert one.step.value.value == pytest.approx(0.074)
    assert two.compute.value.value == pytest.approx(0.042)
    assert two.communication.value.value == pytest.approx(0.008)
    assert two.exposed.value.value == pytest.approx(0.006951424)
    assert two.step.value.value == pytest.approx(0.048951424)
    assert two.speed_up.value == pytest.approx(74 / 48.951424)
    assert two.efficiency.value == pytest.approx(37 / 48.951424)
    assert two.samples_per_s.value == pytest.approx(64 / 0.048951424)
    assert two.wall is not None and two.energy is not None and two.cost is not None
    assert two.wall.value.value == pytest.approx(48.951424)
    # 2 x 500 W x 48.951424 s = 48,951 J; 2 x 3.6 EUR/h x 48.951424/3600 h = 0.0979 EUR
    assert two.energy.value.value == pytest.approx(48951.424)
    assert two.cost.value.value == pytest.approx(0.097902848)
    assert (one.step.origin, two.step.origin) == ("measured", "assumed")
    assert two.energy.origin == "assumed" and two.cost.value.currency == "EUR"


def test_an_owned_card_costs_its_electricity() -> None:
    price = Price(currency="EUR", per_hour=None, per_kwh=0.30, origin="given", source="bill")
    machine = Machine(fabric=fabric(), power=from_table(Watts(1000.0), ""), price=price)
    (one,) = predict(work(0.0, 1.0, 3600, num_steps=as_given(2, "")), machine, [1])
    # 7,200 s at 1 kW: 2 kWh x 0.30 EUR
    assert one.cost is not None
    assert one.cost.value.value == pytest.approx(0.60)
    (unknown,) = predict(
        work(0.0, 1.0, 8, num_steps=as_given(2, "")),
        Machine(fabric=fabric(), price=price),
        [1],
    )
    assert unknown.cost is None


def test_the_input_pipeline_bounds_a_step() -> None:
    # 100 samples at 200 samples/s: 0.5 s, whatever 100 ms of computing are divided by.
    rows = predict(
        work(0.0, 0.001, 100, input_rate=as_given(200.0, "")), Machine(fabric=fabric()), [1, 4]
    )
    assert [row.step.value.value for row in rows] == pytest.approx([0.5, 0.5])
    assert [row.bound for row in rows] == ["input", "input"]


def test_synchronous_rl_waits_for_the_longest_episode() -> None:
    # Spread 0.2 on 4 devices: 1 + 0.2 x 1.02938 = 1.20588 times as long.
    (row,) = predict(work(0.0, 0.01, 4, spread=as_given(0.2, "")), Machine(fabric=fabric()), [4])
    assert row.compute.value.value == pytest.approx(0.01 * 1.205876, rel=1e-5)


def test_fsdp_waits_only_for_what_computing_does_not_hide() -> None:
    # 1 GB at 1 GB/s on 2 ranks: an all-reduce takes 1 s, FSDP 1.5 s; 1 s of computing hides 1 s.
    machine = Machine(fabric=fabric(beta=1e9))
    (row,) = predict(work(0.0, 1.0, 2, 1e9, strategy="fsdp"), machine, [2])
    assert row.communication.value.value == pytest.approx(1.5)
    assert row.exposed.value.value == pytest.approx(0.5)


def test_more_devices_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="A global batch of 4 cannot be shared by 8 devices"):
        predict(work(0.0, 1.0, 4), Machine(fabric=fabric()), [1, 8])


WORKS = st.builds(
    work,
    st.floats(0, 0.1),
    st.floats(1e-6, 0.1),
    st.integers(16, 5000),
    st.floats(0, 1e9),
    micro_batch=st.none() | st.integers(1, 64),
    strategy=st.sampled_from(["ddp", "fsdp"]),
    spread=st.none() | st.floats(0, 1).map(lambda value: as_given(value, "")),
    input_rate=st.none() | st.floats(1, 1e6).map(lambda value: as_given(value, "")),
)
LINKS = st.sampled_from(["pcie4", "nvlink4", "net25", "gloo-loopback"])


@given(WORKS, LINKS)
def test_more_devices_are_never_slower_in_computing_nor_better_than_perfect(
    job: Work, name: str
) -> None:
    machine = Machine(fabric=Fabric(link=find_link(name), host=find_link("gloo-loopback")))
    rows = predict(job, machine, list(range(1, 17)))
    calm = dataclasses.replace(job, spread=None)
    alone = [row.compute.value for row in predict(calm, machine, list(range(1, 17)))]
    for before, after in itertools.pairwise(alone):
        assert after <= before * (1 + 1e-12)
    for row in rows:
        assert row.efficiency.value <= 1 + 1e-9
        assert row.exposed.value <= row.communication.value * (1 + 1e-9)
        parts = row.compute.value + row.exposed.value + row.loading.value
        assert row.step.value >= parts * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(1e-6, 1), st.integers(1, 500), st.integers(1, 500))
def test_measuring_a_line_finds_that_line(
    fixed_s: float, each_s: float, small: int, large: int
) -> None:
    assume(small != large)
    line = compute(fixed_s, each_s)
    timings = [Timing(n, line.of(n).value) for n in (small, large)]
    found = from_timings(timings, "")
    for count in (small, large):
        assert found.of(count).value.value == pytest.approx(line.of(count).value.value, rel=1e-6)


def test_another_card_changes_the_work_and_not_the_host() -> None:
    found = compute(0.5, 0.1).scaled(assumed(0.25, "as their peaks"))
    assert found.fixed.value == Seconds(0.5)
    assert found.per_sample.value.value == pytest.approx(0.025)
    assert found.per_sample.origin == "assumed"
    shown = Figure(value=Seconds(1.5), origin="table", source="x").record()
    assert shown == {"value": 1.5, "unit": "s", "origin": "table", "source": "x"}


def test_where_sending_takes_the_cores_nothing_is_hidden() -> None:
    # 8 MB at 1 GB/s on two ranks: 8 ms, all of it waited for, whatever the backward takes.
    machine = Machine(fabric=dataclasses.replace(fabric(beta=1e9), overlaps=False))
    for strategy, waited_s in (("ddp", 0.008), ("fsdp", 0.012)):
        (row,) = predict(work(0.0, 1.0, 64, 8e6, strategy=strategy), machine, [2])
        assert row.exposed.value.value == pytest.approx(waited_s)


def test_crowded_cores_take_longer_together() -> None:
    # 1.6 x with four at work: a third of that surplus, 1.2 x, with two; alone as before.
    crowding = Crowding(factor=measured(1.6, "side by side"), num_devices=4)
    rows = predict(work(0.0, 0.01, 8, crowding=crowding), Machine(fabric=fabric()), [1, 2, 4])
    found = [row.compute.value.value for row in rows]
    assert found == pytest.approx([0.08, 0.04 * 1.2, 0.02 * 1.6])
