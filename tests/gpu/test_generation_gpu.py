"""The engine ``transformers`` on CUDA: as on the CPU, in each precision, short of memory."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.pipeline.engines.engine import Completion, EngineSpec, Request, RequestError, Sampling
from muster.pipeline.engines.local import TransformersEngine
from muster_recipes.arith import tokenizer as characters

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(characters.VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
        bos_token_id=characters.BOS,
        eos_token_id=characters.EOS,
    )
    model = LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    characters.save(folder, 8192)
    return folder


def requests(count: int) -> list[Request]:
    return [
        Request(
            prompt="12+" * (1 + number % 9),
            sampling=Sampling(temperature=number % 2, top_p=0.9, max_tokens=10 + number % 30),
            seed=number,
        )
        for number in range(count)
    ]


def run(
    model: Path, asked: Sequence[Request], device: str, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    async def all_of_them() -> tuple[list[Any], dict[str, Any]]:
        engine = TransformersEngine(EngineSpec(model=str(model), **settings))
        await engine.start(device)
        try:
            made = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
            return list(made), dict(engine.stats())
        finally:
            await engine.stop()

    return asyncio.run(all_of_them())


def test_texts_are_those_of_the_cpu_and_of_any_batch(tiny: Path) -> None:
    asked = requests(40)
    expected, _ = run(tiny, asked, "cpu", dtype="float64")
    for batch_size in (1, 7, 32):
        made, _ = run(tiny, asked, "cuda:0", dtype="float64", batch_size=batch_size)
        assert made == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_precision_answers_and_repeats_itself(tiny: Path, dtype: str) -> None:
    first, _ = run(tiny, requests(20), "cuda:0", dtype=dtype, batch_size=1)
    again, _ = run(tiny, requests(20), "cuda:0", dtype=dtype, batch_size=1)
    assert first == again and all(isinstance(one, Completion) for one in first)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_quantized_weights_answer(tiny: Path, bits: Any) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    made, _ = run(tiny, requests(8), "cuda:0", dtype="bfloat16", quantize=bits)
    assert all(isinstance(one, Completion) for one in made)


def test_a_full_device_halves_the_batch_and_loses_nothing(tiny: Path) -> None:
    """A row takes about 4 MiB of keys and values and, while its prompt is read, 50 MiB more."""
    asked = [
        Request(prompt="1" * 1000, sampling=Sampling(max_tokens=20), seed=number)
        for number in range(32)
    ]
    expected, _ = run(tiny, asked, "cuda:0", dtype="float64", batch_size=2)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(500 * 2**20 / total)
    try:
        made, stats = run(tiny, asked, "cuda:0", dtype="float64", batch_size=32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert stats["out_of_memory"] >= 1
    assert not any(isinstance(one, RequestError) for one in made)
    assert made == expected
