"""``--where``: conditions on one column each, read once and asked of every record.

The data decides how values are compared: numbers as numbers, texts as texts. In CSV, where all is
text, a value that looks like a number is compared with a number as such. A missing value, and one
that cannot be compared with the condition's, matches nothing but ``!=``.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from muster.base.errors import UnknownNameError, UsageError

_FORM = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|<|>|(?<=\s)in(?=\s))(.*)", re.DOTALL)
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,"']+)\s*(?:,|$)""")
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Value(NamedTuple):
    """What a condition compares with: its text, and its number when it is one without quotes."""

    text: str
    number: float | None


@dataclass(frozen=True)
class Condition:
    """``column op value``; several values for ``in``. ``reads_numbers``: texts may be numbers."""

    column: str
    op: str
    values: tuple[Value, ...]
    reads_numbers: bool = False

    def holds(self, record: Mapping[str, Any]) -> bool:
        found = record.get(self.column)
        if self.op == "!=":
            return not self._equals(found, self.values[0])
        if self.op in ("==", "in"):
            return any(self._equals(found, value) for value in self.values)
        pair = self._pair(found, self.values[0])
        return pair is not None and _is_ordered(self.op, *pair)

    def may_hold(self, least: Any, most: Any) -> bool:
        """Whether a column whose values lie between these two may have one that matches."""
        if self.op == "!=":
            return True
        pairs = [(self._pair(least, value), self._pair(most, value)) for value in self.values]
        if any(low is None or high is None for low, high in pairs):
            return True
        return any(self._overlaps(low, high) for low, high in pairs if low and high)

    def _overlaps(self, low: tuple[Any, Any], high: tuple[Any, Any]) -> bool:
        (least, value), (most, _) = low, high
        if self.op in ("<", "<="):
            return _is_ordered(self.op, least, value)
        if self.op in (">", ">="):
            return _is_ordered(self.op, most, value)
        return bool(least <= value <= most)

    def _equals(self, found: Any, value: Value) -> bool:
        if isinstance(found, bool):
            return value.text.lower() == ("true" if found else "false")
        pair = self._pair(found, value)
        return pair is not None and bool(pair[0] == pair[1])

    def _pair(self, found: Any, value: Value) -> tuple[Any, Any] | None:
        """Both values in one type, or None where they cannot be compared."""
        if isinstance(found, bool):
            return None
        if isinstance(found, int | float | decimal.Decimal):
            return None if value.number is None else (found, value.number)
        if isinstance(found, datetime.date | datetime.time):
            return found.isoformat(), value.text
        if not isinstance(found, str):
            return None
        if self.reads_numbers and value.number is not None:
            number = _number(found.strip())
            return None if number is None else (number, value.number)
        return found, value.text


def matches(conditions: Iterable[Condition], record: Mapping[str, Any]) -> bool:
    return all(condition.holds(record) for condition in conditions)


def parse_conditions(
    texts: Iterable[str], columns: Iterable[str], *, reads_numbers: bool = False
) -> tuple[Condition, ...]:
    """Read conditions. Raises UsageError for one that is malformed, UnknownNameError for an unknown
    column.
    """
    known = list(columns)
    parsed = tuple(_parse(text, reads_numbers) for text in texts)
    for condition in parsed:
        if condition.column not in known:
            raise UnknownNameError("column", condition.column, known)
    return parsed


def _parse(text: str, reads_numbers: bool) -> Condition:
    hint = 'write level>=3, source == "olympiads" or split in train,test.'
    form = _FORM.fullmatch(text)
    if form is None:
        raise UsageError(
            f"Cannot read the condition {text!r}: it has none of ==, !=, <, <=, >, >= and in.",
            hint=hint,
        )
    column, op, rest = form[1], form[2], form[3].strip()
    parts = _items(rest) if op == "in" else [rest]
    if not all(parts) or not parts:
        raise UsageError(f"Cannot read the condition {text!r}: {rest!r} is not a value.", hint=hint)
    values = tuple(_value(part) for part in parts)
    if op in ("<", "<=", ">", ">=") and rest.startswith("="):
        raise UsageError(f"Cannot read the condition {text!r}.", hint=hint)
    return Condition(column, op, values, reads_numbers)


def _items(text: str) -> list[str]:
    items, at = [], 0
    while at < len(text):
        found = _ITEM.match(text, at)
        if found is None:
            return []
        items.append(found[1].strip())
        at = found.end()
    return items


def _value(text: str) -> Value:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return Value(text[1:-1], None)
    return Value(text, _number(text))


def _number(text: str) -> float | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _is_ordered(op: str, left: Any, right: Any) -> bool:
    if op == "<":
        return bool(left < right)
    if op == "<=":
        return bool(left <= right)
    return bool(left > right) if op == ">" else bool(left >= right)
