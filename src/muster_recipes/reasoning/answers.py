r"""What a model wrote, taken apart: its thinking, its solution and the final answer.

Pure functions of text. The final answer is the content of the last ``\boxed{…}`` (or ``\fbox{…}``)
with balanced braces, else what follows the last ``####`` on its line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: A box with a brace, or a bare one around a number or a letter: ``\boxed 7``.
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(\d[\d.,/]*|[A-Za-z](?![A-Za-z])))")
#: Escaped characters come first, so that they are skipped.
_BRACE = re.compile(r"\\[\s\S]|[{}]")
_MARK = "####"
_THINK = re.compile(r"<(/?)(?:think|thinking)>", re.IGNORECASE)


class Written(NamedTuple):
    """``thinking`` is what stood between thinking marks, ``reasoning`` everything else."""

    reasoning: str
    thinking: str


def separate_thinking(text: str) -> Written:
    """Divide ``text`` at ``<think>`` and ``</think>``; both parts are stripped at their ends.

    A block without an end goes on to the end of the text: the model was cut while it thought.
    A lone ``</think>`` ends a block that began with the text: some chat templates write the
    opening mark into the prompt. Several blocks are joined by blank lines.
    """
    thinking: list[str] = []
    reasoning: list[str] = []
    is_thinking, begin = False, 0
    for mark in _THINK.finditer(text):
        piece = text[begin : mark.start()]
        closes = bool(mark.group(1))
        if closes and not is_thinking and not thinking:
            thinking.append("".join(reasoning) + piece)
            reasoning.clear()
        else:
            (thinking if is_thinking else reasoning).append(piece)
        is_thinking, begin = not closes, mark.end()
    (thinking if is_thinking else reasoning).append(text[begin:])
    blocks = [block.strip() for block in thinking]
    return Written("".join(reasoning).strip(), "\n\n".join(block for block in blocks if block))


def find_answer(text: str) -> str | None:
    """The final answer in a solution without its thinking; None where there is none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed or None
    _, mark, rest = text.rpartition(_MARK)
    first_line = rest.strip().split("\n", 1)[0].strip() if mark else ""
    return first_line or None


def last_boxed(text: str) -> str | None:
    r"""The content of the last box whose braces balance, stripped; None without such a box.

    ``\{`` and ``\}`` are characters, not braces. A box inside a box is part of the outer one.
    """
    closing = _closing_braces(text)
    found, stop = None, 0
    for box in _BOX.finditer(text):
        if box.start() < stop:
            continue
        if box.group(1):
            found = box.group(1).rstrip(".,")
        elif (end := closing.get(box.end() - 1)) is not None:
            found, stop = text[box.end() : end].strip(), end
    return found


def _closing_braces(text: str) -> dict[int, int]:
    """Map each opening brace's place to that of its closing one, where there is one.

    One pass, because a model that repeats itself opens thousands of boxes.
    """
    pairs: dict[int, int] = {}
    waiting: list[int] = []
    for mark in _BRACE.finditer(text):
        if mark.group() == "{":
            waiting.append(mark.start())
        elif mark.group() == "}" and waiting:
            pairs[waiting.pop()] = mark.start()
    return pairs
