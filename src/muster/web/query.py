"""What stands behind the question mark of an address: names, values, and the words of a filter."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from muster.base.errors import UsageError

_MOST_CHARS = 1000
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\s|$)|((?:[^\s"]|"(?:[^"\\]|\\.)*")+)')
_TEST = re.compile(r'([^=<>!~"]+)(>=|<=|!=|=|>|<|~)(.*)', re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
    "<": operator.lt, "<=": operator.le,
}  # fmt: skip


class BadQuery(UsageError):
    """What stands behind the question mark cannot be understood."""


class Query:
    """Names, each with one value or several. What should be a number and is not raises BadQuery."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    @classmethod
    def of(cls, **values: object) -> Query:
        return cls((name, str(value)) for name, value in values.items())

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[-1]

    def many(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number, brought into ``low`` … ``high``."""
        found = self.maybe(name)
        return default if found is None else int(min(max(found, low), high))

    def maybe(self, name: str) -> float | None:
        """A number, or None where none was given."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadQuery(f"{name}={text[:40]!r} is not a number.")
        return value

    def but(self, values: Mapping[str, object]) -> str:
        """The same words with other values, as they are written behind the question mark."""
        kept = [(n, v) for n, all_of in self._values.items() if n not in values for v in all_of]
        return urlencode([*kept, *((n, str(v)) for n, v in values.items() if v is not None)])


class Word(NamedTuple):
    """One word. Without a ``column`` some cell has to hold ``text``."""

    column: str
    sign: str
    text: str


def parse(text: str) -> list[Word]:
    """All of these have to hold.

    >>> parse('lr>=0.01 name="a b" "out of memory"')
    [Word(column='lr', sign='>=', text='0.01'), Word(column='name', sign='=', text='a b'), \
Word(column='', sign='~', text='out of memory')]
    """
    if len(text) > _MOST_CHARS:
        raise BadQuery(f"The filter is longer than {_MOST_CHARS:,} characters.")
    tests = []
    for found in _WORD.finditer(text):
        quoted, word = found.groups()
        test = _TEST.fullmatch(word) if word is not None else None
        if test is not None:
            tests.append(Word(test[1], test[2], _bare(test[3])))
        else:
            tests.append(Word("", "~", _bare(word) if word is not None else _unescaped(quoted)))
    return tests


def predicate(test: Word) -> Callable[[Any], bool]:
    """Whether a cell passes. Numbers are compared as numbers, anything else as text; a cell without
    a value passes only ``!=``.
    """
    if test.sign == "~":
        wanted = test.text.casefold()
        return lambda cell: cell is not None and wanted in str(cell).casefold()
    compare = _COMPARE[test.sign]
    number, text = _number(test.text), test.text

    def passes(cell: Any) -> bool:
        if cell is None:
            return test.sign == "!="
        if isinstance(cell, bool):
            return compare(str(cell).lower(), text.lower())
        if isinstance(cell, int | float) and number is not None:
            return compare(cell, number)
        if isinstance(cell, int | float) and test.sign not in ("=", "!="):
            return False
        return compare(str(cell), text)

    return passes


def _bare(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return _unescaped(text[1:-1]) if is_quoted else text


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
