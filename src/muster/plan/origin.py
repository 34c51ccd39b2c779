"""Where a number comes from. Nothing that ``muster plan`` prints is without it.

A prediction is as good as the worst of what went into it, so its origin is the weakest of its
inputs' origins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from muster.plan.units import Money, Quantity

#: measured: on this machine or in that run; given: by the user, on the command line or in a file;
#: table: a maker's data sheet; assumed: a rule of thumb, or a default that nobody has looked at.
Origin = Literal["measured", "given", "table", "assumed"]
_FROM_FIRM_TO_WEAK: tuple[Origin, ...] = ("measured", "given", "table", "assumed")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Figure(Generic[T]):
    """A value with its origin; ``source`` says in words where exactly it is from."""

    value: T
    origin: Origin
    source: str = ""

    def record(self) -> dict[str, Any]:
        """As JSON: the number in its base unit, the unit, the origin and the source."""
        plain: dict[str, Any] = {"value": self.value}
        if isinstance(self.value, Quantity):
            unit = self.value.currency if isinstance(self.value, Money) else self.value.unit
            plain = {"value": self.value.value, "unit": unit}
        return {**plain, "origin": self.origin, **({"source": self.source} if self.source else {})}


def measured(value: T, source: str) -> Figure[T]:
    return Figure(value=value, origin="measured", source=source)


def given(value: T, source: str) -> Figure[T]:
    return Figure(value=value, origin="given", source=source)


def from_table(value: T, source: str) -> Figure[T]:
    return Figure(value=value, origin="table", source=source)


def assumed(value: T, source: str) -> Figure[T]:
    return Figure(value=value, origin="assumed", source=source)


def weakest(figures: Iterable[Figure[Any] | None]) -> Origin:
    """The weakest origin among ``figures``; what is None took no part."""
    origins = [figure.origin for figure in figures if figure is not None]
    return max(origins, key=_FROM_FIRM_TO_WEAK.index, default="measured")
