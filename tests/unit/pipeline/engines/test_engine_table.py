"""Engines are found by name, shared while they have users, and watched while they work."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers  # its names are loaded when they are used, not where tests are collected

from muster.base.errors import SetupError, UnknownNameError, UsageError
from muster.pipeline.engines.answers import on_device
from muster.pipeline.engines.engine import (
    ENGINES,
    EngineError,
    EngineSpec,
    Request,
    Watchdog,
    open_engine,
    shared,
)
from muster.pipeline.engines.local import TransformersEngine
from muster_recipes.arith import tokenizer as characters


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(characters.VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    characters.save(folder, 64)
    return folder


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown engine 'transformer'(.|\n)*transformers"):
        open_engine(EngineSpec(engine="transformer", model="x"))


def test_every_name_leads_to_a_class() -> None:
    for place in ENGINES.values():
        module, _, name = place.partition(":")
        assert importlib.util.find_spec(module) is not None
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_says_what_to_install() -> None:
    with pytest.raises(SetupError, match=r"pip install 'muster-gpu\[vllm\]'"):
        open_engine(EngineSpec(engine="vllm", model="x"))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is there")
def test_quantizing_says_what_to_install() -> None:
    with pytest.raises(SetupError, match=r"pip install 'muster-gpu\[quantize\]'"):
        open_engine(EngineSpec(model="x", quantize="8bit"))


def test_the_table_and_the_engines_import_no_heavy_package() -> None:
    modules = ["engine", "local", "remote", "vllm_offline"]
    program = "; ".join(f"import muster.pipeline.engines.{name}" for name in modules)
    heavy = "{'torch', 'transformers', 'aiohttp', 'vllm', 'openai'}"
    program += f"; import sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_equal_specs_share_an_engine_until_the_last_user_goes(tiny: Path) -> None:
    spec = EngineSpec(model=str(tiny))

    async def scenario() -> None:
        first, second = await asyncio.gather(shared(spec, "cpu"), shared(spec, "cpu"))
        assert first.engine is second.engine
        other = await shared(EngineSpec(model=str(tiny), batch_size=3), "cpu")
        assert other.engine is not first.engine
        await first.close()
        await first.close()  # gives back no more than it has
        await second.engine.generate(Request(prompt="1"))
        engine = second.engine
        await second.close()
        with pytest.raises(EngineError):
            await engine.generate(Request(prompt="1"))
        third = await shared(spec, "cpu")
        assert third.engine is not engine
        await asyncio.gather(third.close(), other.close())

    asyncio.run(scenario())


def test_an_engine_that_does_not_start_is_not_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(SetupError):
                await shared(EngineSpec(model=str(tmp_path)), "cpu")

    asyncio.run(scenario())


def test_quantizing_needs_cuda(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def with_it(name: str) -> object:
        return found("json") if name == "bitsandbytes" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", with_it)

    async def scenario() -> None:
        with pytest.raises(UsageError, match="works on CUDA devices only, not on cpu"):
            await shared(EngineSpec(model=str(tiny), quantize="4bit"), "cpu")

    asyncio.run(scenario())


def test_a_hang_is_an_error_of_the_engine() -> None:
    async def scenario() -> None:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with pytest.raises(EngineError, match=r"no token and no answer for 0\.2 s with 1 req"):
            await Watchdog(0.2).wait(answer)
        assert answer.cancelled()

    asyncio.run(scenario())


def test_progress_keeps_a_slow_engine_alive() -> None:
    """Three times the limit without an answer, but never that long without a token."""

    async def scenario() -> int:
        dog = Watchdog(0.3)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def tokens() -> None:
            end_s = time.monotonic() + 0.9
            while time.monotonic() < end_s:
                dog.progress()
                await asyncio.sleep(0.01)
            answer.set_result(7)

        made, _ = await asyncio.gather(dog.wait(answer), tokens())
        return made

    assert asyncio.run(scenario()) == 7


def test_a_model_that_hangs_is_noticed(tiny: Path) -> None:
    """The thread stands still in the model; the event loop and its other users do not."""
    held = threading.Event()

    def before(module: object, args: object) -> None:
        if isinstance(module, torch.nn.Embedding):
            held.wait(300)

    async def scenario() -> None:
        engine = TransformersEngine(EngineSpec(model=str(tiny), timeout_s=0.3))
        await engine.start("cpu")
        with pytest.raises(EngineError, match="The engine hangs"):
            await engine.generate(Request(prompt="1"))
        with pytest.raises(EngineError, match="The engine hangs"):
            await engine.generate(Request(prompt="2"))
        held.set()
        await engine.stop()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)  # type: ignore[arg-type]
    try:
        asyncio.run(scenario())
    finally:
        handle.remove()


def test_weights_that_are_read_onto_a_device_are_the_same(tiny: Path) -> None:
    assert on_device("cpu") == {}
    options = on_device("cuda:0")
    assert options == {"device_map": {"": "cuda:0"}}
    options["device_map"][""] = "cpu"  # the same way of loading, to a device that is here
    placed = transformers.LlamaForCausalLM.from_pretrained(tiny, **options).to("cpu")
    moved = transformers.LlamaForCausalLM.from_pretrained(tiny)
    states = placed.state_dict(), moved.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not hasattr(placed, "_hf_hook"), "a hook would cost time in every step"
