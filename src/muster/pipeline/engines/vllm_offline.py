"""The engine ``vllm``: vLLM's own scheduler in this process, on the devices it is given.

Written to vLLM's public interface (``AsyncLLM``, ``AsyncEngineArgs``, ``SamplingParams``).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, SetupError, UsageError
from muster.base.settings import WORKERS_PER_GPU, read_settings, variable
from muster.devices.discovery import name_gpus_by_number
from muster.pipeline.engines.answers import prompt_text
from muster.pipeline.engines.engine import (
    Completion,
    EngineError,
    EngineSpec,
    Request,
    RequestError,
    Watchdog,
)
from muster.pipeline.sources.hub import use_cache_if_unreachable
from muster.pipeline.stages import METER

_DEFAULT_CONCURRENCY = 256
#: Share of a GPU that the engines of all its workers take together; vLLM's own choice for one
#: engine was 0.9 and is a little more in later versions.
_MEMORY_SHARE = 0.9


class VllmEngine:
    """One engine on ``tensor_parallel`` of the visible devices, from the first one on."""

    def __init__(self, spec: EngineSpec) -> None:
        if importlib.util.find_spec("vllm") is None:
            instead = "use --engine transformers"
            raise MissingPackageError("The engine vllm", "vllm", "vllm", instead=instead)
        if not spec.model:
            raise UsageError(
                "No model is named.", hint="write --model with a Hugging Face name or a folder."
            )
        if spec.quantize == "8bit":
            raise UsageError(
                "The engine vllm cannot quantize a model to 8 bits with bitsandbytes.",
                hint="use --quantize 4bit, a model that is published in 8 bits, or "
                "--engine transformers.",
            )
        self._spec = spec
        self.concurrency = spec.concurrency or spec.batch_size or _DEFAULT_CONCURRENCY
        self._watchdog = Watchdog(spec.timeout_s)
        self._numbers = itertools.count()
        self._engine: Any = None
        self._tokenizer: Any = None
        self._counts = dict.fromkeys(("requests", "tokens", "prompt_tokens"), 0)

    async def start(self, device: str) -> None:
        """Load the model; vLLM does that in processes of its own and waits for them here."""
        if not device.startswith("cuda"):
            raise UsageError(
                f"The engine vllm needs CUDA devices, and the worker has {device}.",
                hint="use --engine transformers.",
            )
        name_gpus_by_number(read_settings())
        if not Path(self._spec.model).exists():
            use_cache_if_unreachable()
        transformers: Any = importlib.import_module("transformers")
        arguments: Any = importlib.import_module("vllm.engine.arg_utils")
        engines: Any = importlib.import_module("vllm.v1.engine.async_llm")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._spec.model)
            self._engine = engines.AsyncLLM.from_engine_args(
                arguments.AsyncEngineArgs(
                    max_num_seqs=self.concurrency, **options_of(self._spec, workers_per_gpu())
                )
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise SetupError(f"vLLM cannot serve {self._spec.model!r}: {error}") from error

    async def generate(self, request: Request) -> Completion:
        """A completion; RequestError for a prompt that vLLM refuses, such as one too long."""
        return await self._watchdog.wait(asyncio.ensure_future(self._answer(request)))

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start."""
        return dict(self._counts)

    async def stop(self) -> None:
        """End vLLM's processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    async def _answer(self, request: Request) -> Completion:
        vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        sampling = request.sampling
        text, adds_special = request.prompt, True
        if text is None:
            text, adds_special = prompt_text(self._tokenizer, request.messages)
        prompt = self._tokenizer(text, add_special_tokens=adds_special)["input_ids"]
        params = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            seed=request.seed,
            output_kind=kinds.DELTA,
        )
        pieces: list[str] = []
        num_tokens, reason = 0, None
        try:
            async for output in self._engine.generate(
                prompt=vllm.TokensPrompt(prompt_token_ids=prompt),
                sampling_params=params,
                request_id=str(next(self._numbers)),
            ):
                new = output.outputs[0]
                pieces.append(new.text)
                num_tokens += len(new.token_ids)
                reason = new.finish_reason or reason
                METER.add("tokens", len(new.token_ids))
                self._watchdog.progress()
        except ValueError as error:
            raise RequestError(f"vLLM refused the prompt: {error}") from error
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
        METER.add("prompt_tokens", len(prompt))
        self._counts["requests"] += 1
        self._counts["tokens"] += num_tokens
        self._counts["prompt_tokens"] += len(prompt)
        return Completion(
            text="".join(pieces),
            finish_reason="length" if reason == "length" else "stop",
            prompt_tokens=len(prompt),
            completion_tokens=num_tokens,
        )


def options_of(spec: EngineSpec, num_sharing: int) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` for one of ``num_sharing`` engines on the same GPU.

    vLLM reserves its share of the whole card when it starts, no matter what others have reserved,
    and refuses to start where that much is not free.
    """
    options: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel,
    }
    if spec.quantize != "none":
        options["quantization"] = "bitsandbytes"
    if num_sharing > 1:
        options["gpu_memory_utilization"] = _MEMORY_SHARE / num_sharing
    return options


def workers_per_gpu() -> int:
    """How many workers of this run share the GPU of this one, as its executor says."""
    said = variable(WORKERS_PER_GPU) or ""
    return int(said) if said.isdigit() and int(said) else 1
