"""A model and its tokenizer from a Hugging Face name or folder, in the precision asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, SetupError, UsageError
from muster.pipeline.engines.engine import EngineSpec, Message
from muster.pipeline.sources.hub import use_cache_if_unreachable

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """``max_positions``: tokens of prompt and answer together; None where there is no limit."""

    model: Any
    tokenizer: Any
    end_tokens: frozenset[int]
    max_positions: int | None


def check(spec: EngineSpec) -> None:
    """Raises UsageError or SetupError for what can be seen without a model."""
    if not spec.model:
        raise UsageError(
            "No model is named.", hint="write --model with a Hugging Face name or a folder."
        )
    if spec.dtype not in DTYPES:
        raise UsageError(
            f"The engine transformers has no dtype {spec.dtype!r}.",
            hint=f"write one of {', '.join(DTYPES)}.",
        )
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackageError("The engine transformers", "transformers", "transformers")
    if spec.quantize != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError(f"--quantize {spec.quantize}", "bitsandbytes", "quantize")


def load(spec: EngineSpec, device: str) -> Loaded:
    """The model on ``device``, ready to answer. Raises SetupError."""
    import torch

    if spec.quantize != "none" and not device.startswith("cuda"):
        raise UsageError(
            f"--quantize {spec.quantize} works on CUDA devices only, not on {device}.",
            hint="leave --quantize out.",
        )
    dtype = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": dtype}
    if not Path(spec.model).exists():
        use_cache_if_unreachable()
    if spec.quantize != "none":
        options["quantization_config"] = _quantization(spec.quantize)
        options["device_map"] = {"": device}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(spec.model, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SetupError(
            f"The model {spec.model!r} cannot be loaded: {_first_lines(error)}",
            hint=_hint_for(spec.model),
        ) from error
    if spec.quantize == "none":
        model = model.to(device)
    model.eval()
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        end_tokens=_end_tokens(model, tokenizer),
        max_positions=_max_positions(model),
    )


def prompt_text(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, bool]:
    """The prompt for a chat, and whether the tokenizer is to add its special tokens.

    The tokenizer's own template writes them; without a template the contents of the messages
    stand one after the other with an empty line between, and no roles are made up.
    """
    if getattr(tokenizer, "chat_template", None):
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text, False
    return "\n\n".join(message["content"] for message in messages), True


def _quantization(kind: str) -> Any:
    import torch

    transformers: Any = importlib.import_module("transformers")
    if kind == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Of the model's generation settings, which may be several, and of the tokenizer."""
    named = model.generation_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _max_positions(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _hint_for(model: str) -> str:
    folder = Path(model)
    if folder.is_dir():
        return f"{folder} must hold config.json, the weights and the tokenizer's files."
    return (
        "check the name or the folder; a machine without network needs the model downloaded "
        "before (hf download NAME)."
    )
