"""What a stage needs to ask a language model; see docs/engines.md.

lent = await generation.shared(EngineSpec(model="..."), device)
completion = await lent.engine.generate(Request(prompt="...", seed=1))
"""

from __future__ import annotations

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
    shared,
)
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
    "shared",
]
