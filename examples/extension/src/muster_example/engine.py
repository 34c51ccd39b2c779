"""An engine: ``EngineSpec(engine="echo")``. It answers with the prompt, in capitals."""

from collections.abc import Mapping
from typing import Any

from muster.generation import Completion, EngineSpec, Request, RequestError


class Echo:
    concurrency = 8

    def __init__(self, spec: EngineSpec) -> None:
        self._num_requests = 0

    async def start(self, device: str) -> None:
        """Here a model is loaded, or a server reached."""

    async def generate(self, request: Request) -> Completion:
        if request.prompt is None:
            raise RequestError("echo answers plain prompts only")
        self._num_requests += 1
        words = request.prompt.upper().split()
        kept = words[: request.sampling.max_tokens]
        return Completion(
            text=" ".join(kept),
            finish_reason="stop" if len(kept) == len(words) else "length",
            prompt_tokens=len(words),
            completion_tokens=len(kept),
        )

    def stats(self) -> Mapping[str, Any]:
        return {"requests": self._num_requests}

    async def stop(self) -> None:
        """Here the model is let go."""
