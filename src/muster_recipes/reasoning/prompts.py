"""What the model is asked. Pure functions from texts to messages.

For solving and rewriting, the last message is the problem and nothing else: everything else is in
the system message. A model that reads only the last message then still solves the problem.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.generation import Message
from muster_recipes.reasoning.grades import WEIGHTS

#: A criterion below this is named in the feedback.
WEAK_BELOW = 0.7

_SOLVE = (
    "You solve mathematical problems. Work step by step: say what is asked, do one step at a time, "
    "give a reason for each step and check the result. "
    "End with the final answer alone in \\boxed{}."
)
_MEANING: Mapping[str, str] = {
    "correctness": "every step and the final answer are right",
    "step_by_step_clarity": "the steps are complete, in order and easy to follow",
    "logical_coherence": "each step follows from those before it",
    "mathematical_precision": "notation, units and terms are exact",
}
_GRADE = (
    "You grade solutions of mathematical problems. Give each criterion a number from 0 to 1:\n"
    + "\n".join(f"- {name}: {_MEANING[name]}" for name in WEIGHTS)
    + "\nAnswer with one JSON object and nothing else, in this form:\n{"
    + ", ".join(f'"{name}": 0.0' for name in WEIGHTS)
    + ', "feedback": "what is wrong and how to put it right"}'
    # A backslash in a JSON string is half an escape, and models forget to double it.
    "\nWrite the feedback in plain words, without LaTeX."
)
_VERDICTS: Mapping[str, str] = {
    "wrong": "The final answer is wrong.",
    "unparsed": "There is no final answer in \\boxed{} that can be read.",
}
_CHECKED: Mapping[str, str] = {**_VERDICTS, "correct": "The final answer is right."}


def solve(problem: str) -> tuple[Message, ...]:
    return (
        {"role": "system", "content": _SOLVE},
        {"role": "user", "content": problem},
    )


def grade(problem: str, solution: str, verification: str) -> tuple[Message, ...]:
    """The messages that ask for grades of a solution.

    The grader is told how the final answer compares with the reference, and not the reference: its
    words go to the model that writes the next version.
    """
    known = f"\n\nChecked: {_CHECKED[verification]}" if verification in _CHECKED else ""
    return (
        {"role": "system", "content": _GRADE},
        {"role": "user", "content": f"Problem:\n{problem}\n\nSolution:\n{solution}{known}"},
    )


def improve(problem: str, solution: str, feedback: str) -> tuple[Message, ...]:
    """The messages that ask for a better solution.

    They leave out the reference answer: a solution that only aims at it would teach nothing.
    """
    return (
        {
            "role": "system",
            "content": f"{_SOLVE}\n\nAn earlier solution of the problem:\n{solution}\n\n"
            f"What a reviewer said of it:\n{feedback}\n\n"
            "Write a better solution from the beginning. Do not mention the earlier one.",
        },
        {"role": "user", "content": problem},
    )


def feedback_of(scores: Mapping[str, float | None] | None, verification: str, words: str) -> str:
    """What to tell the model: the verdict, the criteria below 0.7, and the grader's words."""
    lines = [_VERDICTS[verification]] if verification in _VERDICTS else []
    for name, score in (scores or {}).items():
        if score is not None and score < WEAK_BELOW:
            lines.append(f"{name.replace('_', ' ')} {score:.2f} of 1: {_MEANING[name]}.")
    if words:
        lines.append(words)
    return "\n".join(lines) or "It can be better."
