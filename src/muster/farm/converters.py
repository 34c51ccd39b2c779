"""Reading values of a kind: from a typed text to the stored form to the argument of the call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

from muster.farm.canonical import plain_scalar, unwrap_scalar
from muster.farm.kinds import UNION_ORDER, Kind
from muster.farm.space_texts import Text, show_value

_TRUE = frozenset({"true", "yes", "on", "1"})

_FALSE = frozenset({"false", "no", "off", "0"})

_NONE = frozenset({"none", "null"})


class Unreadable(Exception):
    """This value is not of that kind; its text, where there is one, says what is wrong inside."""


Converter = Callable[[Any], Any]


def guess(text: str) -> Any:
    """What a text without annotation stands for: a boolean, None, an int, a float, else itself."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in _NONE:
        return None
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return str.__str__(text)


def converter_for(kind: Kind) -> Converter:
    """A function to the stored form of ``kind``; raises Unreadable for a value that is not."""
    if kind.form in _READERS:
        return _READERS[kind.form]
    if kind.form == "literal":
        return _literal_reader(kind.values)
    if kind.form == "enum":
        return _enum_reader(kind)
    if kind.form == "union":
        return _union_reader(kind.items)
    if kind.form == "dataclass":
        return _dataclass_reader(kind)
    return _list_reader(kind)


def caller_for(kind: Kind) -> Converter | None:
    if kind.form == "path":
        return Path
    if kind.form == "enum" and kind.enum is not None:
        return kind.enum.__getitem__
    if kind.form == "union":
        return _union_caller(kind.items)
    if kind.form == "dataclass":
        return _dataclass_caller(kind)
    inner = [caller_for(item) for item in kind.items]
    if kind.form == "tuple":
        return lambda items: tuple(c(i) if c else i for c, i in zip(inner, items, strict=True))
    if kind.form == "tuple_of":
        each = inner[0]
        return lambda items: tuple(map(each, items) if each else items)
    if kind.form == "list" and inner[0] is not None:
        single = inner[0]
        return lambda items: [single(item) for item in items]
    return None


def _read_any(value: Any) -> Any:
    if type(value) is Text:
        return guess(value)
    value = plain_scalar(unwrap_scalar(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [_read_any(item) for item in value]
    if value is None or isinstance(value, str | int | float | dict):
        return value
    raise Unreadable


def _read_bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    if isinstance(value, str):
        lowered = value.strip().lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
    unwrapped = unwrap_scalar(value)
    if type(unwrapped) is bool:
        return unwrapped
    raise Unreadable


def _read_int(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return _whole(_read_float(value))
    number = plain_scalar(unwrap_scalar(value))
    if type(number) is int:
        return number
    if type(number) is float:
        return _whole(number)
    raise Unreadable


def _read_strict_int(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise Unreadable from None
    if isinstance(value, float):
        raise Unreadable
    return _read_int(value)


def _whole(number: float) -> int:
    # Beyond 2**53 floats skip integers: 1e20 would be a number that nobody wrote.
    if number.is_integer() and abs(number) <= 2**53:
        return int(number)
    raise Unreadable


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    number = value if isinstance(value, str) else plain_scalar(unwrap_scalar(value))
    if type(number) is bool or not isinstance(number, str | int | float):
        raise Unreadable
    try:
        return float(number)
    except (ValueError, OverflowError):
        raise Unreadable from None


def _read_str(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    raise Unreadable


def _read_path(value: Any) -> str:
    if isinstance(value, str | PurePath):
        return str(value) if isinstance(value, PurePath) else str.__str__(value)
    raise Unreadable


def _read_none(value: Any) -> None:
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
        return
    raise Unreadable


def _read_dict(value: Any) -> dict[str, Any]:
    parsed = _parse_json(value) if isinstance(value, str) else value
    if isinstance(parsed, Mapping):
        return dict(parsed)
    raise Unreadable


_READERS: Final[dict[str, Converter]] = {
    "any": _read_any,
    "bool": _read_bool,
    "int": _read_int,
    "float": _read_float,
    "str": _read_str,
    "path": _read_path,
    "none": _read_none,
    "dict": _read_dict,
}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Unreadable from None


def _literal_reader(values: tuple[Any, ...]) -> Converter:
    def read(value: Any) -> Any:
        value = unwrap_scalar(value)
        for choice in values:
            if type(choice) is type(value) and choice == value:
                return choice
        if isinstance(value, str):
            for choice in values:
                if show_value(choice) == value or str(choice) == value:
                    return choice
        raise Unreadable

    return read


def _enum_reader(kind: Kind) -> Converter:
    names = {name: member for name, member, _ in kind.values}
    texts = {text: member for _, member, text in reversed(kind.values)}

    def read(value: Any) -> str:
        if isinstance(value, Enum):
            if value.name in names and (kind.enum is None or isinstance(value, kind.enum)):
                return value.name
            raise Unreadable
        text = str(value)
        member: str | None = names.get(text) or texts.get(text)
        if member is None:
            raise Unreadable
        return member

    return read


def _union_reader(items: tuple[Kind, ...]) -> Converter:
    ordered = sorted(items, key=lambda item: UNION_ORDER.index(item.form))
    readers = [converter_for(item) for item in ordered]
    by_type = {"int": int, "float": float, "bool": bool, "str": str}
    exact = {by_type[item.form] for item in items if item.form in by_type}
    if float in exact and int in exact:
        # "1e4" is a float where both are allowed: only an int alone accepts it as a whole number.
        readers[[item.form for item in ordered].index("int")] = _read_strict_int

    def read(value: Any) -> Any:
        if type(value) in exact and not isinstance(value, str):
            return value
        inside = ""
        for reader in readers:
            try:
                return reader(value)
            except Unreadable as error:
                inside = inside or str(error)
        raise Unreadable(inside)

    return read


def _list_reader(kind: Kind) -> Converter:
    readers = [converter_for(item) for item in kind.items]
    fixed = kind.form == "tuple"

    def read(value: Any) -> list[Any]:
        items = _parse_json(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) and hasattr(items, "tolist"):
            items = items.tolist()
        if not isinstance(items, list | tuple) or (fixed and len(items) != len(readers)):
            raise Unreadable
        if fixed:
            return [reader(item) for reader, item in zip(readers, items, strict=True)]
        return [readers[0](item) for item in items]

    return read


def _union_caller(items: tuple[Kind, ...]) -> Converter | None:
    ordered = sorted(items, key=lambda item: UNION_ORDER.index(item.form))
    pairs = [(converter_for(item), caller_for(item)) for item in ordered]
    if all(caller is None for _, caller in pairs):
        return None

    def call(value: Any) -> Any:
        # The first member that reads the stored value is the one that had read the text.
        for reader, caller in pairs:
            try:
                reader(value)
            except Unreadable:
                continue
            return caller(value) if caller else value
        return value

    return call


def _dataclass_reader(kind: Kind) -> Converter:
    names = [name for name, _ in kind.values]
    readers = dict(zip(names, map(converter_for, kind.items), strict=True))
    shown = dict(zip(names, kind.items, strict=True))

    def read(value: Any) -> dict[str, Any]:
        given = _parse_json(value) if isinstance(value, str) else value
        if dataclasses.is_dataclass(given) and type(given).__name__ == kind.label:
            given = {name: getattr(given, name) for name in names}
        if not isinstance(given, Mapping):
            raise Unreadable
        for name in given:
            if name not in readers:
                raise Unreadable(f"{kind.label} has no field {name!r}, but {', '.join(names)}.")
        for name, is_required in kind.values:
            if is_required and name not in given:
                raise Unreadable(f"{kind.label} needs a value for {name}.")
        stored = {}
        for name, item in given.items():
            try:
                stored[name] = readers[name](item)
            except Unreadable as error:
                why = f"{kind.label}.{name}: cannot read {item!r} as {shown[name].describe()}."
                raise Unreadable(str(error) or why) from None
        return stored

    return read


def _dataclass_caller(kind: Kind) -> Converter | None:
    cls = kind.dataclass
    if cls is None:
        return None
    names = (name for name, _ in kind.values)
    callers = dict(zip(names, map(caller_for, kind.items), strict=True))

    def call(stored: Any) -> Any:
        values = {name: (callers[name] or _same)(value) for name, value in stored.items()}
        return cls(**values)

    return call


def _same(value: Any) -> Any:
    return value
