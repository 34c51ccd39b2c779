"""Generated arithmetic with worked steps: pure functions of (seed, split, index, difficulty).

    (17+25-8)*2          the problem: Python's own syntax and precedence
    17+25=42             its worked steps, one operation each
    42-8=34
    34*2=68
    #### 68              the answer, where GSM8K has it too

No problem is in two splits, whatever the seeds: its text decides which split may hold it.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

_MARK = "#### "
_SHARES = 16  # val and test may hold one sixteenth of all texts each
_SPLIT_OF_SHARE = {0: "test", 1: "val"}


@dataclass(frozen=True)
class Problem:
    """``text``: an expression. ``steps``: such as ``3+4=7``, in order. ``answer``: its value."""

    text: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """The worked steps and the answer as the model is to write them."""
        return "\n".join([*self.steps, f"{_MARK}{self.answer}"])


def prompt(text: str) -> str:
    """The text that the model continues with a solution and the end token."""
    return f"Q: {text}\nA: "


def read_answer(solution: str) -> int | None:
    """The number after the last ``####``, or None where there is none."""
    _, mark, rest = solution.rpartition(_MARK.strip())
    words = rest.split()
    if not mark or not words:
        return None
    try:
        return int(words[0])
    except ValueError:
        return None


def split_of(text: str) -> str:
    """The only split that may hold this problem."""
    return _SPLIT_OF_SHARE.get(zlib.crc32(text.encode()) % _SHARES, "train")


def make(seed: int, split: str, index: int, difficulty: int, max_value: int = 99) -> Problem:
    """Problem ``index`` of a split, with exactly ``difficulty`` operations."""
    stream = random.Random(f"arith-{seed}-{split}-{index}-{difficulty}-{max_value}")
    while True:
        problem = draw(stream, difficulty, max_value)
        if split_of(problem.text) == split:
            return problem


def draw(stream: random.Random, difficulty: int, max_value: int) -> Problem:
    """A problem whose numbers and results all lie from 0 to ``max_value``."""
    value = stream.randint(1, max_value)
    text, is_sum, steps = str(value), False, []
    for _ in range(difficulty):
        operation = stream.choice(_possible(value, max_value))
        if operation == "*":
            number = stream.randint(2, min(9, max_value // value))
            result = value * number
            text = f"({text})" if is_sum else text
        elif operation == "+":
            number = stream.randint(1, max_value - value)
            result = value + number
        else:
            number = stream.randint(1, value)
            result = value - number
        text = f"{text}{operation}{number}"
        is_sum = operation != "*"
        steps.append(f"{value}{operation}{number}={result}")
        value = result
    return Problem(text, tuple(steps), value)


def _possible(value: int, max_value: int) -> str:
    return (
        ("+" if value < max_value else "")
        + ("-" if value > 0 else "")
        + ("*" if 0 < 2 * value <= max_value else "")
    )
