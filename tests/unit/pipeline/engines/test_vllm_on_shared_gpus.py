"""What the engine vllm is told of its GPUs: a share of the memory where workers share them."""

from __future__ import annotations

import pytest

from muster.pipeline.engines.engine import EngineSpec
from muster.pipeline.engines.vllm_offline import options_of, workers_per_gpu

SPEC = EngineSpec(engine="vllm", model="m", tensor_parallel=2)


def test_an_engine_alone_on_its_gpus_leaves_the_memory_to_vllm() -> None:
    assert options_of(SPEC, 1) == {"model": "m", "dtype": "auto", "tensor_parallel_size": 2}


@pytest.mark.parametrize("num_sharing", [2, 3, 8])
def test_engines_on_one_gpu_take_nine_tenths_of_it_together(num_sharing: int) -> None:
    share = options_of(SPEC, num_sharing)["gpu_memory_utilization"]
    assert share * num_sharing == pytest.approx(0.9)


def test_only_quantized_weights_name_a_quantization() -> None:
    options = options_of(EngineSpec(engine="vllm", model="m", quantize="4bit"), 1)
    assert options["quantization"] == "bitsandbytes"


@pytest.mark.parametrize(("said", "number"), [(None, 1), ("", 1), ("1", 1), ("4", 4), ("x", 1)])
def test_the_executor_says_how_many_share(
    said: str | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUSTER_WORKERS_PER_GPU", raising=False)
    if said is not None:
        monkeypatch.setenv("MUSTER_WORKERS_PER_GPU", said)
    assert workers_per_gpu() == number
