"""The stages of the recipe. Each is an ordinary stage of ``muster map`` and may be used alone.

    Read       raw row            → id, problem, reference_answer
    Generate   problem            → one solution
    Evaluate   solution           → verification, scores, quality
    Improve    a weak solution    → up to max_iterations more, the best one on top
    Finish     keeps the accepted ones, and the columns in their order

Stages with equal ``engine`` share one engine in a worker. The seed of every sample derives from the
seed of the run, the record's id, the stage and the round.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from muster import Reject
from muster.generation import Completion, EngineSpec, Sampling
from muster_recipes.reasoning import prompts, referee
from muster_recipes.reasoning.answers import separate_thinking
from muster_recipes.reasoning.grades import Grades, parse_grades
from muster_recipes.reasoning.host import Asking, Host, reference_of, required, seed_for, spent
from muster_recipes.reasoning.rows import read_row
from muster_recipes.reasoning.verify import verify
from muster_recipes.reasoning.versions import (
    Version,
    is_accepted,
    is_better,
    judged,
    needs_work,
    shown,
    written,
)

_COLUMNS = (
    "id", "problem", "reference_answer", "reasoning", "thinking", "answer", "verification",
    "scores", "ungraded", "quality", "iterations", "versions", "tokens", "model", "engine",
    "sampling",
)  # fmt: skip
_ENGINE = EngineSpec()
_HOST = Host()
_SOLUTIONS = Sampling(temperature=0.6, top_p=0.95, max_tokens=4096)
_GRADES = Sampling(temperature=0.3, top_p=0.95, max_tokens=4096)


@dataclass(kw_only=True)
class Read:
    """Make problems of the rows of a data set.

    ``layout``: a key of ``rows.LAYOUTS``, or empty for columns by name: ``problem_column``
    ("problem") and ``answer_column`` ("answer" where there is one).
    """

    layout: str = ""
    problem_column: str = ""
    answer_column: str = ""

    def process(self, batch: list[dict[str, Any]]) -> list[dict[str, Any] | Reject]:
        return [self._one(row) for row in batch]

    def _one(self, row: dict[str, Any]) -> dict[str, Any] | Reject:
        try:
            read = read_row(row, self.layout, self.problem_column, self.answer_column)
        except Reject as error:
            return error
        return {"id": row["id"], **read} if "id" in row else read


@dataclass(kw_only=True)
class _Asks:
    """What the stages that ask a model have in common.

    They open their ``parts`` in order, close them in reverse, and take as many records at once as
    the first asks for.
    """

    engine: EngineSpec = _ENGINE
    seed: int = 0
    host: Host = _HOST
    timestamps: bool = False

    def __post_init__(self) -> None:
        self.parts: tuple[Asking | Judge, ...] = ()

    @property
    def concurrency(self) -> int:
        return self.parts[0].concurrency

    async def setup(self, device: str) -> None:
        for part in self.parts:
            await part.open(device)

    async def close(self) -> None:
        for part in reversed(self.parts):
            await part.close()


@dataclass(kw_only=True)
class Generate(_Asks):
    """Generate a step-by-step solution of ``problem``."""

    sampling: Sampling = _SOLUTIONS

    def __post_init__(self) -> None:
        self._asking = Asking(self.engine, self.host)
        self.parts = (self._asking,)

    async def process_one(self, record: dict[str, Any]) -> dict[str, Any]:
        problem = required(record, "problem")
        seed = seed_for(self.seed, record, "generate", 0)
        completion = await self._asking.ask(prompts.solve(problem), self.sampling, seed)
        version = written(completion, 0)
        made = {
            **shown(record, version, [version]),
            "iterations": 0,
            "tokens": spent(record, completion),
            "model": self.engine.model,
            "engine": self.engine.engine,
            "sampling": {**_settings(self.sampling), "seed": self.seed},
        }
        return _stamped(made, "generated", self.timestamps)


@dataclass(kw_only=True)
class Evaluate(_Asks):
    """Verify the answer of a solution against the reference, and have the model grade it.

    ``grading`` off asks no model, and needs none.
    """

    sampling: Sampling = _GRADES
    grading: Literal["model", "off"] = "model"

    def __post_init__(self) -> None:
        self._judge = Judge(self.engine, self.sampling, self.grading, self.seed, self.host)
        self.parts = (self._judge,)

    async def process_one(self, record: dict[str, Any]) -> dict[str, Any]:
        versions: list[Version] = record.get("versions") or [_version_in(record)]
        version, tokens = await self._judge.judge(record, versions[-1], spent(record))
        made = {
            **shown(record, version, [*versions[:-1], version]),
            "iterations": record.get("iterations", 0),
            "tokens": tokens,
        }
        return _stamped(made, "evaluated", self.timestamps)


@dataclass(kw_only=True)
class Improve(_Asks):
    """Rewrite solutions below ``quality_threshold`` with feedback; the better one is kept.

    Every rewritten version is evaluated like the first one. At most ``max_iterations`` rounds,
    each from the best version so far.
    """

    sampling: Sampling = _SOLUTIONS
    eval_sampling: Sampling = _GRADES
    grading: Literal["model", "off"] = "model"
    quality_threshold: float = 0.8
    max_iterations: int = 2

    def __post_init__(self) -> None:
        self._asking = Asking(self.engine, self.host)
        self._judge = Judge(self.engine, self.eval_sampling, self.grading, self.seed, self.host)
        self.parts = (self._asking, self._judge)

    async def process_one(self, record: dict[str, Any]) -> dict[str, Any]:
        versions: list[Version] = list(record.get("versions") or [_version_in(record)])
        best, tokens = versions[-1], spent(record)
        rounds = 0
        while rounds < self.max_iterations and needs_work(best, self.quality_threshold):
            rounds += 1
            try:
                new, tokens = await self._rewrite(record, best, rounds, tokens)
            except Reject:  # the feedback made the prompt too long: the best version so far stays
                break
            versions.append(new)
            if is_better(new, best):
                best = new
        made = {**shown(record, best, versions), "iterations": rounds, "tokens": tokens}
        return _stamped(made, "improved", self.timestamps)

    async def _rewrite(
        self, record: Mapping[str, Any], best: Version, round: int, tokens: dict[str, int]
    ) -> tuple[Version, dict[str, int]]:
        feedback = prompts.feedback_of(best["scores"], best["verification"], best["feedback"] or "")
        messages = prompts.improve(required(record, "problem"), best["reasoning"], feedback)
        seed = seed_for(self.seed, record, "improve", round)
        completion = await self._asking.ask(messages, self.sampling, seed)
        tokens = spent({"tokens": tokens}, completion)
        return await self._judge.judge(record, written(completion, round), tokens)


@dataclass(kw_only=True)
class Finish:
    """Order the columns; with ``keep`` accepted, drop records not good enough to train on."""

    keep: Literal["all", "accepted"] = "all"
    quality_threshold: float = 0.8

    def process(self, batch: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        return [self._one(record) for record in batch]

    def _one(self, record: dict[str, Any]) -> dict[str, Any] | None:
        if self.keep == "accepted" and not is_accepted(record, self.quality_threshold):
            return None
        made = {name: record.get(name) for name in _COLUMNS}
        if "timestamps" in record:
            made["timestamps"] = record["timestamps"]
        return made


def _version_in(record: Mapping[str, Any]) -> Version:
    """A solution that another program wrote into the column ``reasoning``."""
    text = required(record, "reasoning")
    completion = Completion(text=text, finish_reason="stop", prompt_tokens=0, completion_tokens=0)
    version = written(completion, 0)
    return {**version, "answer": record.get("answer", version["answer"])}


def _settings(sampling: Sampling) -> dict[str, Any]:
    settings = dataclasses.asdict(sampling)
    if not settings.pop("stop"):
        return settings
    return {**settings, "stop": list(sampling.stop)}


def _stamped(record: dict[str, Any], name: str, is_on: bool) -> dict[str, Any]:
    if not is_on:
        return record
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {**record, "timestamps": {**record.get("timestamps", {}), name: now}}


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
