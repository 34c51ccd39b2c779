"""The plan against what others have published: each figure lies in the interval that is planned
from the others alone, but for those that are named here.
"""

from __future__ import annotations

import pytest

from muster.api.look.plan import TrainingPlan, known_model, plan_training
from muster.base.errors import UsageError
from muster.base.settings import Settings
from muster.plan.memory import Need, footprint
from muster.plan.prices import DEFAULT_PRICES, parse_prices
from muster.plan.published import PUBLISHED, Published, of_kind, reach
from muster.plan.request import PlanRequest
from muster.plan.units import Bytes, given

PRICES = parse_prices(DEFAULT_PRICES, "muster's own list", "assumed")
#: In fp16 Muster keeps 16-bit copies of all weights on each card, so that it has no row.
TOO_LARGE = {"GPT-3 175B, ZeRO-3"}
#: Slower: a V100 with 8 sequences at once, with fewer products in a row than the others have.
OUTSIDE = {"BERT-large, 512 tokens"}
NAMES = [case.name for case in PUBLISHED]


def planned(what: str, devices: str, batch: int, **asked: object) -> TrainingPlan:
    request = PlanRequest(devices=devices, global_batch=batch, **asked)  # type: ignore[arg-type]
    known = known_model(what, request)
    assert known is not None
    return plan_training(what, known, Settings(), PRICES)


def plan_of(case: Published, **asked: object) -> TrainingPlan:
    return planned(
        f"params={case.parameters}", f"{case.card} x{case.num_devices}", case.global_batch,
        **{
            "batch_size": case.batch_size, "flops_per_sample": case.flops, "work": case.kind,
            "precision": case.precision, "strategy": case.strategy, "network": case.network,
            "devices_per_node": case.network and 8, **asked,
        },
    )  # fmt: skip


def rate_of(plan: TrainingPlan, which: str = "predictions") -> float:
    return float(getattr(plan, which)[-1].samples_per_s.value)


def test_twelve_cases_and_more_are_inside_and_say_where_they_were_published() -> None:
    assert len(set(NAMES) - TOO_LARGE - OUTSIDE) >= 12
    assert all(len(case.source) > 20 for case in PUBLISHED)


@pytest.mark.parametrize("case", PUBLISHED, ids=NAMES)
def test_a_published_figure_lies_where_the_others_have_it(case: Published) -> None:
    card = case.on
    others = [one for one in of_kind(case.kind) if one is not case]
    shares = reach(case.kind, card, case.precision, others)
    if case.name in TOO_LARGE:
        need = Need(
            parameters=given(int(case.parameters), "as published"),
            strategy="fsdp",
            num_devices=case.num_devices,
        )
        assert not footprint(need).fits(Bytes(card.memory_gib * 2.0**30))
        peak = card.peak_flops(case.precision)
        assert peak is not None and shares.least <= case.rate / peak <= shares.most
        return
    low = rate_of(plan_of(case, utilisation=shares.least))
    high = rate_of(plan_of(case, utilisation=shares.most))
    assert (low <= case.samples_per_s <= high) is (case.name not in OUTSIDE), (low, high)


@pytest.mark.parametrize("case", PUBLISHED, ids=NAMES)
def test_what_is_printed_holds_the_published_figure(case: Published) -> None:
    if case.name in TOO_LARGE:
        return
    plan = plan_of(case)
    low, usual, high = (rate_of(plan, one) for one in ("slowest", "predictions", "fastest"))
    assert low < high and low <= usual <= high * (1 + 1e-9)
    assert (low <= case.samples_per_s <= high) is (case.name not in OUTSIDE), (low, high)
    given = plan.inputs["utilisation"]
    assert given.origin == "assumed" and "published" in given.source


def test_the_interval_is_as_wide_as_the_figures_spread() -> None:
    """A prediction interval of 90 %, by hand: 0.42 and 0.60 with one degree of freedom."""
    two = [case for case in PUBLISHED if case.name in ("Llama-2 7B, A100", "Llama-2 13B, A100")]
    found = reach("transformer", two[0].on, "bf16", two)
    a, b = (case.rate / 312e12 for case in two)
    assert found.usual == pytest.approx((a * b) ** 0.5)
    ratio = (a / b) ** (6.314 * 2**-0.5 * 1.5**0.5)
    assert found.most / found.usual == pytest.approx(max(ratio, 1 / ratio))
    assert found.usual / found.least == pytest.approx(max(ratio, 1 / ratio))


def test_convolutions_follow_the_memory_and_not_the_peak() -> None:
    asked = {"flops_per_sample": 24.6e9, "work": "convolution", "precision": "fp16"}
    v100, h100 = (
        rate_of(planned("params=25.6e6", f"{card} x1", 256, **asked))
        for card in ("V100 16GB SXM", "H100 SXM")
    )
    assert h100 / v100 == pytest.approx(3350 / 900, rel=1e-6)
    plain = planned("params=25.6e6", "V100 16GB SXM x1", 256, peak_tflops=125.0, **asked)
    low, high = rate_of(plain, "slowest"), rate_of(plain, "fastest")
    assert high / low > 3  # without the card, all that is known is how the shares of peaks spread


@pytest.mark.parametrize(("gbit", "name"), [(800, "net800"), (3200, "net3200")])
def test_a_network_of_any_rate(gbit: int, name: str) -> None:
    asked = {"flops_per_sample": 1e15, "work": "transformer", "devices_per_node": 8}
    plan = planned("params=7e9", "H100 SXM x16", 64, strategy="fsdp", network=name, **asked)
    assert plan.inputs[f"{name}: bandwidth"].value.value == gbit * 1e9 / 8


def test_another_word_is_no_network() -> None:
    with pytest.raises(UsageError, match="net100"):
        planned("params=7e9", "H100 SXM x16", 64, flops_per_sample=1e15, network="net4x",
                devices_per_node=8, strategy="fsdp")  # fmt: skip


def test_without_a_word_about_the_work_the_interval_is_wide() -> None:
    asked = {"flops_per_sample": 24.6e9, "precision": "fp16"}
    plan = planned("params=25.6e6", "V100 16GB SXM x8", 2048, **asked)
    assert plan.fastest[-1].samples_per_s.value > 4 * plan.slowest[-1].samples_per_s.value
    assert "--work" in plan.inputs["utilisation"].source


def test_a_given_utilisation_is_one_number() -> None:
    asked = {"flops_per_sample": 24.6e9, "utilisation": 0.2, "precision": "fp16"}
    plan = planned("params=25.6e6", "V100 16GB SXM x8", 2048, **asked)
    assert plan.slowest == plan.fastest == ()
    assert plan.inputs["utilisation"].origin == "given"


def test_no_row_for_devices_on_which_the_model_does_not_fit() -> None:
    asked = {"flops_per_sample": 1e12, "precision": "bf16"}
    few = planned("params=13e9", "A100 80GB SXM x8", 64, strategy="fsdp", **asked)
    fits = {}
    for count in range(1, 9):
        one = planned("params=13e9", f"A100 80GB SXM x{count}", count, strategy="fsdp", **asked)
        assert one.memory is not None
        fits[count] = one.memory.fits is not False
    assert not fits[1] and not fits[2] and fits[8]  # 13e9 x 16 bytes are 208 GB
    assert few.too_small == tuple(count for count in fits if not fits[count])
    shown = [count for count in fits if fits[count]]
    assert [one.num_devices for one in few.predictions] == shown
    assert [one.num_devices for one in few.fastest] == shown
    none = planned("params=13e9", "A100 80GB SXM x8", 64, **asked)
    assert none.predictions == () and len(none.too_small) == 8


@pytest.mark.parametrize(
    ("what", "meant"),
    [
        ("7e9", "7e9"),
        ("7B", "7e9"),
        ("1.5b", "1.5e9"),
        ("7_000_000", "7000000"),
        ("25.6M", "25.6e6"),
    ],
)
def test_a_number_alone_is_led_to_params(what: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        known_model(what, PlanRequest())
    assert f"params={meant}" in str(caught.value)
    assert known_model(f"params={meant}", PlanRequest()) is not None


@pytest.mark.parametrize("what", ["run-7e9", "7", "2026", "digits", "e9", "a.py:f"])
def test_other_words_are_tasks_or_runs(what: str) -> None:
    assert known_model(what, PlanRequest()) is None
