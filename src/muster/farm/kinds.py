"""What an annotation accepts. Texts, stored forms and arguments are read by ``converters``.

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
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

#: Members of a union are tried in this order: what reads fewer texts goes first.
UNION_ORDER = (
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


@dataclass(frozen=True)
class Kind:
    """What an annotation accepts, free of the annotation itself so that it can be written down.

    ``form`` is one of ``UNION_ORDER`` or ``union``; ``items`` are the kinds inside it. ``values``
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


def kind_to_record(kind: Kind) -> list[Any]:
    items = [kind_to_record(item) for item in kind.items]
    values = [list(value) if isinstance(value, tuple) else value for value in kind.values]
    return [kind.form, items, values, kind.label]


def kind_from_record(record: Sequence[Any]) -> Kind:
    form, items, values, label = record
    restored = tuple(tuple(value) if isinstance(value, list) else value for value in values)
    return Kind(form, tuple(kind_from_record(item) for item in items), restored, label)


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
