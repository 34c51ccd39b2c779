"""Is the final answer the reference answer? Cheap rules first, the ``math-verify`` library last."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

Verification = Literal["correct", "wrong", "unparsed", "no_reference"]
#: (answer, reference) -> are they equal; None: one of them cannot be read, or only in too long.
Compare = Callable[[str, str], bool | None]

_CHOICES_TITLE = "Answer choices:"
_LETTERS = "ABCDEFGH"
#: `B`, `(b)`, `B.`, `B) 21`, `Option B`; and not `a = 5`.
_LETTER = re.compile(r"(?:option |choice |answer )?\(?([A-H])(?:\)?[.:]?$|[).:] )", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;:> ]|\\(?:left|right)(?![a-zA-Z])|~")
#: Words behind a number and a space: `18 apples`, `3 km/h`, `5 square units`, `7 in^2`.
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ /.]+[A-Za-z]+)*(?:\^\{?[23]\}?|[²³])?\.?")
#: Without a space, letters may be variables: only these are units there.
_UNITS = re.compile(
    r"(?:mm|cm|dm|km|kg|mg|mL|ml|km/h|m/s|hrs?|min|ft|in|lb|oz)(?:\^\{?[23]\}?|[²³])?\.?"
)
#: Words that change a number, or are mathematics.
_NO_UNIT = re.compile(
    r"\b(?:pi|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|mod|or|and|to|hundred|thousand|million|billion|"
    r"trillion|dozen|percent|half|halves)\b",
    re.IGNORECASE,
)


def verify(
    answer: str | None, reference: str | None, problem: str, compare: Compare
) -> Verification:
    """Compare a final answer with the reference of ``problem``, which may hold answer choices.

    ``unparsed``: there is no answer, or one of the two cannot be read as mathematics and they are
    not the same text.
    """
    if reference is None or not reference.strip():
        return "no_reference"
    if answer is None or not answer.strip():
        return "unparsed"
    choices = read_choices(problem)
    if choices and reference.strip().upper() in choices:
        return _verify_choice(answer, reference.strip().upper(), choices, compare)
    return _verdict(is_equal(answer, reference, compare))


def with_choices(problem: str, choices: dict[str, str]) -> str:
    """The text of a multiple-choice problem, as ``read_choices`` reads it."""
    return "\n".join(
        [problem.strip(), "", _CHOICES_TITLE, *(f"{k}) {v}" for k, v in choices.items())]
    )


def read_choices(problem: str) -> dict[str, str]:
    """Letter to text of the answer choices at the end of a problem; empty without choices."""
    _, title, listing = problem.rpartition(f"\n{_CHOICES_TITLE}\n")
    if not title:
        return {}
    lines = [line.split(") ", 1) for line in listing.split("\n")]
    return {pair[0]: pair[1] for pair in lines if len(pair) == 2 and pair[0] in _LETTERS}


def is_equal(answer: str, reference: str, compare: Compare) -> bool | None:
    """None where it cannot be told."""
    ours, theirs = tidy(answer), tidy(reference)
    if ours == theirs:
        return True
    if ours.casefold() == theirs.casefold() and len(ours) > 1:
        return True
    first, second = as_number(ours), as_number(theirs)
    if first is not None and second is not None:
        if first == second:
            return True
        if first.denominator == second.denominator == 1:
            return False
    # What is neither a number nor LaTeX is compared without its unit.
    return compare(_without_unit(ours), _without_unit(theirs))


def tidy(text: str) -> str:
    """Without what does not change an answer: `$`, text marks, spaces of LaTeX, a final stop."""
    text = text.strip().strip("$").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").replace("\\$", "").replace("$", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    text = _TEXT.sub(r"\1", text)
    text = _NOISE.sub(" ", text)
    return " ".join(text.split()).rstrip(".").strip()


def as_number(text: str) -> Fraction | None:
    """A plain decimal number, with commas between thousands and a unit behind it; else None."""
    match = _NUMBER.fullmatch(_without_unit(text))
    return None if match is None else Fraction(match.group().replace(",", ""))


def _without_unit(text: str) -> str:
    match = _NUMBER.match(text)
    if match is None:
        return text
    rest = text[match.end() :]
    is_unit = _WORDS.fullmatch(rest.strip()) if rest.startswith(" ") else _UNITS.fullmatch(rest)
    if is_unit and not _NO_UNIT.search(rest):
        return match.group()
    return text


def _verify_choice(
    answer: str, letter: str, choices: dict[str, str], compare: Compare
) -> Verification:
    """By the letter where one was given, else by the value of the choice."""
    text = tidy(answer)
    named = _LETTER.match(text)
    if named and named.group(1).upper() in choices:
        return "correct" if named.group(1).upper() == letter else "wrong"
    return _verdict(is_equal(text, choices[letter], compare))


def _verdict(equal: bool | None) -> Verification:
    if equal is None:
        return "unparsed"
    return "correct" if equal else "wrong"
