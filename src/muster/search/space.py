"""The space of a search: what each parameter may be, and on which conditions it is there."""

from __future__ import annotations

import builtins
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Annotated, Any

from muster.base.errors import UnknownNameError, UsageError, check_parameter_name
from muster.search.distributions import (
    Choice,
    Distribution,
    Float,
    Int,
    read_distribution,
    read_value,
    shown_value,
    split_outside,
)

_IF = " if "


@dataclass(frozen=True)
class When:
    """A parameter is there only where ``name`` has one of ``values``."""

    name: str
    values: tuple[Any, ...]

    def to_text(self) -> str:
        return f"{self.name}={','.join(map(shown_value, self.values))}"

    def is_met(self, params: Mapping[str, Any]) -> bool:
        """Whether it holds; values are compared by their texts, as those of a `Choice` are."""
        return self.name in params and shown_value(params[self.name]) in map(
            shown_value, self.values
        )


@dataclass(frozen=True)
class Axis:
    """One parameter; it is there only where all of ``when`` are met."""

    name: str
    distribution: Distribution
    when: tuple[When, ...] = ()

    def to_text(self) -> str:
        return self.distribution.to_text() + "".join(f"{_IF}{when.to_text()}" for when in self.when)


@dataclass(frozen=True)
class Space:
    """What a search chooses from. A condition among ``axes`` names only parameters before it.

    >>> space = Space.from_texts(["opt=choice(adam,sgd)", "momentum=uniform(0,0.99) if opt=sgd"])
    >>> space.to_json()
    {'opt': 'choice(adam,sgd)', 'momentum': 'uniform(0.0,0.99) if opt=sgd'}
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise UsageError(
                "The space of the search is empty.", hint="--space 'lr=log(1e-5,1e-1)'"
            )
        object.__setattr__(self, "axes", _in_order(self.axes))

    @staticmethod
    def uniform(low: float, high: float, *, step: float | None = None) -> Float:
        """A float, each value as likely."""
        return Float(float(low), float(high), step=step)

    @staticmethod
    def log(low: float, high: float) -> Float:
        """A float, each order of magnitude as likely."""
        return Float(float(low), float(high), log=True)

    @staticmethod
    def int(low: builtins.int, high: builtins.int, *, step: builtins.int = 1) -> Int:
        """A whole number; both ends are among them."""
        return Int(low, high, step=step)

    @staticmethod
    def logint(low: builtins.int, high: builtins.int) -> Int:
        """A whole number, each order of magnitude as likely."""
        return Int(low, high, log=True)

    @staticmethod
    def choice(*values: Any) -> Choice:
        """One of these values, which have no order."""
        return Choice(values)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Space:
        """The space of texts such as ``lr=log(1e-5,1e-1)`` and ``… if opt=sgd``."""
        pairs: dict[str, str] = {}
        for text in texts:
            name, sign, rest = text.partition("=")
            name = name.strip()
            if not sign or not name:
                raise UsageError(
                    f"The space {text!r} does not begin with the name of a parameter and '='.",
                    hint="--space 'lr=log(1e-5,1e-1)'",
                )
            if name in pairs:
                raise UsageError(f"The space gives {name} twice: {pairs[name]} and {rest.strip()}.")
            pairs[name] = rest.strip()
        return cls.from_json(pairs)

    @classmethod
    def from_values(cls, values: Mapping[str, Distribution | str]) -> Space:
        """The space of distributions, or of their texts, by name."""
        return cls(tuple(
            _read_axis(name, value) if isinstance(value, str) else Axis(name, _checked(name, value))
            for name, value in values.items()
        ))  # fmt: skip

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Space | None:
        """The space that the annotations ``Annotated[float, Space.log(1e-5, 1e-1)]`` of a
        function's parameters describe, None where none does."""
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
        axes = []
        for name, hint in hints.items():
            if typing.get_origin(hint) is not Annotated or name == "return":
                continue
            found = [mark for mark in hint.__metadata__ if isinstance(mark, Distribution)]
            if len(found) > 1:
                raise UsageError(f"Parameter {name} is annotated with {len(found)} distributions.")
            axes += [Axis(name, mark) for mark in found]
        return cls(tuple(axes)) if axes else None

    @classmethod
    def from_json(cls, texts: Mapping[str, str]) -> Space:
        return cls.from_values(texts)

    def to_json(self) -> dict[str, str]:
        """Name to text, which `from_json` turns back into an equal space."""
        return {axis.name: axis.to_text() for axis in self.axes}

    @cached_property
    def distributions(self) -> dict[str, Distribution]:
        return {axis.name: axis.distribution for axis in self.axes}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.distributions)

    @cached_property
    def size(self) -> builtins.int | None:
        """How many settings there are; None where they cannot be counted, or where there are
        conditions and counting would take long."""
        if not self.is_countable:
            return None
        most = math.prod(axis.distribution.size or 0 for axis in self.axes)
        if not any(axis.when for axis in self.axes):
            return most
        return sum(1 for _ in self.settings()) if most <= 100_000 else None

    @property
    def is_countable(self) -> bool:
        return all(axis.distribution.size is not None for axis in self.axes)

    def settings(self) -> Iterable[dict[str, Any]]:
        """Every setting of a space whose parameters can be counted, each once."""
        yield from _settings(self.axes, {})

    def draw(self, random: Random, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One setting, each parameter drawn by itself; those in ``given`` are as they are there,
        unless their conditions are not met."""
        given = given or {}
        params: dict[str, Any] = {}
        for axis in self.axes:
            if is_active(axis, params):
                own, name = axis.distribution, axis.name
                if name not in given:
                    params[name] = own.draw(random)
                else:
                    params[name] = float(given[name]) if isinstance(own, Float) else given[name]
        return params

    def check(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """``params`` in the order of the axes, or an error that names what is not in the space."""
        for name in params:
            if name not in self.names:
                raise UnknownNameError("parameter of the space", name, self.names)
        checked: dict[str, Any] = {}
        for axis in self.axes:
            if not is_active(axis, checked):
                if axis.name in params:
                    conditions = " and ".join(when.to_text() for when in axis.when)
                    raise UsageError(f"{axis.name} is given, but is there only if {conditions}.")
                continue
            if axis.name not in params:
                raise UsageError(f"A value for {axis.name} is missing; it may be {axis.to_text()}.")
            value = params[axis.name]
            distribution = axis.distribution
            if not distribution.holds(value):
                raise UsageError(
                    f"{axis.name}={shown_value(value)} is not in {distribution.to_text()}."
                )
            checked[axis.name] = float(value) if isinstance(distribution, Float) else value
        return checked


def is_active(axis: Axis, params: Mapping[str, Any]) -> bool:
    """Whether there is this parameter, given ``params`` of those before it."""
    return all(when.is_met(params) for when in axis.when)


def _settings(axes: tuple[Axis, ...], params: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if not axes:
        yield dict(params)
        return
    axis, rest = axes[0], axes[1:]
    if not is_active(axis, params):
        yield from _settings(rest, params)
        return
    for value in _values(axis.distribution):
        yield from _settings(rest, {**params, axis.name: value})


def _values(distribution: Distribution) -> Iterable[Any]:
    if isinstance(distribution, Choice):
        return distribution.values
    if isinstance(distribution, Int):
        return range(distribution.low, distribution.high + 1, distribution.step)
    low, high, step = distribution.low, distribution.high, distribution.step
    assert step is not None
    return (min(high, low + at * step) for at in range(distribution.size or 0))


def _read_axis(name: str, text: str) -> Axis:
    check_parameter_name(name)
    first, *conditions = split_outside(text, _IF)
    return Axis(
        name, read_distribution(name, first), tuple(_read_when(name, c) for c in conditions)
    )


def _read_when(name: str, text: str) -> When:
    parent, sign, values = text.strip().partition("=")
    if not sign or not values.strip():
        raise UsageError(
            f"The condition of {name}, {text.strip()!r}, is not NAME=VALUE.",
            hint=f"--space '{name}=… if opt=sgd' or '… if opt=sgd,adam'",
        )
    return When(parent.strip(), tuple(map(read_value, split_outside(values, ","))))


def _checked(name: str, value: object) -> Distribution:
    if not isinstance(value, Distribution):
        raise UsageError(
            f"The space gives {name} {value!r}, which is not a distribution.",
            hint="Space.log(1e-5, 1e-1), Space.uniform(0, 1), Space.int(1, 8), "
            "Space.choice('a', 'b')",
        )
    return value


def _in_order(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """``axes``, each after those that it depends on, and otherwise in the order given."""
    known = {axis.name: axis for axis in axes}
    for axis in axes:
        for when in axis.when:
            _check_condition(axis, when, known)
    ordered: dict[str, Axis] = {}
    left = list(axes)
    while left:
        ready = next((a for a in left if all(when.name in ordered for when in a.when)), None)
        if ready is None:
            names = ", ".join(axis.name for axis in left)
            raise UsageError(f"The conditions of {names} depend on each other in a circle.")
        ordered[ready.name] = ready
        left.remove(ready)
    return tuple(ordered.values())


def _check_condition(axis: Axis, when: When, known: Mapping[str, Axis]) -> None:
    if when.name not in known:
        raise UnknownNameError(f"parameter in the condition of {axis.name}", when.name, known)
    parent = known[when.name].distribution
    for value in when.values:
        if not parent.holds(value):
            raise UsageError(
                f"{axis.name} is there only if {when.name}={shown_value(value)}, "
                f"which {when.name}={parent.to_text()} never is."
            )
