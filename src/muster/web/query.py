"""What stands behind the question mark of an address."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from urllib.parse import urlencode

from muster.base.errors import UsageError


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
