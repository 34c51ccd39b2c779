"""What one parameter of a search may be: a range of numbers or a few values.

=============================  =======================================================
``uniform(0,1)``               a float, each value as likely; ``step=0.1`` counts from 0
``log(1e-5,1e-1)``             a float, each order of magnitude as likely
``int(16,256,step=16)``        a whole number, both ends are among them
``logint(1,1024)``             a whole number, each order of magnitude as likely
``choice(adam,sgd)``           one of these
=============================  =======================================================
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from muster.base.errors import UnknownNameError, UsageError

FORMS = ("uniform", "log", "int", "logint", "choice")


@dataclass(frozen=True)
class Float:
    """A float from ``low`` to ``high``, both possible; with ``step`` only ``low`` plus whole
    steps."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self, "log" if self.log else "uniform")

    @property
    def size(self) -> int | None:
        """How many values there are; None where they cannot be counted."""
        return None if self.step is None else _steps(self.low, self.high, self.step) + 1

    def draw(self, random: Random) -> float:
        if self.step is not None:
            count = random.randint(0, _steps(self.low, self.high, self.step))
            return min(self.high, self.low + count * self.step)
        if self.log:
            drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = random.uniform(self.low, self.high)
        return min(self.high, max(self.low, drawn))

    def moved(self, value: float, factor: float) -> float:
        """``value`` times ``factor``, kept inside the range. With steps it is another step, where
        the range has one in that direction."""
        if self.step is None:
            return min(self.high, max(self.low, value * factor))
        last = _steps(self.low, self.high, self.step)
        count = min(
            last, max(0, _moved(value - self.low, value * factor - value, self.step, factor))
        )
        return min(self.high, self.low + count * self.step)

    def holds(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if not self.low <= value <= self.high or self.step is None:
            return self.low <= value <= self.high
        count = (value - self.low) / self.step
        return abs(count - round(count)) < 1e-8

    def to_text(self) -> str:
        step = "" if self.step is None else f",step={self.step!r}"
        return f"{'log' if self.log else 'uniform'}({self.low!r},{self.high!r}{step})"


@dataclass(frozen=True)
class Int:
    """A whole number from ``low`` to ``high``, both possible, every ``step``."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        _check_range(self, "logint" if self.log else "int")

    @property
    def size(self) -> int:
        return (self.high - self.low) // self.step + 1

    def draw(self, random: Random) -> int:
        if self.log:
            low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
            return min(self.high, max(self.low, round(math.exp(random.uniform(low, high)))))
        return self.low + self.step * random.randint(0, self.size - 1)

    def moved(self, value: int, factor: float) -> int:
        """The step nearest to ``value`` times ``factor``, or the next one where that is ``value``
        itself, kept inside the range."""
        count = _moved(value - self.low, value * factor - value, self.step, factor)
        return self.low + self.step * min(self.size - 1, max(0, count))

    def holds(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and (
            self.low <= value <= self.high and (value - self.low) % self.step == 0
        )  # fmt: skip

    def to_text(self) -> str:
        step = "" if self.step == 1 else f",step={self.step}"
        return f"{'logint' if self.log else 'int'}({self.low},{self.high}{step})"


@dataclass(frozen=True)
class Choice:
    """One of ``values``, which have no order."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("choice() has no values.", hint="choice(adam,sgd)")
        texts = [shown_value(value) for value in self.values]
        for at, text in enumerate(texts):
            if text in texts[:at]:
                raise UsageError(f"choice({','.join(texts)}) has {text} twice.")

    @property
    def size(self) -> int:
        return len(self.values)

    def draw(self, random: Random) -> Any:
        return self.values[random.randrange(len(self.values))]

    def index(self, value: object) -> int | None:
        """Where ``value`` is among the values; ``1``, ``1.0`` and ``True`` are three of them."""
        text = shown_value(value)
        return next((at for at, v in enumerate(self.values) if shown_value(v) == text), None)

    def holds(self, value: object) -> bool:
        return self.index(value) is not None

    def to_text(self) -> str:
        return f"choice({','.join(map(shown_value, self.values))})"


Distribution = Float | Int | Choice


def shown_value(value: object) -> str:
    """``value`` as the text that `read_value` reads back."""
    if isinstance(value, str):
        bare = value and not any(mark in value for mark in "()[]{},=\"' \t\n")
        return value if bare and read_value(value) == value else json.dumps(value)
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError):
        raise UsageError(
            f"Cannot search over {value!r}, which is of type {type(value).__name__}.",
            hint="choose among numbers, strings, booleans, None and lists of those.",
        ) from None


def word_of(value: object) -> str:
    """``value`` as a command is given it: a string as it is, anything else as `shown_value`."""
    return value if isinstance(value, str) else shown_value(value)


def read_value(text: str) -> Any:
    """What a text of a choice means: JSON where it is JSON, otherwise the text itself."""
    text = text.strip()
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def read_distribution(name: str, text: str) -> Distribution:
    """The distribution that ``text`` describes, or an error that shows what is allowed."""
    form, opening, rest = text.strip().partition("(")
    form = form.strip()
    if not opening or not rest.endswith(")"):
        raise UsageError(
            f"The space {name}={text} is not a distribution.",
            hint=f"write one of log(1e-5,1e-1), uniform(0,1), int(1,8), logint(1,1024) and "
            f"choice(a,b), as in {name}=log(1e-5,1e-1); one fixed value is choice({text}).",
        )
    if form not in FORMS:
        raise UnknownNameError(f"distribution of {name}", form, FORMS)
    parts = split_outside(rest[:-1], ",") if rest[:-1].strip() else []
    if form == "choice":
        return Choice(tuple(map(read_value, parts)))
    ends = [part for part in parts if "=" not in part]
    named = dict(_named(name, text, part) for part in parts if "=" in part)
    if len(ends) != 2 or named.keys() - {"step"}:
        raise UsageError(
            f"The space {name}={text} needs a low end, a high end, and only step= beside them.",
            hint=f"{name}={form}(1,8)",
        )
    if form in ("int", "logint"):
        low, high = (_whole(name, text, end) for end in ends)
        return Int(low, high, form == "logint", _whole(name, text, named.get("step", "1")))
    low_f, high_f = (_number(name, text, end) for end in ends)
    step = _number(name, text, named["step"]) if "step" in named else None
    return Float(low_f, high_f, form == "log", step)


def split_outside(text: str, mark: str) -> list[str]:
    """``text`` cut at each ``mark`` that stands in no brackets and in no quotes."""
    parts, depth, quoted, start, at = [], 0, False, 0, 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif depth == 0 and text.startswith(mark, at):
            parts.append(text[start:at].strip())
            at += len(mark) - 1
            start = at + 1
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        at += 1
    return [*parts, text[start:].strip()]


def _named(name: str, text: str, part: str) -> tuple[str, str]:
    key, _, value = part.partition("=")
    if key.strip() != "step":
        raise UsageError(f"The space {name}={text} has an unknown option {key.strip()!r}.",
                         hint="the only option is step=: int(16,256,step=16).")  # fmt: skip
    return key.strip(), value.strip()


def _number(name: str, text: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UsageError(f"The space {name}={text} has {word!r}, which is not a number.") from None


def _whole(name: str, text: str, word: str) -> int:
    with suppress(ValueError):
        return int(word)  # not by way of a float, which has 53 bits
    number = _number(name, text, word)
    if not number.is_integer():
        raise UsageError(
            f"The space {name}={text} has {word!r}, which is not a whole number.",
            hint=f"uniform and log are for floats: {name}=uniform({word},…).",
        )
    return int(number)


def _check_range(range_: Float | Int, form: str) -> None:
    low, high, step = range_.low, range_.high, range_.step
    shown = f"{form}({low},{high}{'' if step in (None, 1) else f',step={step}'})"
    kind = int if isinstance(range_, Int) else (int, float)
    for value in (low, high, *(() if step is None else (step,))):
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            wanted = "a whole number" if kind is int else "a finite number"
            raise UsageError(f"{shown} has {value!r}, which is not {wanted}.")
    if low >= high:
        raise UsageError(f"{shown} is empty: {low} is not below {high}.")
    if range_.log and low <= 0:
        raise UsageError(
            f"{shown} starts at {low}, and a logarithmic range starts above 0.",
            hint="start at a small number, such as 1e-6, or take "
            f"{'int' if kind is int else 'uniform'}.",
        )
    if step is not None and step <= 0:
        raise UsageError(f"{shown} has the step {step}, which is not above 0.")
    if range_.log and step not in (None, 1):
        raise UsageError(f"{shown} has a step, which a logarithmic range cannot have.")
    if step is not None and step > high - low:
        raise UsageError(f"{shown} has a step wider than the range, so {low} is the only value.")


def _steps(low: float, high: float, step: float) -> int:
    return int((high - low) / step * (1 + 1e-12) + 1e-9)


def _moved(above: float, by: float, step: float, factor: float) -> int:
    """The number of the step nearest to ``above + by``; where that is the step of ``above``, the
    next one in the direction of the move."""
    here, there = round(above / step), round((above + by) / step)
    return there if there != here else here + (1 if (by or factor - 1) > 0 else -1)


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)
