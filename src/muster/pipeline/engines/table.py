"""Engines by name, each imported on use; equal specs share one engine in a process."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from muster.base.errors import UnknownNameError
from muster.pipeline.engines.model import Engine, EngineSpec

ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "muster.pipeline.engines.local:TransformersEngine",
        "vllm": "muster.pipeline.engines.vllm_offline:VllmEngine",
        "openai": "muster.pipeline.engines.remote:OpenAiEngine",
    }
)


def open_engine(spec: EngineSpec) -> Engine:
    """An engine that has not been started. Raises UnknownNameError, UsageError, SetupError."""
    if spec.engine not in ENGINES:
        raise UnknownNameError("engine", spec.engine, ENGINES)
    module, _, name = ENGINES[spec.engine].partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)(spec)
    return engine


@dataclass
class _Entry:
    engine: Engine
    users: int = 0
    is_started: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_ENTRIES: dict[tuple[EngineSpec, str], _Entry] = {}


class Lent:
    """One user's hold on a shared engine."""

    def __init__(self, key: tuple[EngineSpec, str], engine: Engine) -> None:
        self.engine = engine
        self._key = key
        self._is_open = True

    async def close(self) -> None:
        """Give it back; the last user's ``close`` stops the engine. Twice is the same as once."""
        if not self._is_open:
            return
        self._is_open = False
        await _give_back(self._key)


async def shared(spec: EngineSpec, device: str) -> Lent:
    """The started engine of this spec on this device, loaded at most once in this process.

    All users of an engine are on one event loop. Raises what ``open_engine`` and ``start`` raise.
    """
    key = (spec, device)
    entry = _ENTRIES.get(key)
    if entry is None:
        entry = _ENTRIES[key] = _Entry(open_engine(spec))
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
