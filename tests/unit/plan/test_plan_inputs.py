from __future__ import annotations

from typing import Any

import pytest

from muster.base.errors import UsageError
from muster.plan.calibrate import Calibration
from muster.plan.compute import ComputeTime, Group, parse_devices
from muster.plan.inputs import Known, compute_on, machine_of, peak_of, work_of
from muster.plan.prices import DEFAULT_PRICES, parse_prices
from muster.plan.request import PlanRequest
from muster.plan.units import Flops, FlopsPerSecond, Seconds, Watts, measured
from muster.plan.units import given as as_given

PRICES = parse_prices(DEFAULT_PRICES, "muster's own list", "assumed")


def group(text: str) -> Group:
    return parse_devices(text, ())[0]


def calibration(card: str, **changes: Any) -> Calibration:
    values: dict[str, Any] = {
        "compute": ComputeTime(
            fixed=measured(Seconds(0.01), ""), per_sample=measured(Seconds(0.001), "")
        ),
        "loading": measured(Seconds(0.0001), ""),
        "parameters": measured(1_000_000, "counted"),
        "precision": "bf16",
        "card": card,
        "global_batch": measured(64, ""),
        "num_samples": measured(1000, ""),
        "epochs": as_given(3, ""),
        "flops_per_sample": None,
        "activations": None,
        **changes,
    }
    return Calibration(**values)


def known(found: Calibration | None = None, **asked: Any) -> Known:
    return Known(request=PlanRequest(**asked), calibration=found)


def test_what_was_measured_on_this_card_is_taken_as_it_is() -> None:
    found = compute_on(known(calibration("NVIDIA L40S")), group("L40S x4"))
    assert found.per_sample.value == Seconds(0.001)
    assert found.per_sample.origin == "measured"


def test_another_card_is_taken_by_the_ratio_of_peaks() -> None:
    # L40S 362, H100 SXM 989.5 TFLOP/s in bf16: 1 ms become 0.3658 ms. The host's part stays.
    found = compute_on(known(calibration("NVIDIA L40S")), group("H100 SXM x4"))
    assert found.per_sample.value.value == pytest.approx(0.001 * 362 / 989.5)
    assert found.per_sample.origin == "assumed"
    assert found.fixed.value == Seconds(0.01)


def test_a_cpu_says_something_about_a_gpu_only_through_its_operations() -> None:
    on_cpu = calibration("cpu", precision="fp32")
    with pytest.raises(UsageError, match="measured on cpu, which says nothing about L40S"):
        compute_on(known(on_cpu), group("L40S"))
    told = known(on_cpu, flops_per_sample=1e9, utilisation=0.5,
                 precision="bf16")  # fmt: skip
    found = compute_on(told, group("L40S"))
    # 1e9 / (362e12 x 0.5)
    assert found.per_sample.value.value == pytest.approx(1e9 / 181e12)
    counted = calibration("cpu", flops_per_sample=measured(Flops(1e9), ""))
    assert compute_on(known(counted), group("L40S")).per_sample.value.value == pytest.approx(
        1e9 / (362e12 * 0.25)  # what is usual where nothing is said about the work
    )


def test_steps_follow_from_samples_and_epochs() -> None:
    # 1,000 samples, 64 at a time: 16 steps, the last one smaller; three epochs.
    own = work_of(known(calibration("cpu")), group("cpu:2"))
    assert own.num_steps is not None
    assert (own.num_steps.value, own.num_steps.origin) == (48, "given")
    said = work_of(known(calibration("cpu"), steps=7), group("cpu:2"))
    assert said.num_steps is not None and said.num_steps.value == 7
    more = known(calibration("cpu"), samples=1e6, epochs=0.5, global_batch=100)
    work = work_of(more, group("cpu:2"))
    assert work.num_steps is not None and work.num_steps.value == 5000
    assert work.gradients.value.value == 4e6


def test_power_link_and_price_of_a_card() -> None:
    machine = machine_of(PlanRequest(), group("H100 SXM x8"), PRICES)
    assert machine.power is not None and machine.power.value == Watts(700.0)
    assert machine.fabric.link.name == "nvlink4" and machine.fabric.overlaps
    assert machine.fabric.link.bandwidth.origin == "assumed"  # nobody has said that they have it
    named = machine_of(PlanRequest(link="nvlink4"), group("H100 SXM x8"), PRICES)
    assert named.fabric.link.bandwidth.origin == "table"
    assert machine.price is not None and machine.price.per_hour == 3.0
    assert machine_of(PlanRequest(), group("T4"), PRICES).price is None
    owned = machine_of(PlanRequest(owned=True, power_w=50.0), group("T4"), PRICES)
    assert owned.price is not None and owned.price.per_kwh == 0.17
    assert owned.power is not None and owned.power.origin == "given"
    on_cpu = machine_of(PlanRequest(), group("cpu:2"), PRICES)
    assert not on_cpu.fabric.overlaps and on_cpu.power is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: work_of(known(), group("L4")), "needs the number of samples per optimizer step"),
        (
            lambda: work_of(known(global_batch=8), group("L4")),
            "for a task add --calibrate to measure",
        ),
        (
            lambda: work_of(known(global_batch=8, flops_per_sample=1.0), group("L4")),
            "The number of parameters is not known",
        ),
        (
            lambda: work_of(
                known(global_batch=8, flops_per_sample=1.0),
                group("cpu:2"),
            ),
            "The peak of cpu in fp32 is not in the table",
        ),
        (
            lambda: machine_of(PlanRequest(devices_per_node=8), group("L4 x16"), PRICES),
            "16 devices, 8 per node, are 2 nodes",
        ),
    ],
)
def test_what_is_missing_is_asked_for(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_the_peak_is_that_of_the_precision() -> None:
    in_fp32 = known(precision="fp32")
    assert peak_of(in_fp32, group("A100 40GB SXM")).value == FlopsPerSecond(19.5e12)
    assert peak_of(known(), group("A100 40GB SXM")).value == FlopsPerSecond(312e12)
    said = known(peak_tflops=1.5)
    assert peak_of(said, group("cpu")).value == FlopsPerSecond(1.5e12)
    with pytest.raises(UsageError, match="V100 PCIe in bf16 is not in the table"):
        peak_of(known(), group("V100 PCIe"))
