"""What an annotation accepts: reading a typed text, the stored form, the argument of the call.

=====================  ==============================  ===================  ====================
annotation             text                            stored              argument
=====================  ==============================  ===================  ====================
int                    3, 1_000, 1e4 (if whole)        3                    3
float                  1e-3, nan, inf                  0.001                0.001
bool                   true false yes no on off 1 0    true                 True
str                    as typed                        "text"               "text"
Path                   as typed                        "text"               Path("text")
Literal["a", 1]        a, 1                            "a"                  "a"
an Enum                a name, or else a value         the name             the member
X | None               none, null, or X                null                 None
list[X], tuple[X, Y]   a JSON list: [1, 2]             [1, 2]               list, or tuple
dict                   a JSON object                   {...}                dict
a dataclass            a JSON object of its fields     {...}                an instance
none, or another       guessed: true false none,       what was guessed     the same
                       int, float, else a string
=====================  ==============================  ===================  ====================

"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

from muster.farm.canonical import plain_scalar, unwrap_scalar
from muster.farm.values import Text, show_value

_TRUE = frozenset({"true", "yes", "on", "1"})

_FALSE = frozenset({"false", "no", "off", "0"})

_NONE = frozenset({"none", "null"})

#: Members of a union are tried in this order: what reads fewer texts goes first.
_UNION_ORDER = (
    "none",
    "literal",
    "enum",
    "int",
    "float",
    "bool",
    "list",
    "tuple",
    "tuple_of",
    "dataclass",
    "dict",
    "path",
    "str",
    "any",
)


class Unreadable(Exception):
    """This value is not of that kind; its text, where there is one, says what is wrong inside."""


Converter = Callable[[Any], Any]


@dataclass(frozen=True)
class Kind:
    """What an annotation accepts, free of the annotation itself so that it can be written down.

    ``form`` is one of ``_UNION_ORDER`` or ``union``; ``items`` are the kinds inside it. ``values``
    are the choices of a literal, (name, member's name, text of the value) of an Enum, or (name,
    whether it must be given) of a dataclass's fields.
    """

    form: str = "any"
    items: tuple[Kind, ...] = ()
    values: tuple[Any, ...] = ()
    label: str = ""
    enum: type[Enum] | None = field(default=None, compare=False, repr=False)
    dataclass: type | None = field(default=None, compare=False, repr=False)

    def describe(self) -> str:
        inner = [item.describe() for item in self.items]
        if self.form == "literal":
            return "one of " + ", ".join(repr(value) for value in self.values)
        if self.form == "enum":
            return f"{self.label} ({', '.join(name for name, _, _ in self.values)})"
        if self.form == "union":
            return " | ".join(inner)
        if self.form == "dataclass":
            fields = zip(self.values, inner, strict=True)
            shown = [f"{name}: {kind}{'' if must else ' = …'}" for (name, must), kind in fields]
            return f"{self.label}({', '.join(shown)})"
        if self.form in ("list", "tuple", "tuple_of"):
            more = ", ..." if self.form == "tuple_of" else ""
            return f"{self.form.removesuffix('_of')}[{', '.join(inner)}{more}]"
        return {"none": "None", "path": "Path"}.get(self.form, self.form)


ANY: Final = Kind()


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


def kind_of(hint: Any) -> Kind:
    """The `Kind` of an evaluated annotation; what is not known accepts anything."""
    simple = {
        bool: "bool", int: "int", float: "float", str: "str", dict: "dict", Mapping: "dict",
        None: "none", type(None): "none",
    }  # fmt: skip
    if isinstance(hint, typing.NewType):
        return kind_of(hint.__supertype__)
    if hint in (list, tuple, Sequence):
        return Kind("tuple_of" if hint is tuple else "list", (ANY,))
    if isinstance(hint, type) and not typing.get_args(hint):
        if issubclass(hint, Enum):
            return _enum_kind(hint)
        if issubclass(hint, PurePath):
            return Kind("path")
        if dataclasses.is_dataclass(hint):
            return _dataclass_kind(hint)
        return Kind(simple[hint]) if hint in simple else ANY
    if hint is None:
        return Kind("none")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind_of(args[0])
    if origin is typing.Literal:
        return literal_kind(args)
    if origin in (typing.Union, types.UnionType):
        return union_kind([kind_of(arg) for arg in args])
    if origin in (list, tuple, Sequence) and not args:
        return Kind("tuple_of" if origin is tuple else "list", (ANY,))
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return Kind("tuple", tuple(kind_of(arg) for arg in args))
    if origin is tuple:
        return Kind("tuple_of", (kind_of(args[0]),))
    if origin in (list, Sequence):
        return Kind("list", (kind_of(args[0]),))
    return Kind("dict") if origin in (dict, Mapping) else ANY


def literal_kind(values: Sequence[object]) -> Kind:
    """The choices of a Literal; one with members that JSON cannot hold accepts anything."""
    plain = all(type(value) in (str, int, bool, type(None)) for value in values)
    return Kind("literal", values=tuple(values)) if plain else ANY


def union_kind(members: Sequence[Kind]) -> Kind:
    """A union; one that holds a kind that accepts anything is that kind."""
    if any(member.form == "any" for member in members):
        return ANY
    return Kind("union", tuple(members))


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


def kind_to_record(kind: Kind) -> list[Any]:
    items = [kind_to_record(item) for item in kind.items]
    values = [list(value) if isinstance(value, tuple) else value for value in kind.values]
    return [kind.form, items, values, kind.label]


def kind_from_record(record: Sequence[Any]) -> Kind:
    form, items, values, label = record
    restored = tuple(tuple(value) if isinstance(value, list) else value for value in values)
    return Kind(form, tuple(kind_from_record(item) for item in items), restored, label)


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
    ordered = sorted(items, key=lambda item: _UNION_ORDER.index(item.form))
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
    ordered = sorted(items, key=lambda item: _UNION_ORDER.index(item.form))
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


def _enum_kind(enum: type[Enum]) -> Kind:
    members = tuple(
        (name, member.name, str(member.value)) for name, member in enum.__members__.items()
    )
    return Kind("enum", values=members, label=enum.__name__, enum=enum)


#: Classes whose fields are being looked at: one that holds itself takes any dict there.
_open: list[type] = []


def _dataclass_kind(cls: type) -> Kind:
    if cls in _open:
        return Kind("dict")
    _open.append(cls)
    try:
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except Exception:  # names that only type checkers import
            hints = {}
        fields = [entry for entry in dataclasses.fields(cls) if entry.init]
        kinds = tuple(kind_of(hints.get(entry.name, Any)) for entry in fields)
    finally:
        _open.pop()
    missing = dataclasses.MISSING
    values = tuple(
        (entry.name, entry.default is missing and entry.default_factory is missing)
        for entry in fields
    )
    return Kind("dataclass", kinds, values, cls.__name__, dataclass=cls)


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
