"""The small interface behind every text generation engine.

An engine-level failure (``EngineError``) is not the prompt's fault: the engine is started again
and the request repeated. A request-level failure (``RequestError``) is recorded with its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """``temperature`` 0 is greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """Either ``messages`` (the model's own chat template is applied) or a plain ``prompt``.

    ``seed`` alone decides the sample: not the batch, the order or the engine's history.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: Sampling = Sampling()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """``finish_reason``: ``stop`` (end token or stop text) or ``length``."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class RequestError(Exception):
    """This prompt cannot be answered (too long, refused by the server): record it and go on."""


class EngineError(Exception):
    """The engine is broken or gone; its requests may be repeated on a fresh one."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which engine, which model, how. Equal specs share one engine in a worker.

    ``batch_size`` is the start for ``transformers``; ``concurrency`` the number of requests in
    flight for ``openai``. 0 means the engine's own default.
    """

    engine: str = "transformers"
    model: str = ""
    dtype: str = "auto"
    quantize: Literal["none", "8bit", "4bit"] = "none"
    batch_size: int = 0
    compile: bool = False
    base_url: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    timeout_s: float = 600.0
    tensor_parallel: int = 1


class Engine(Protocol):
    """Made by ``engines.table.open_engine(spec)``; used from one event loop."""

    #: How many requests it likes to have at once, to be always busy.
    concurrency: int

    async def start(self, device: str) -> None:
        """Load the model or reach the server; raises SetupError with what to install or start."""

    async def generate(self, request: Request) -> Completion:
        """Raises RequestError or EngineError."""

    def stats(self) -> Mapping[str, Any]:
        """Numbers since the start: requests, tokens, batches, batch size now, retries."""

    async def stop(self) -> None: ...
