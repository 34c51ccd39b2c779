"""An engine that answers from rules instead of a model: everything else about it is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from muster.pipeline.engines.engine import Completion, EngineSpec, Request, RequestError

Rule = Callable[[Request], str]
#: By name, because engines are made from their spec: ``spec.model`` is the name.
RULES: dict[str, Rule] = {}


class RuleEngine:
    """Answers ``RULES[spec.model](request)``, after letting other requests pass; a rule that
    returns the empty string refuses the request, and what a rule raises comes out.
    """

    #: Engines that have been started and not stopped.
    running = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.concurrency = spec.concurrency or 8
        self._rule = RULES[spec.model]
        self._num_requests = 0

    async def start(self, device: str) -> None:
        RuleEngine.running += 1

    async def generate(self, request: Request) -> Completion:
        self._num_requests += 1
        await asyncio.sleep(0)
        text = self._rule(request)
        if not text:
            raise RequestError("the prompt has 9 tokens, and there are 8 positions")
        prompt = sum(len(message["content"].split()) for message in request.messages)
        return Completion(
            text=text,
            finish_reason="stop",
            prompt_tokens=prompt,
            completion_tokens=len(text.split()),
        )

    def stats(self) -> Mapping[str, Any]:
        return {"requests": self._num_requests}

    async def stop(self) -> None:
        RuleEngine.running -= 1
