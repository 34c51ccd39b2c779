"""One try at a solution, and which of two is better. Pure functions.

A version is a JSON object: round, reasoning, thinking, answer, finish_reason, verification, scores,
ungraded, quality, feedback. A record shows its best version at the top and all of them in
``versions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.generation import Completion
from muster_recipes.reasoning.answers import find_answer, separate_thinking
from muster_recipes.reasoning.grades import Grades, quality_of, quality_without_grades
from muster_recipes.reasoning.verify import Verification

Version = dict[str, Any]
#: What a record shows of its best version.
_SHOWN = ("reasoning", "thinking", "answer", "verification", "scores", "ungraded", "quality")


def written(completion: Completion, round: int) -> Version:
    """A version as it comes from the model, neither verified nor graded."""
    text = separate_thinking(completion.text)
    return {
        "round": round,
        "reasoning": text.reasoning,
        "thinking": text.thinking,
        "answer": find_answer(text.reasoning),
        "finish_reason": completion.finish_reason,
        "verification": None,
        "scores": None,
        "ungraded": None,
        "quality": None,
        "feedback": None,
    }


def judged(version: Version, verification: Verification, grades: Grades | None) -> Version:
    """The version with its verdict. ``grades`` None: nobody was asked (``--grading off``)."""
    if grades is None:
        return {
            **version,
            "verification": verification,
            "ungraded": False,
            "quality": quality_without_grades(verification),
        }
    return {
        **version,
        "verification": verification,
        "scores": grades.scores,
        "ungraded": not grades.is_complete,
        "quality": quality_of(grades.scores, verification),
        "feedback": grades.feedback or None,
    }


def is_better(new: Version, old: Version) -> bool:
    """Whether ``new`` has the higher quality; a verified answer never gives way to another.

    Where a quality is unknown, ``new`` is better only if its answer is verified and the old is not.
    """
    gains = new["verification"] == "correct" and old["verification"] != "correct"
    loses = old["verification"] == "correct" and new["verification"] != "correct"
    if new["quality"] is None or old["quality"] is None:
        return gains and old["quality"] is None
    return bool(new["quality"] > old["quality"]) and not loses


def needs_work(version: Version, threshold: float) -> bool:
    """Whether its quality is below the threshold, or unknown with an answer that is wrong."""
    if version["quality"] is None:
        return bool(version["verification"] == "wrong")
    return bool(version["quality"] < threshold)


def is_accepted(record: Mapping[str, Any], threshold: float) -> bool:
    """Whether it is good enough to train on: of quality from the threshold on, and not wrong."""
    quality = record.get("quality")
    return quality is not None and quality >= threshold and record["verification"] != "wrong"


def shown(record: Mapping[str, Any], best: Version, versions: list[Version]) -> dict[str, Any]:
    """The record with its best version on top and all versions in the order they were tried."""
    return {**record, **{name: best[name] for name in _SHOWN}, "versions": versions}
