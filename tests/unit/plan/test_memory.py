from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import SetupError, UsageError
from muster.plan.memory import (
    Need,
    Transformer,
    fewest_sharded_devices,
    footprint,
    largest_micro_batch,
    read_transformer,
    remedies,
    smallest_card,
)
from muster.plan.units import Bytes, measured
from muster.plan.units import given as as_given

GIB = 2.0**30
GB80 = Bytes(80 * GIB)

LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL_7B = {**LLAMA_3_8B, "model_type": "mistral", "vocab_size": 32000}
QWEN2_05B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257}  # fmt: skip


def model(tmp_path: Path, record: dict[str, Any]) -> Transformer:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    return read_transformer(path)


@pytest.mark.parametrize(
    ("record", "count"),
    [
        # The numbers that transformers itself gives for these models.
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_05B, 494_032_768),
        (GPT2, 124_439_808),
    ],
    ids=["llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2-0.5b", "gpt2"],
)
def test_parameters_are_those_of_the_real_models(
    record: dict[str, Any], count: int, tmp_path: Path
) -> None:
    assert model(tmp_path, record).parameters == count


def test_flops_of_a_transformer(tmp_path: Path) -> None:
    # Llama 2 7B, 4096 tokens: N in products = 6,738,415,616 - 32000·4096 = 6,607,343,616;
    # (6·N + 12·32·4096·4096) · 4096 = (39,644,061,696 + 6,442,450,944) · 4096 = 1.8877e14
    found = model(tmp_path, LLAMA_2_7B).flops_per_sample(4096)
    assert found.value == (39_644_061_696 + 6_442_450_944) * 4096


def test_activations_of_a_transformer(tmp_path: Path) -> None:
    # GPT-2, 1024 tokens, 2 bytes. Per token and layer: norms 2·768, attention 768 + 768 + 2·768 +
    # 768... = (2 + 1 + 1 + 2 + 1)·768 = 7·768, MLP 768 + 2·3072 = 9·768: 16·768·2 = 24,576 bytes.
    # 12 layers: 294,912; logits 8·50257 = 402,056; times 1024 tokens = 713,695,232.
    found = model(tmp_path, GPT2)
    assert found.activations(1024, 2).value == (294_912 + 402_056) * 1024
    # Checkpointed: 12 inputs of 768·2 bytes, one layer of 24,576, and the logits.
    lean = (12 * 768 * 2 + 24_576 + 402_056) * 1024
    assert found.checkpointed_activations(1024, 2).value == pytest.approx(lean)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ('{"model_type": "mixtral"}', UsageError, "'mixtral' is not known here"),
        ('{"model_type": "llama", "hidden_size": 8}', UsageError, "lacks 'num_attention_heads'"),
        ("[]", UsageError, "is not the config of a model"),
        ("{", SetupError, "damaged"),
        (None, SetupError, "There is no model config"),
    ],
)
def test_configs_that_cannot_be_used(
    text: str | None, error: type[Exception], says: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=says):
        read_transformer(tmp_path / "config.json")


def need(count: float, **rest: Any) -> Need:
    return Need(parameters=as_given(int(count), ""), **rest)


def parts(of: Need) -> dict[str, float]:
    return {part.name: part.size.value.value for part in footprint(of).parts}


def test_ddp_with_adamw_takes_sixteen_bytes_a_parameter() -> None:
    one = as_given(Bytes(1e9), "")
    found = parts(need(1e9, activations=one, micro_batch=6, precision="bf16"))
    # 4 + 4 + 8 bytes, the bf16 copy 2 and 6 samples of 1 GB: 8 GB at the end of the forward, which
    # is more than the 4 GB of the update.
    assert found == {
        "weights": 4e9,
        "gradients": 4e9,
        "optimizer": 8e9,
        "bf16 copy": 2e9,
        "activations": 6e9,
        "CUDA context": 0.75 * GIB,
    }


def test_the_update_can_be_the_worst_moment() -> None:
    found = parts(need(1e9, activations=as_given(Bytes(1e6), ""), precision="bf16"))
    assert found["update (activations are gone by then)"] == 4e9
    assert "activations" not in found and "bf16 copy" not in found


def test_fsdp_divides_the_states_and_gathers_a_unit() -> None:
    one = as_given(Bytes(1e9), "")
    found = parts(need(8e9, activations=one, strategy="fsdp", num_devices=8, largest_unit=2e8))
    # 8e9/8 = 1e9 of its own: 4 + 4 + 8 GB; the unit with its gradients 8 bytes x 2e8. In bf16 a
    # unit is gathered in it and freed again; in fp16 the backward holds the copies of all layers.
    assert found["weights"] == found["gradients"] == 4e9
    assert found["optimizer"] == 8e9
    assert found["gathered unit"] == 1.6e9
    assert "bf16 copy" not in found
    sharded = {"strategy": "fsdp", "num_devices": 8, "largest_unit": 2e8}
    assert parts(need(8e9, activations=one, precision="fp16", **sharded))["fp16 copy"] == 16e9


def test_a_unit_that_is_not_known_is_assumed() -> None:
    found = footprint(need(8e9, strategy="fsdp", num_devices=8))
    unit = next(part for part in found.parts if part.name == "gathered unit")
    # A 16th of 8e9 parameters, with its gradient: 5e8 x 8 bytes.
    assert (unit.size.value.value, unit.size.origin) == (4e9, "assumed")


@pytest.mark.parametrize(("optimizer", "size"), [("adamw", 8e9), ("sgd", 0), ("sgd-momentum", 4e9)])
def test_the_state_of_optimizers(optimizer: Any, size: float) -> None:
    assert parts(need(1e9, optimizer=optimizer))["optimizer"] == size


@given(
    st.floats(1e6, 1e11),
    st.floats(1, 1e10),
    st.integers(1, 64),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(2, 64),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    count: float, each: float, batch: int, precision: Any, devices: int
) -> None:
    of = need(count, activations=measured(Bytes(each), ""), micro_batch=batch, precision=precision)
    most = largest_micro_batch(of, GB80)
    if most is None:
        assert not footprint(dataclasses.replace(of, micro_batch=1)).fits(GB80)
        return
    assert footprint(dataclasses.replace(of, micro_batch=most)).fits(GB80)
    assert not footprint(dataclasses.replace(of, micro_batch=most + 1)).fits(GB80)
    alone = footprint(of).total.value
    unit = {"strategy": "fsdp", "largest_unit": 1000}
    sharded = dataclasses.replace(of, num_devices=devices, **unit)  # type: ignore[arg-type]
    assert footprint(sharded).total.value <= alone * (1 + 1e-9) + Bytes(8000.0)


def test_what_would_make_it_fit_really_does() -> None:
    # 7e9 parameters: 16 bytes each are 104 GiB, too much for 80 GiB; over 4 devices 26 GiB.
    unit = {"largest_unit": 200_000_000, "activations": as_given(Bytes(1e9), "")}
    of = need(7e9, strategy="ddp", num_devices=4, **unit)
    assert not footprint(of).fits(GB80)
    found = remedies(of, GB80)
    assert found[0] == "--strategy fsdp over the 4 devices"
    assert found[-1] == "a card with more memory: H200 NVL (141 GiB)"
    assert footprint(dataclasses.replace(of, strategy="fsdp")).fits(GB80)


def test_a_smaller_batch_is_the_first_remedy() -> None:
    of = need(1e9, activations=as_given(Bytes(8 * GIB), ""), micro_batch=32)
    # 16e9 bytes = 14.9 GiB, the copy 1.86, context 0.75: 62.49 GiB are left for 7 samples.
    assert largest_micro_batch(of, GB80) == 7
    assert remedies(of, GB80)[0].startswith("--batch-size 7,")


def test_no_number_of_devices_helps_a_batch_that_is_too_large() -> None:
    of = need(1e6, activations=as_given(Bytes(100 * GIB), ""))
    assert fewest_sharded_devices(of, GB80) is None
    assert smallest_card(need(1e6)) == "RTX 3080 10GB (10 GiB)"


def test_unknown_activations_are_a_lower_bound() -> None:
    assert not footprint(need(1e9)).is_whole
    assert largest_micro_batch(need(1e9), GB80) is None
