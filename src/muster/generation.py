"""What a stage needs to ask a language model, and to load from the Hugging Face hub.

See docs/engines.md.

lent = await generation.shared(EngineSpec(model="..."), device)
completion = await lent.engine.generate(Request(prompt="...", seed=1))
"""

from __future__ import annotations

from muster.pipeline.engines.answers import on_device
from muster.pipeline.engines.engine import (
    Completion,
    Engine,
    EngineError,
    EngineSpec,
    Lent,
    Message,
    Request,
    RequestError,
    Sampling,
    check_engine,
    shared,
)
from muster.pipeline.sources.hub import is_hub_reachable, use_cache_if_unreachable
from muster.pipeline.stages import METER

__all__ = [
    "METER",
    "Completion",
    "Engine",
    "EngineError",
    "EngineSpec",
    "Lent",
    "Message",
    "Request",
    "RequestError",
    "Sampling",
    "check_engine",
    "is_hub_reachable",
    "on_device",
    "shared",
    "use_cache_if_unreachable",
]
