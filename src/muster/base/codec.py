"""Dataclasses to JSON and back: the one codec of all small files, and of what children answer."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from muster.base.atomic_files import write_atomic
from muster.base.errors import SetupError, TargetError, UsageError, flag_of

T = TypeVar("T")


class MalformedError(SetupError, ValueError):
    """Where a value of JSON is not what it should be, and why: "gpus[0].index is 'a', …"."""


def to_json(record: Any) -> bytes:
    """Readable, key-ordered JSON of a dataclass or of plain values; tuples become lists."""
    text = json.dumps(plain(record), indent=2, ensure_ascii=False)
    # A lone surrogate, of a file's name, becomes \udcff, which JSON reads back.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def as_read_back(record: Any) -> Any:
    """What ``read_json`` gives of a file with this record."""
    return json.loads(to_json(record))


def write_json(path: Path, record: Any) -> None:
    write_atomic(path, to_json(record))


def read_json(path: Path, what: str) -> Any:
    """The JSON value in ``path``.

    Raises SetupError when the file is missing or is not JSON; ``what`` names it to the user.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SetupError(f"There is no {what} at {path}.") from None
    except (ValueError, RecursionError) as error:
        raise SetupError(
            f"The {what} at {path} is damaged: {error}.",
            hint="restore it from a copy; results are not in it, but beside it.",
        ) from None
    except OSError as error:
        raise SetupError(f"Cannot read the {what} at {path}: {error.strerror}.") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file that may be missing or damaged, and says nothing then: {}."""
    try:
        found = read_json(path, path.name)
    except SetupError:
        return {}
    return found if isinstance(found, dict) else {}


def read_record(
    path: Path, what: str, shape: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """A JSON object with at least these fields, of these types: SetupError for any other JSON."""
    record = read_json(path, what)
    wrong = "" if isinstance(record, dict) else "it is not an object"
    for name, kind in shape.items():
        if not wrong and not isinstance(record.get(name), kind):
            wrong = f"{name} is {'of another type' if name in record else 'missing'}"
    if wrong:
        raise SetupError(
            f"The {what} at {path} is damaged: {wrong}.", hint="restore it from a copy."
        )
    assert isinstance(record, dict)
    return record


def read_as(kind: type[T], path: Path, what: str) -> T:
    """The file as the dataclass ``kind``; SetupError, which names ``what``, where it is not one.

    A field that the file lacks has its default, one that ``kind`` lacks is ignored, so that files
    of older and newer musters are read.
    """
    try:
        return decode(kind, read_json(path, what), ignore_unknown=True)
    except MalformedError as error:
        raise SetupError(
            f"The {what} at {path} is damaged: {error}.", hint="restore it from a copy."
        ) from None


def decode(kind: type[T], value: Any, *, ignore_unknown: bool = False) -> T:
    """A value of JSON as the annotated ``kind``: dataclasses, tuples, dicts, unions, literals.

    Lists become tuples or sets, texts paths or members of an Enum where that is what the annotation
    says; what JSON has no type for (an Any, a text that names no member) stays as it is. Raises
    MalformedError, which names the place and the value, for a wrong type, a missing field, and an
    unknown one unless those are ignored.
    """
    found: T = _decode(kind, value, "", ignore_unknown)
    return found


def check_types(settings: Any) -> None:
    """Raise UsageError, named as the flag is, for a field of a dataclass that is not as annotated.

    A whole float where an int is annotated becomes that int, also in a frozen dataclass.
    """
    owner: type = type(settings)
    for name, kind in _hints(owner).items():
        value = getattr(settings, name)
        try:
            found = _decode(kind, value, f"--{flag_of(name)}", False)
        except MalformedError as error:
            hint = f"write {name} as {_worded(kind)}, in the task's defaults or in the call."
            raise UsageError(f"{error}.", hint=hint) from None
        if type(value) is float and type(found) is int:
            object.__setattr__(settings, name, found)


def _decode(kind: Any, value: Any, path: str, ignore: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_fields(kind, value, path, ignore)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, arguments, value, path, ignore)
    if origin is typing.Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise MalformedError(f"{path or 'it'} is {_shown(value)}, not one of {choices}")
        return value
    base = kind if origin is None else origin
    if base in (tuple, list, Sequence):
        _expect(list, value, path)
        items = _decode_items(base, arguments, value, path, ignore)
        return items if base is list else tuple(items)
    if base in (set, frozenset):
        _expect(list, value, path)
        return _as_set(base, _decode_items(list, arguments, value, path, ignore), path)
    if base in (dict, Mapping):
        _expect(dict, value, path)
        of = arguments[1] if len(arguments) == 2 else Any
        return {key: _decode(of, item, _join(path, key), ignore) for key, item in value.items()}
    if base is Path:
        return Path(_expect(str, value, path))
    if base is float and type(value) is int:
        return float(value)
    if base is int and type(value) is float and value.is_integer():
        return int(value)  # JSON knows no difference between 8 and 8.0
    if isinstance(base, type) and issubclass(base, Enum):
        return base.__members__.get(value, value) if isinstance(value, str) else value
    return _expect(base, value, path) if base in _WORDS else value


def _decode_union(kind: Any, parts: tuple[Any, ...], value: Any, path: str, ignore: bool) -> Any:
    if value is None and type(None) in parts:
        return None
    rest = [part for part in parts if part is not type(None)]
    # 1 for float | int stays an int: a part that needs no conversion goes first.
    for part in sorted(rest, key=lambda part: type(value) is not part):
        try:
            return _decode(part, value, path, ignore)
        except MalformedError:
            if len(rest) == 1 and part not in _WORDS:
                raise  # it says which field or entry is wrong
    raise MalformedError(f"{path or 'it'} is {_shown(value)}, which is not {_worded(kind)}")


def _decode_items(
    base: Any, arguments: tuple[Any, ...], value: list[Any], path: str, ignore: bool
) -> list[Any]:
    if base is tuple and arguments and Ellipsis not in arguments:
        if len(arguments) != len(value):
            raise MalformedError(
                f"{path or 'it'} must have {len(arguments)} entries, not {len(value)}"
            )
        kinds = arguments
    else:
        kinds = (arguments[0] if arguments else Any,) * len(value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return [_decode(kind, item, f"{path}[{at}]", ignore) for at, (kind, item) in pairs]


def _as_set(base: Any, items: list[Any], path: str) -> Any:
    try:
        return base(items)
    except TypeError:
        raise MalformedError(f"{path or 'it'} has values that a set cannot hold") from None


def _decode_fields(kind: type, value: Any, path: str, ignore: bool) -> Any:
    _expect(dict, value, path)
    hints, values, missing = _hints(kind), {}, []
    for field in dataclasses.fields(kind):
        if field.name not in value:
            if dataclasses.MISSING is field.default is field.default_factory:
                missing.append(field.name)
            continue
        item = value[field.name]
        # A default may be of another type than the annotation says, as in `seed: int = None`.
        is_default = type(item) is type(field.default) and item == field.default
        values[field.name] = (
            item
            if is_default
            else _decode(hints[field.name], item, _join(path, field.name), ignore)
        )
    unknown = [key for key in value if key not in hints]
    if unknown and not ignore:
        known = ", ".join(hints)
        raise MalformedError(f"{path or 'it'} has the unknown key {unknown[0]!r} (known: {known})")
    if missing:
        raise MalformedError(f"{path or 'it'} lacks {', '.join(missing)}")
    return kind(**values)


def _expect(kind: type, value: Any, path: str) -> Any:
    # bool is an int to Python, but true is no number of MiB.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise MalformedError(f"{path or 'it'} is {_shown(value)}, which is not {_worded(kind)}")
    return value


def _shown(value: Any) -> str:
    """As JSON writes what Python writes otherwise."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


#: The types of JSON, as a message calls them.
_WORDS: Mapping[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false",
    list: "a list", dict: "an object", type(None): "null", Path: "a path",
}  # fmt: skip


def _worded(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(_worded, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    base = typing.get_origin(kind) or kind
    base = {tuple: list, set: list, frozenset: list, Sequence: list, Mapping: dict}.get(base, base)
    return _WORDS.get(base, "an object")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def plain(value: Any) -> Any:
    """What JSON knows, at any depth: dataclasses as dicts, tuples and sets as lists, paths as
    texts, members of an Enum by their names (those that are texts or numbers as such)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, Enum) and not isinstance(value, str | int | float):
        return value.name
    if isinstance(value, Path):
        return str(value)
    return value


def check_storable(name: str, what: Any) -> None:
    """TargetError for what the hook ``name`` gives and the results could not hold."""
    try:
        to_json(what)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{name} gives something that the results cannot hold: {error}.",
            hint="give numbers, texts, and lists or dicts of them (tensor.tolist(), for one).",
        ) from None
