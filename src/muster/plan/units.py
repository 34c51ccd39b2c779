"""Quantities that know their unit: seconds cannot be added to bytes, nor shown as hours.

Products and quotients give the right kind or a TypeError, to mypy as well as at run time:

>>> Flops(6e12) / FlopsPerSecond(2e12)
Seconds(value=3.0)
>>> print(Bytes(50e9) / BytesPerSecond(25e9), "|", Watts(700) * Seconds(3600))
2.0 s | 0.700 kWh
>>> Seconds(1) + Bytes(1)
Traceback (most recent call last):
TypeError: Seconds and Bytes cannot be added

``muster plan`` prints no figure without its origin: a `Figure` is a quantity with its `Origin`. A
prediction is as good as the worst of what went into it, so its origin is the weakest of its
inputs' origins.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

from muster.base.clock import human_duration

_SECONDS_PER_HOUR = 3600.0
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, order=True)
class Quantity(ABC):
    """A number of one unit. ``unit`` is that of ``value``, always: nothing is stored scaled."""

    value: float
    unit: ClassVar[str] = ""

    def __add__(self, other: Self) -> Self:
        self._must_match(other, "added")
        return dataclasses.replace(self, value=self.value + other.value)

    def __sub__(self, other: Self) -> Self:
        self._must_match(other, "subtracted")
        return dataclasses.replace(self, value=self.value - other.value)

    def __mul__(self, factor: float) -> Self:
        if not isinstance(factor, int | float):
            raise TypeError(f"{_kind(self)} and {_kind(factor)} cannot be multiplied")
        return dataclasses.replace(self, value=self.value * factor)

    def __rmul__(self, factor: float) -> Self:
        return self * factor

    @overload
    def __truediv__(self, other: Self) -> float: ...
    @overload
    def __truediv__(self, other: float) -> Self: ...
    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return dataclasses.replace(self, value=self.value / other)
        self._must_match(other, "divided")
        return self.value / other.value

    def _must_match(self, other: object, verb: str) -> None:
        if type(self) is not type(other):
            raise TypeError(f"{_kind(self)} and {_kind(other)} cannot be {verb}")


class Seconds(Quantity):
    unit = "s"

    @property
    def hours(self) -> float:
        return self.value / _SECONDS_PER_HOUR

    def __str__(self) -> str:
        if 0 < abs(self.value) < 1e-3:
            return f"{self.value * 1e6:.0f} µs"
        if 0 < abs(self.value) < 1:
            return f"{self.value * 1e3:.2f} ms"
        return human_duration(self.value)


class BytesPerSecond(Quantity):
    unit = "B/s"

    def __str__(self) -> str:
        return f"{self.value / 1e9:.4g} GB/s"


class Bytes(Quantity):
    unit = "B"

    @overload  # type: ignore[override]  # by a rate as well
    def __truediv__(self, other: Self) -> float: ...
    @overload
    def __truediv__(self, other: BytesPerSecond) -> Seconds: ...
    @overload
    def __truediv__(self, other: float) -> Self: ...
    def __truediv__(self, other: Any) -> Any:
        is_rate = isinstance(other, BytesPerSecond)
        return Seconds(self.value / other.value) if is_rate else super().__truediv__(other)

    def __str__(self) -> str:
        for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if abs(self.value) >= 2**power:
                return f"{self.value / 2**power:,.2f} {name}"
        return f"{self.value:.0f} B"


class FlopsPerSecond(Quantity):
    unit = "FLOP/s"

    def __str__(self) -> str:
        return _with_prefix(self.value, "FLOP/s")


class Flops(Quantity):
    """A number of floating-point operations; per second is ``FlopsPerSecond``."""

    unit = "FLOP"

    @overload  # type: ignore[override]  # by a rate as well
    def __truediv__(self, other: Self) -> float: ...
    @overload
    def __truediv__(self, other: FlopsPerSecond) -> Seconds: ...
    @overload
    def __truediv__(self, other: float) -> Self: ...
    def __truediv__(self, other: Any) -> Any:
        is_rate = isinstance(other, FlopsPerSecond)
        return Seconds(self.value / other.value) if is_rate else super().__truediv__(other)

    def __str__(self) -> str:
        return _with_prefix(self.value, "FLOP")


class Joules(Quantity):
    unit = "J"

    @property
    def kilowatt_hours(self) -> float:
        return self.value / _JOULES_PER_KWH

    def __str__(self) -> str:
        if abs(self.kilowatt_hours) < 0.1:
            return f"{self.value / 3600:.3g} Wh"
        return f"{self.kilowatt_hours:,.3f} kWh"


class Watts(Quantity):
    unit = "W"

    @overload  # type: ignore[override]  # by a time as well
    def __mul__(self, factor: float) -> Self: ...
    @overload
    def __mul__(self, factor: Seconds) -> Joules: ...
    def __mul__(self, factor: Any) -> Any:
        is_time = isinstance(factor, Seconds)
        return Joules(self.value * factor.value) if is_time else super().__mul__(factor)

    def __str__(self) -> str:
        return f"{self.value:,.0f} W"


@dataclass(frozen=True, order=True)
class Money(Quantity):
    """An amount in ``currency``; two currencies are never added, and there are no rates here."""

    currency: str = "USD"

    def __str__(self) -> str:
        digits = 2 if abs(self.value) >= 1 or self.value == 0 else 4
        return f"{self.value:,.{digits}f} {self.currency}"

    def _must_match(self, other: object, verb: str) -> None:
        super()._must_match(other, verb)
        if isinstance(other, Money) and other.currency != self.currency:
            raise TypeError(f"{self.currency} and {other.currency} cannot be {verb}")


def _with_prefix(value: float, unit: str) -> str:
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _kind(value: object) -> str:
    return type(value).__name__


#: measured: on this machine or in that run; given: by the user, on the command line or in a file;
#: table: a maker's data sheet; assumed: a rule of thumb, or a default that was not checked.
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
    """The weakest origin among ``figures``; None among them does not count."""
    origins = [figure.origin for figure in figures if figure is not None]
    return max(origins, key=_FROM_FIRM_TO_WEAK.index, default="measured")


def derived(value: T, *inputs: Figure[Any] | None, source: str = "") -> Figure[T]:
    """A value computed from ``inputs``, as good as the worst of them."""
    return Figure(value=value, origin=weakest(inputs), source=source)
