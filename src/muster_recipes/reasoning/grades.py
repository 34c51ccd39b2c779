"""A model's grades of a solution: read strictly, never guessed.

A grade that is missing, malformed or out of range is None and makes the solution ``ungraded``;
it is never taken as 0, which would be a statement about the solution.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: The criteria and their weights in the quality, which sum to 1.
WEIGHTS: Mapping[str, float] = {
    "correctness": 0.4,
    "step_by_step_clarity": 0.2,
    "logical_coherence": 0.2,
    "mathematical_precision": 0.2,
}
#: The quality of a solution whose answer was compared and found wrong is at most this.
WRONG_CAP = 0.5
_DIGITS = 4  # of a quality: enough to tell solutions apart, few enough to print

Scores = dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Grades:
    """``scores`` has all criteria. ``feedback``: what the grader said in words."""

    scores: Scores
    feedback: str

    @property
    def is_complete(self) -> bool:
        return all(score is not None for score in self.scores.values())


def parse_grades(text: str) -> Grades:
    """Read a grader's answer: the last JSON object with at least one criterion in it.

    It may stand alone, in a fenced block, inside another object or between sentences. Without a
    ``feedback`` string in it, the text around it is the feedback.
    """
    scores: Scores = dict.fromkeys(WEIGHTS)
    feedback = text.strip()
    for found, begin, end in _objects(text):
        scores = {name: _score(found.get(name)) for name in WEIGHTS}
        words = found.get("feedback")
        feedback = words.strip() if isinstance(words, str) else _around(text, begin, end)
    return Grades(scores=scores, feedback=feedback)


def quality_of(scores: Mapping[str, float | None], verification: str) -> float | None:
    """The weighted sum, capped for a wrong answer; None when a score is missing."""
    total = 0.0
    for name, weight in WEIGHTS.items():
        score = scores.get(name)
        if score is None:
            return None
        total += weight * score
    return round(min(total, WRONG_CAP) if verification == "wrong" else min(total, 1.0), _DIGITS)


def quality_without_grades(verification: str) -> float | None:
    """``--grading off``: 1 for a verified answer, 0 for a wrong one or none, else unknown."""
    return {"correct": 1.0, "wrong": 0.0, "unparsed": 0.0}.get(verification)


def _score(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The JSON objects in ``text`` that hold a criterion, with their places."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            found, end = None, place
        if isinstance(found, dict) and any(name in found for name in WEIGHTS):
            yield found, place, end
            place = text.find("{", end)
        else:
            place = text.find("{", place + 1)


def _around(text: str, begin: int, end: int) -> str:
    before = text[:begin].rstrip().removesuffix("```json").removesuffix("```")
    after = text[end:].lstrip().removeprefix("```")
    return "\n".join(part for part in (before.strip(), after.strip()) if part)
