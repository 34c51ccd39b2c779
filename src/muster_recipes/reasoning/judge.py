"""Verification against the reference answer and the model's grades, for one version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from muster import Reject
from muster.generation import EngineSpec, Sampling
from muster_recipes.reasoning import prompts, referee
from muster_recipes.reasoning.answers import separate_thinking
from muster_recipes.reasoning.asking import Asking, reference_of, required, seed_for, spent
from muster_recipes.reasoning.grades import Grades, parse_grades
from muster_recipes.reasoning.host import Host
from muster_recipes.reasoning.verify import verify
from muster_recipes.reasoning.versions import Version, judged


class Judge:
    """Verification and grades of one version."""

    def __init__(
        self,
        spec: EngineSpec,
        sampling: Sampling,
        grading: Literal["model", "off"],
        seed: int,
        host: Host,
    ) -> None:
        self._asking = Asking(spec, host) if grading == "model" else None
        self._sampling = sampling
        self._seed = seed
        self._referee: referee.Referee | None = None

    @property
    def concurrency(self) -> int:
        return 1 if self._asking is None else self._asking.concurrency

    async def open(self, device: str) -> None:
        self._referee = referee.borrow()
        if self._asking is not None:
            await self._asking.open(device)

    async def judge(
        self, record: Mapping[str, Any], version: Version, tokens: dict[str, int]
    ) -> tuple[Version, dict[str, int]]:
        """The version with its verdict, and the record's tokens with those of the grades."""
        assert self._referee is not None, "setup comes first"
        problem, reference = required(record, "problem"), reference_of(record)
        compare = self._referee.compare
        verdict = await asyncio.to_thread(verify, version["answer"], reference, problem, compare)
        grades: Grades | None = None
        if self._asking is not None:
            messages = prompts.grade(problem, version["reasoning"], verdict)
            seed = seed_for(self._seed, record, "evaluate", version["round"])
            try:
                completion = await self._asking.ask(messages, self._sampling, seed)
            except Reject:  # such as a solution that is too long to be graded: it stays ungraded
                return judged(version, verdict, parse_grades("")), tokens
            grades = parse_grades(separate_thinking(completion.text).reasoning)
            tokens = spent({"tokens": tokens}, completion)
        return judged(version, verdict, grades), tokens

    async def close(self) -> None:
        if self._referee is not None:
            self._referee = None
            referee.give_back()
        if self._asking is not None:
            await self._asking.close()
