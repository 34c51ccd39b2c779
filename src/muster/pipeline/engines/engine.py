"""The small interface behind every text generation engine, and the engines by name.

An engine-level failure (``EngineError``) is not the prompt's fault: the engine is started again
and the request repeated. A request-level failure (``RequestError``) is recorded with its record.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from muster.base.errors import MusterError, TargetError, UnknownNameError, cause_of
from muster.base.modules import load_plugin, plugins
from muster.base.shown_text import count
from muster.pipeline.stages import EngineError as EngineError

if TYPE_CHECKING:
    import asyncio


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled; ``temperature`` 0 is greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt: ``messages`` (the model's own chat template is applied) or a plain ``prompt``.

    ``seed`` alone decides the sample: not the batch, the order or the engine's history.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: Sampling = Sampling()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer. ``finish_reason``: ``stop`` (end token or stop text) or ``length``."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class RequestError(Exception):
    """This prompt cannot be answered (too long, refused by the server): record it and go on."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine, its model, and its options. Equal specs share one engine in a worker.

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
    """A text generator. ``open_engine(spec)`` makes one; it is used from one event loop."""

    #: How many requests it likes to have at once, to be always busy.
    concurrency: int

    async def start(self, device: str) -> None:
        """Load the model or reach the server; raises SetupError with what to install or start."""

    async def generate(self, request: Request) -> Completion:
        """Return a completion; raises RequestError or EngineError."""

    def stats(self) -> Mapping[str, Any]:
        """Numbers since the start: requests, tokens, batches, batch size now, retries."""

    async def stop(self) -> None: ...


T = TypeVar("T")


class Watchdog:
    """Finds a hang: requests in flight, and no token or answer for ``timeout_s`` seconds."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = time.monotonic()
        self._num_waiting = 0

    def progress(self) -> None:
        """Note that a token or an answer has come. Any thread may call it."""
        self._last_s = time.monotonic()

    async def wait(self, answer: asyncio.Future[T]) -> T:
        """The result of ``answer``; EngineError (and ``answer`` cancelled) after a hang."""
        import asyncio

        if self._num_waiting == 0:
            self.progress()
        self._num_waiting += 1
        try:
            while not answer.done():
                left_s = self._last_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise EngineError(
                        f"The engine hangs: no token and no answer for {self._timeout_s:g} s with "
                        f"{count(self._num_waiting, 'request')} in flight."
                    )
                await asyncio.wait({answer}, timeout=left_s)
            return answer.result()
        finally:
            self._num_waiting -= 1
            answer.cancel()


ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "muster.pipeline.engines.local:TransformersEngine",
        "vllm": "muster.pipeline.engines.vllm_offline:VllmEngine",
        "openai": "muster.pipeline.engines.remote:OpenAiEngine",
    }
)


_ASKED = ("concurrency", "start", "generate", "stats", "stop")


def check_engine(name: str) -> None:
    """UnknownNameError for a name that means no engine; nothing is imported."""
    if name not in ENGINES and name not in plugins("engine"):
        raise UnknownNameError("engine", name, {*ENGINES, *plugins("engine")})


def open_engine(spec: EngineSpec) -> Engine:
    """An engine that has not been started. Raises UnknownNameError, UsageError, SetupError, and
    TargetError for one of an installed package that cannot be loaded or made.
    """
    check_engine(spec.engine)
    if spec.engine in ENGINES:
        module, _, name = ENGINES[spec.engine].partition(":")
        engine: Engine = getattr(importlib.import_module(module), name)(spec)
        return engine
    kind = load_plugin("engine", spec.engine)
    try:
        engine = kind(spec)
    except MusterError:
        raise
    except Exception as error:
        raise TargetError(
            f"The engine {spec.engine} cannot be made: {cause_of(error, kind)}.",
            hint="a class takes an EngineSpec: def __init__(self, spec) -> None.",
        ) from error
    missing = [name for name in _ASKED if not hasattr(engine, name)]
    if missing:
        raise TargetError(
            f"The engine {spec.engine} has no {', '.join(missing)}.",
            hint="muster.generation.Engine says what an engine is asked for.",
        )
    return engine


@dataclass
class _Entry:
    engine: Engine
    lock: asyncio.Lock
    users: int = 0
    is_started: bool = False


_ENTRIES: dict[tuple[EngineSpec, str], _Entry] = {}


class Lent:
    """A shared engine as one of its users holds it, until ``close``."""

    def __init__(self, key: tuple[EngineSpec, str], engine: Engine) -> None:
        self.engine = engine
        self._key = key
        self._is_open = True

    async def close(self) -> None:
        """Release the engine; the last user's ``close`` stops it. It may be called again."""
        if not self._is_open:
            return
        self._is_open = False
        await _give_back(self._key)


async def shared(spec: EngineSpec, device: str) -> Lent:
    """The started engine of this spec on this device, loaded at most once in this process.

    All users of an engine are on one event loop. Raises what ``open_engine`` and ``start`` raise.
    """
    import asyncio

    key = (spec, device)
    entry = _ENTRIES.get(key)
    if entry is None:
        entry = _ENTRIES[key] = _Entry(open_engine(spec), asyncio.Lock())
    entry.users += 1
    try:
        async with entry.lock:
            if not entry.is_started:
                await entry.engine.start(device)
                entry.is_started = True
    except BaseException:
        await _give_back(key)
        raise
    return Lent(key, entry.engine)


async def _give_back(key: tuple[EngineSpec, str]) -> None:
    entry = _ENTRIES[key]
    entry.users -= 1
    if entry.users == 0:
        del _ENTRIES[key]
        await entry.engine.stop()
