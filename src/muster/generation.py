"""What a stage needs to ask a language model; see docs/engines.md.

lent = await generation.shared(EngineSpec(model="..."), device)
completion = await lent.engine.generate(Request(prompt="...", seed=1))
"""

from __future__ import annotations

from muster.pipeline.engines.model import (
    Completion,
    Engine,
    EngineError,
    EngineSpec,
    Message,
    Request,
    RequestError,
    Sampling,
)
from muster.pipeline.engines.table import Lent, shared
from muster.pipeline.meter import METER

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
