"""A model with its tokenizer, and answers while they are written, token by token."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from muster.base.errors import MissingPackageError, SetupError, UsageError
from muster.pipeline.engines.engine import EngineSpec, Message, Request, RequestError, Sampling
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
    """Raise UsageError or SetupError for mistakes that show without a model."""
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
    """Load the model to ``device``, ready to answer. Raises SetupError where that fails."""
    import torch

    if spec.quantize != "none" and not device.startswith("cuda"):
        raise UsageError(
            f"--quantize {spec.quantize} works on CUDA devices only, not on {device}.",
            hint="leave --quantize out.",
        )
    dtype = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": dtype, **on_device(device)}
    if not Path(spec.model).exists():
        use_cache_if_unreachable()
    if spec.quantize != "none":
        options["quantization_config"] = _quantization(spec.quantize)
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


def on_device(device: str) -> dict[str, Any]:
    """Options of ``from_pretrained`` that read the weights straight onto a CUDA device.

    Without them every worker of a machine holds a whole model in its main memory first. They need
    the package accelerate; the model is moved as it was before where that is missing.
    """
    if not device.startswith("cuda") or importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}


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
    """The end tokens of the model's generation settings, which may name several, and the
    tokenizer's.
    """
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


Decode = Callable[[Sequence[int]], str]
#: A character whose bytes are not all there yet is shown as this.
_INCOMPLETE = "\ufffd"


class StopText:
    """Looks for stop texts in tokens that come one by one, without decoding all of them again.

    A few tokens before the new ones are decoded with them and taken off again, because many
    tokenizers write a token otherwise at the beginning of a text.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._decode = decode
        self._context = self._read = 0  # tokens[context:read] stand before the new ones
        self.text = ""

    def is_found(self, tokens: Sequence[int]) -> bool:
        """Whether a stop text is in ``tokens``, all so far; ``text`` then ends before it."""
        before = self._decode(tokens[self._context : self._read])
        after = self._decode(tokens[self._context :])
        if after.endswith(_INCOMPLETE):
            return False
        self._context, self._read = self._read, len(tokens)
        begin = max(0, len(self.text) - self._longest + 1)
        self.text += after[len(before) :]
        places = [at for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        return bool(places)


@dataclass(eq=False)
class Answer:
    """An answer in progress. ``limit``: its most ``tokens``, which do not count the prompt's."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    limit: int
    end_tokens: frozenset[int]
    decode: Decode
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    text: str = ""
    _stop: StopText | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the tokens; when they are drawn again they are the same."""
        stops = self.sampling.stop
        self.tokens, self.finish_reason = [], None
        self._stop = StopText(stops, self.decode) if stops else None

    @property
    def length(self) -> int:
        """The number of its tokens with the prompt's."""
        return len(self.prompt) + len(self.tokens)

    def take(self, token: int) -> bool:
        """Append a token. True when the answer is complete; ``text`` is then set."""
        self.tokens.append(token)
        if token in self.end_tokens:
            self.finish_reason = "stop"
            self.text = self.decode(self.tokens)
        elif self._stop is not None and self._stop.is_found(self.tokens):
            self.finish_reason = "stop"
            self.text = self._stop.text
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
            self.text = self.decode(self.tokens)
        return self.finish_reason is not None


def window(lengths: Sequence[int], count: int) -> list[int]:
    """The places of the ``count`` requests to take, where the first waits longest.

    They are neighbours in the order of their lengths, so that little padding is needed, and the
    oldest is always among them, so that none waits forever. Of the windows that hold the oldest,
    the one with the smallest spread is taken.
    """
    if count >= len(lengths):
        return list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    at = order.index(0)
    begins = range(max(0, at - count + 1), min(at, len(order) - count) + 1)

    def spread(begin: int) -> int:
        return lengths[order[begin + count - 1]] - lengths[order[begin]]

    best = min(begins, key=spread)
    return sorted(order[best : best + count])


def prepared(request: Request, loaded: Loaded) -> Answer:
    """Tokenize a request. Raises RequestError for a prompt without tokens or with too many."""
    text, adds_special = request.prompt, True
    if text is None:
        text, adds_special = prompt_text(loaded.tokenizer, request.messages)
    prompt = list(loaded.tokenizer(text, add_special_tokens=adds_special)["input_ids"])
    if not prompt:
        raise RequestError("The prompt is empty.")
    limit = request.sampling.max_tokens
    if loaded.max_positions is not None:
        if len(prompt) >= loaded.max_positions:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; the model has room for "
                f"{loaded.max_positions} with the answer."
            )
        limit = min(limit, loaded.max_positions - len(prompt))
    return Answer(
        prompt=prompt,
        sampling=request.sampling,
        seed=request.seed,
        limit=max(1, limit),
        end_tokens=loaded.end_tokens,
        decode=lambda tokens: str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)),
    )
