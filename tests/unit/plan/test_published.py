"""The plan against what others have published: its usual figure within a factor, and the published
one inside of its interval.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.api.plan import TrainingPlan, known_model, plan_training
from muster.base.errors import UsageError
from muster.base.settings import Settings
from muster.plan.prices import DEFAULT_PRICES, parse_prices
from muster.plan.request import PlanRequest

PRICES = parse_prices(DEFAULT_PRICES, "muster's own list", "assumed")
#: How far the usual figure may be from a published one.
FACTOR = 1.6
#: 4.1 billion products and sums of a forward, twice that in operations, three times for both ways.
RESNET50 = {"what": "params=25.6e6", "flops_per_sample": 24.6e9, "work": "convolution"}
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def planned(
    what: str, devices: str, batch: int, model: dict[str, object], **machine: object
) -> TrainingPlan:
    request = PlanRequest(
        devices=devices,
        global_batch=batch,
        **{"precision": "bf16", **model, **machine},  # type: ignore[arg-type]
    )
    known = known_model(what, request)
    assert known is not None
    return plan_training(what, known, Settings(), PRICES)


def check(plan: TrainingPlan, published: tuple[float, float], per_sample: float = 1.0) -> None:
    """``published``: least and most samples/s, each of ``per_sample`` tokens."""
    usual, low, high = (
        rows[-1].samples_per_s.value * per_sample
        for rows in (plan.predictions, plan.slowest, plan.fastest)
    )
    least, most = published
    assert low < usual < high
    assert least / FACTOR <= usual <= most * FACTOR
    assert low <= most and high >= least, (low, high)
    assert plan.inputs["utilisation"].origin == "assumed"
    assert "published" in plan.inputs["utilisation"].source or "%" in (
        plan.inputs["utilisation"].source
    )


@pytest.mark.parametrize(
    ("devices", "images_per_s"),
    [("V100 16GB SXM x8", (6000.0, 7000.0)), ("A100 40GB SXM x8", (19000.0, 21000.0))],
)
def test_resnet_50(devices: str, images_per_s: tuple[float, float]) -> None:
    model = {name: value for name, value in RESNET50.items() if name != "what"}
    plan = planned(str(RESNET50["what"]), devices, 2048, model, precision="fp16")
    check(plan, images_per_s)


def test_gpt_2_on_8_a100() -> None:
    """Tokens/s of the 124 M model at a length of 1,024: nanoGPT 0.85 million, llm.c 1.4 million."""
    flops_per_token = 6 * 124e6 + 12 * 12 * 768 * 1024
    model = {"flops_per_sample": flops_per_token * 1024, "work": "transformer"}
    plan = planned("params=124e6", "A100 40GB SXM x8", 480, model)
    check(plan, (0.85e6, 1.4e6), per_sample=1024)


def test_llama_2_7b_on_128_a100(tmp_path: Path) -> None:
    """PyTorch FSDP: 3,700 tokens/s and GPU at a length of 4,096, 400 Gbit/s for each of 4 cards."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    plan = planned(
        f"hf:{tmp_path / 'config.json'}", "A100 80GB SXM x128", 256, {"sequence_length": 4096},
        strategy="fsdp", batch_size=2, devices_per_node=8, network="net400",
    )  # fmt: skip
    check(plan, (3700 * 128.0, 3700 * 128.0), per_sample=4096)


def test_without_a_word_about_the_work_the_interval_is_wide() -> None:
    model = {"flops_per_sample": 24.6e9}
    plan = planned("params=25.6e6", "V100 16GB SXM x8", 2048, model, precision="fp16")
    assert plan.fastest[-1].samples_per_s.value > 4 * plan.slowest[-1].samples_per_s.value
    assert "--work" in plan.inputs["utilisation"].source


def test_a_given_utilisation_is_one_number() -> None:
    model = {"flops_per_sample": 24.6e9, "utilisation": 0.2}
    plan = planned("params=25.6e6", "V100 16GB SXM x8", 2048, model, precision="fp16")
    assert plan.slowest == plan.fastest == ()
    assert plan.inputs["utilisation"].origin == "given"


def test_no_row_for_devices_on_which_the_model_does_not_fit() -> None:
    model = {"flops_per_sample": 1e12}
    few = planned("params=13e9", "A100 80GB SXM x8", 64, model, strategy="fsdp")
    fits = {}
    for count in range(1, 9):
        one = planned("params=13e9", f"A100 80GB SXM x{count}", count, model, strategy="fsdp")
        assert one.memory is not None
        fits[count] = one.memory.fits is not False
    assert not fits[1] and not fits[2] and fits[8]  # 13e9 x 16 bytes are 208 GB
    assert few.too_small == tuple(count for count in fits if not fits[count])
    shown = [count for count in fits if fits[count]]
    assert [one.num_devices for one in few.predictions] == shown
    assert [one.num_devices for one in few.fastest] == shown
    none = planned("params=13e9", "A100 80GB SXM x8", 64, model)
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
