"""Read ``{problem, reference_answer}`` from a raw row of a data set. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from muster import Reject
from muster_recipes.reasoning.answers import find_answer, last_boxed
from muster_recipes.reasoning.verify import with_choices

Row = Mapping[str, Any]
#: Words in the answer column of NuminaMath that stand for an answer that is not known.
_NO_ANSWER = frozenset({"notfound", "not found", "none"})
_ANSWERS = ("reference_answer", "answer")
_AQUA_CHOICE = re.compile(r"\s*\(?([A-Ha-h])\s*\)\s*(.*)", re.DOTALL)
_MATH_QA_CHOICE = re.compile(r"(?:^|,)\s*([a-h])\s*\)\s*")


def read_row(row: Row, layout: str, problem_column: str, answer_column: str) -> dict[str, Any]:
    """The problem and its reference answer, None where there is none.

    With ``problem_column`` or ``answer_column`` these are read whatever the layout says.
    Reject lists the columns when one is missing, and names one that holds no text.
    """
    if layout in LAYOUTS and not problem_column and not answer_column:
        problem, answer = LAYOUTS[layout](row)
    else:
        problem, answer = _named(row, problem_column or "problem", answer_column)
    return {"problem": problem, "reference_answer": answer}


def _named(row: Row, problem_column: str, answer_column: str) -> tuple[str, str | None]:
    """Read columns by name.

    Without ``answer_column`` the answer is in ``reference_answer``, as this recipe writes it, or in
    ``answer``; where neither is there, there is no reference.
    """
    problem = _text(row, problem_column)
    column = answer_column or next((name for name in _ANSWERS if name in row), "")
    answer = _answer(row, column) if column else None
    return problem, None if answer is None else find_answer(answer) or answer


def _gsm8k(row: Row) -> tuple[str, str | None]:
    return _text(row, "question"), find_answer(_text(row, "answer"))


def _math(row: Row) -> tuple[str, str | None]:
    return _text(row, "problem"), last_boxed(_text(row, "solution"))


def _asdiv(row: Row) -> tuple[str, str | None]:
    """The answer has its unit behind it in brackets: ``9 (apples)``."""
    problem = f"{_text(row, 'body')} {_text(row, 'question')}"
    answer = _answer(row, "answer")
    return problem, None if answer is None else answer.split(" (", 1)[0].strip()


def _aqua(row: Row) -> tuple[str, str | None]:
    options = row.get("options")
    if not isinstance(options, list | tuple):
        raise Reject(f"the column 'options' is not a list but {type(options).__name__}")
    found = [_AQUA_CHOICE.fullmatch(str(option)) for option in options]
    choices = {m.group(1).upper(): _one_line(m.group(2)) for m in found if m is not None}
    return with_choices(_text(row, "question"), choices), _text(row, "correct").strip().upper()


def _math_qa(row: Row) -> tuple[str, str | None]:
    """The options are one string: ``a ) 38 , b ) 27.675 , c ) none of these``."""
    text = _text(row, "options").strip()
    if text.startswith("["):
        text = text.strip("[]").replace("', '", " , ").replace('", "', " , ").strip("'\"")
    parts = _MATH_QA_CHOICE.split(text)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    choices = {letter.upper(): _one_line(value).strip(" ,") for letter, value in pairs}
    return with_choices(_text(row, "Problem"), choices), _text(row, "correct").strip().upper()


def _numina_math(row: Row) -> tuple[str, str | None]:
    """The answer column, else the last box of the solution; a proof has no answer."""
    problem, answer = _text(row, "problem"), _answer(row, "answer")
    if answer is not None and answer.casefold() == "proof":
        return problem, None
    if answer is None or answer.casefold() in _NO_ANSWER:
        solution = row.get("solution")
        return problem, last_boxed(solution) if isinstance(solution, str) else None
    return problem, answer


#: How the rows of each known data set are read.
LAYOUTS: Mapping[str, Callable[[Row], tuple[str, str | None]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "asdiv": _asdiv,
    "aqua": _aqua,
    "math_qa": _math_qa,
    "numina_math": _numina_math,
}


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Reject(f"the column {column!r} holds no text but {type(value).__name__}")
    text = str(value).strip()
    if not text:
        raise Reject(f"the column {column!r} is empty")
    return text


def _answer(row: Row, column: str) -> str | None:
    value = _value(row, column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return _text(row, column)


def _value(row: Row, column: str) -> Any:
    if column not in row:
        raise Reject(f"there is no column {column!r}; there are: {', '.join(map(str, row))}")
    return row[column]


def _one_line(text: str) -> str:
    return " ".join(text.split())
