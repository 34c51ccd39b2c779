"""How a stage asks its engine, and how many tokens a record has spent there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from muster import Reject, seed_of
from muster.generation import (
    Completion,
    Engine,
    EngineSpec,
    Message,
    Request,
    RequestError,
    Sampling,
)
from muster_recipes.reasoning.host import Host, fitted, prepare

if TYPE_CHECKING:
    from muster.generation import Lent


class Asking:
    """One stage's use of an engine: it opens it, asks it and lets it go."""

    def __init__(self, spec: EngineSpec, host: Host) -> None:
        self._spec = spec
        self._host = host
        self._engine: Engine | None = None
        self._lent: Lent | None = None

    @property
    def concurrency(self) -> int:
        return 1 if self._engine is None else self._engine.concurrency

    async def open(self, device: str) -> None:
        from muster.generation import shared

        prepare(self._host, device)
        self._lent = await shared(fitted(self._spec, self._host, device), device)
        self._engine = self._lent.engine

    async def ask(self, messages: tuple[Message, ...], sampling: Sampling, seed: int) -> Completion:
        """Ask the engine. Raises Reject for a prompt that it refuses, EngineError if it breaks."""
        assert self._engine is not None, "setup comes first"
        try:
            return await self._engine.generate(
                Request(messages=messages, sampling=sampling, seed=seed)
            )
        except RequestError as error:
            raise Reject(f"the engine refused the prompt: {error}") from error

    async def close(self) -> None:
        lent, self._engine, self._lent = self._lent, None, None
        if lent is not None:
            await lent.close()


def required(record: Mapping[str, Any], column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str):
        raise Reject(f"there is no text in the column {column!r}; there are: {', '.join(record)}")
    return value


def reference_of(record: Mapping[str, Any]) -> str | None:
    value = record.get("reference_answer")
    return None if value is None else str(value)


def seed_for(run_seed: int, record: Mapping[str, Any], stage: str, round: int) -> int:
    """The seed of one sample; a record without id is known by its problem."""
    return seed_of(run_seed, str(record.get("id", record.get("problem"))), stage, round)


def spent(record: Mapping[str, Any], completion: Completion | None = None) -> dict[str, int]:
    """The tokens that were spent on a record, with those of ``completion``."""
    sums = record.get("tokens") or {"prompt": 0, "completion": 0}
    if completion is None:
        return dict(sums)
    return {
        "prompt": sums["prompt"] + completion.prompt_tokens,
        "completion": sums["completion"] + completion.completion_tokens,
    }
