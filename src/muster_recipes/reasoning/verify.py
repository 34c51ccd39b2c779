"""Compares the final answer with the reference: by cheap rules, then by ``math-verify``."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from muster_recipes.reasoning.units import (
    NUMBER,
    NotConvertible,
    OtherWords,
    Quantity,
    Unit,
    known,
    ratio,
    split,
)

Verification = Literal["correct", "wrong", "unparsed", "no_reference"]
#: (answer, reference) -> are they equal; None: one of them cannot be read, or only in too long.
Compare = Callable[[str, str], bool | None]

_CHOICES_TITLE = "Answer choices:"
_LETTERS = "ABCDEFGH"
#: `B`, `(b)`, `B.`, `B) 21`, `Option B`; and not `a = 5`.
_LETTER = re.compile(r"(?:option |choice |answer )?\(?([A-H])(?:\)?[.:]?$|[).:] )", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;:> ]|\\(?:left|right)(?![a-zA-Z])|~")
#: A sum of money: `\$5`, and `$5` without a second sign, which would mark mathematics.
_MONEY = re.compile(r"-?(?:\\\$|\$(?=[^$]*$))\s*[\d.]")
_ASKS_PERCENT = re.compile(r"(?<![\d%])\s(?:percent|percentage|per cent)\b|^percent", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"\b(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})\b")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")


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
    return _verdict(is_equal(answer, reference, compare, in_percent=asks_percent(problem)))


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


def asks_percent(problem: str) -> bool:
    """Whether the last two sentences of ``problem`` ask for a percentage, as in `what percent of`;
    `20 percent of 50` does not.
    """
    asked = " ".join(_SENTENCE.split(problem.strip())[-2:])
    return _ASKS_PERCENT.search(asked) is not None


def is_equal(
    answer: str, reference: str, compare: Compare, *, in_percent: bool = False
) -> bool | None:
    """Whether two answers are equal; None where that cannot be decided.

    A unit on one side alone is ignored. Units on both sides are converted where they measure the
    same; known ones that do not are different. A percent sign means hundredths, but where the
    answer is asked for ``in_percent``, a number without the sign is in percent as well.
    """
    ours, theirs = _read(answer), _read(reference)
    if ours == theirs:
        return True
    if ours.unit is not None and theirs.unit is None:
        theirs = _read(reference, letters=True)
    elif theirs.unit is not None and ours.unit is None:
        ours = _read(answer, letters=True)
    if ours.is_changed or theirs.is_changed:
        return None
    try:
        factor, is_sure = ratio(ours.unit, theirs.unit), True
    except OtherWords:
        factor, is_sure = Fraction(1), False  # apples and fruits, or gain and loss
    except NotConvertible:
        return None
    if factor is None:
        return False
    if not in_percent and ours.percent != theirs.percent:
        factor *= Fraction(1, 100) if ours.percent else 100
    equal = _same_value(ours.value, theirs.value, factor, compare)
    return None if equal and not is_sure else equal


def _same_value(ours: str, theirs: str, factor: Fraction, compare: Compare) -> bool | None:
    """Whether ``factor`` times the value of ``ours`` is that of ``theirs``."""
    if factor == 1 and (ours == theirs or (len(ours) > 1 and ours.casefold() == theirs.casefold())):
        return True
    first, second = as_number(ours), as_number(theirs)
    if first is not None and second is not None:
        if factor * first == second:
            return True
        if factor != 1 or first.denominator == second.denominator == 1:
            return False
    if factor != 1:
        ours = f"({ours}) \\cdot \\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return compare(_powers_of_ten(ours), _powers_of_ten(theirs))


def _powers_of_ten(text: str) -> str:
    """1e6 as the library reads it."""
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)


def _read(text: str, *, letters: bool = False) -> Quantity:
    """The value and unit of an answer; a sum of money has the unit that its sign means."""
    is_money = _MONEY.match(text.strip()) is not None
    found = split(tidy(text), letters=letters)
    if is_money and not found.percent and (found.unit is None or found.unit.meanings is None):
        return found._replace(unit=Unit(known("dollar")))
    return found


def tidy(text: str) -> str:
    """Strip what does not change an answer: `$`, text marks, spaces of LaTeX, a final stop."""
    text = text.strip().strip("$").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").replace("\\$", "").replace("$", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    text = _TEXT.sub(_plain_text, text)
    text = _NOISE.sub(" ", text)
    return " ".join(text.split()).rstrip(".").strip()


def _plain_text(mark: re.Match[str]) -> str:
    """Text behind a number is apart from it: `3\\text{m}` are metres, `3m` may be 3 times m."""
    before = mark.string[: mark.start()][-1:]
    return f" {mark.group(1)}" if before.isdigit() or before in tuple("})") else mark.group(1)


def as_number(text: str) -> Fraction | None:
    """A plain decimal number, with commas between thousands and a unit behind it; else None."""
    found = split(text)
    match = None if found.percent or found.is_changed else NUMBER.fullmatch(found.value)
    return None if match is None else Fraction(match.group().replace(",", ""))


def _verify_choice(
    answer: str, letter: str, choices: dict[str, str], compare: Compare
) -> Verification:
    """Compare the letter where one was given, else the value of the choice."""
    text = tidy(answer)
    named = _LETTER.match(text)
    if named and named.group(1).upper() in choices:
        return "correct" if named.group(1).upper() == letter else "wrong"
    return _verdict(is_equal(text, choices[letter], compare))


def _verdict(equal: bool | None) -> Verification:
    if equal is None:
        return "unparsed"
    return "correct" if equal else "wrong"
