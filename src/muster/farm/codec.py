"""JSON that loses nothing: how parameters and results are written down.

Plain values (finite floats, integers of 64 bits, strings, booleans, None, lists and dicts with
string keys) are ordinary JSON. What JSON cannot say is written as a dict with one key that starts
with ``$``:

==============================  ==========================================
``{"$float": "nan"}``           ``nan``, ``inf`` and ``-inf``
``{"$int": "-0x1f"}``           integers that need more than 64 bits
``{"$str": "61eda080"}``        strings with lone surrogates (odd file names)
``{"$dict": [["$a", 1]]}``      dicts with a key that starts with ``$``
==============================  ==========================================

Not promised: tuples come back as lists, subclasses of plain types as the plain type, members of
an Enum as their values, and all NaN are one NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import orjson

from muster.base.errors import TargetError

#: What one task returned: field name to value.
Result = dict[str, Any]

_PLAIN = frozenset({str, int, float, bool, type(None)})
_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1
_INFINITY = float("inf")
#: orjson gives up at 254 levels, and a tagged dict takes three of them.
_MAX_DEPTH = 80
#: Without these orjson would write dataclasses and dates as something that does not come back.
_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_CANONICAL = _OPTIONS | orjson.OPT_SORT_KEYS


def encode(value: object) -> bytes:
    """``value`` as JSON bytes that `decode` turns back; TargetError names what cannot be stored."""
    try:
        data = orjson.dumps(value, None, _OPTIONS)
    except TypeError:
        return _encode_tagged(value, _OPTIONS)
    # orjson writes NaN as null without a word, so each null is suspicious; scanning the bytes
    # is far cheaper than looking at every value of the many dicts that hold neither.
    if b"null" in data or b'"$' in data:
        return _encode_tagged(value, _OPTIONS)
    return data


def encode_canonical(value: object) -> bytes:
    """The same as `encode` with sorted keys: equal content gives equal bytes.

    ``1``, ``1.0`` and ``True`` stay three different values, and so do ``0.0`` and ``-0.0``.
    """
    try:
        data = orjson.dumps(value, None, _CANONICAL)
    except TypeError:
        return _encode_tagged(value, _CANONICAL)
    if b"null" in data or b'"$' in data:
        return _encode_tagged(value, _CANONICAL)
    return data


def decode(data: bytes) -> Any:
    """The value that was encoded; ValueError when ``data`` was not written by this module."""
    value = orjson.loads(data)
    return _untag(value) if b'"$' in data else value


def check_result(value: object) -> Result:
    """What a task function returned, as a dict that `encode` takes.

    Accepted: None (no fields), a mapping with string keys, or a dataclass instance. Field values
    are numbers, strings, booleans, None, and lists or tuples of those; scalars of numpy and
    tensors without dimensions become Python numbers. Everything else is a TargetError that names
    the field. A dict that needs no change is returned itself, not copied.
    """
    result: Mapping[Any, object]
    if type(value) is dict:
        result = value
    elif value is None:
        return {}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        result = dict(value)
    else:
        raise _not_a_result(value)
    for name, item in result.items():
        if type(item) not in _PLAIN or type(name) is not str:
            return {_field(key): _plain(entry, f'result["{key}"]') for key, entry in result.items()}
    return dict(result) if type(result) is not dict else result


def unwrap_scalar(value: object) -> object:
    """A numpy scalar or a 0-dimensional tensor as its Python value; others unchanged.

    Recognised by shape and ``.item()``, so that neither numpy nor torch has to be imported.
    """
    if getattr(value, "ndim", None) == 0 and not isinstance(value, type):
        item = getattr(value, "item", None)
        if callable(item):
            unwrapped: object = item()
            return unwrapped
    return value


def plain_scalar(value: object) -> object:
    """A subclass instance of str, int or float as the plain type; others unchanged."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value


def _encode_tagged(value: object, option: int) -> bytes:
    return orjson.dumps(_tag(value, "value", option == _CANONICAL, 0), None, option)


def _tag(value: object, path: str, canonical: bool, depth: int) -> object:
    if type(value) is dict and depth < _MAX_DEPTH:
        return _tag_dict(value, path, canonical, depth)
    if type(value) not in _PLAIN:
        value = plain_scalar(value.value if isinstance(value, Enum) else value)
    if value is None or value is True or value is False:
        return value
    if isinstance(value, float):
        if -_INFINITY < value < _INFINITY:
            return value
        return {"$float": repr(value)}
    if isinstance(value, int):
        # Hexadecimal, because Python refuses to read decimals of more than 4300 digits.
        return value if _INT_MIN <= value <= _INT_MAX else {"$int": hex(value)}
    if isinstance(value, str):
        return value if _is_unicode(value) else {"$str": value.encode(errors="surrogatepass").hex()}
    if depth >= _MAX_DEPTH:
        raise _too_deep(path)
    if isinstance(value, list | tuple):
        return [_tag(item, f"{path}[{i}]", canonical, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _tag_dict(value, path, canonical, depth)
    raise TargetError(
        f"Cannot store {path}: {_shown(value)} has no JSON form.",
        hint="use numbers, strings, booleans, None, and lists or dicts of those.",
    )


def _tag_dict(value: dict[Any, object], path: str, canonical: bool, depth: int) -> object:
    tagged: dict[str, object] = {}
    escape = False
    for key, item in value.items():
        if not isinstance(key, str):
            raise TargetError(
                f"Cannot store {path}: its key {key!r} is of type {type(key).__name__}, "
                "and JSON keys are strings.",
                hint=f"write str({key!r}).",
            )
        plain = str.__str__(key)
        escape = escape or plain.startswith("$") or not _is_unicode(plain)
        # Metrics are flat dicts of floats where one is NaN: spare the others the long way.
        if type(item) is float and -_INFINITY < item < _INFINITY:
            tagged[plain] = item
        else:
            tagged[plain] = _tag(item, f'{path}["{key}"]', canonical, depth + 1)
    if not escape:
        return tagged
    pairs = sorted(tagged.items()) if canonical else list(tagged.items())
    return {"$dict": [[_tag(key, path, canonical, 0), item] for key, item in pairs]}


def _untag(value: Any) -> Any:
    if type(value) is list:
        return [_untag(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key.startswith("$"):
            return _read_tag(key, item)
    return {key: _untag(item) for key, item in value.items()}


def _read_tag(tag: str, item: Any) -> Any:
    if tag == "$float":
        return float(item)
    if tag == "$int":
        return int(item, 16)
    if tag == "$str":
        return bytes.fromhex(item).decode(errors="surrogatepass")
    if tag == "$dict":
        return {_untag(key): _untag(entry) for key, entry in item}
    raise ValueError(f"Unknown tag {tag!r} in stored JSON: a newer muster may have written it.")


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _field(name: object) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    raise TargetError(
        f"The task returned a mapping with the key {name!r} of type {type(name).__name__}: "
        "field names are strings, they become columns.",
        hint=f"return {{str(key): value}}, here {str(name)!r}.",
    )


def _plain(value: object, path: str, depth: int = 0) -> object:
    value = plain_scalar(unwrap_scalar(value))
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        if depth >= _MAX_DEPTH:
            raise _too_deep(path)
        if _PLAIN.issuperset(map(type, value)):
            return list(value)
        return [
            item if type(item) in _PLAIN else _plain(item, f"{path}[{i}]", depth + 1)
            for i, item in enumerate(value)
        ]
    raise TargetError(
        f"The task returned {path} = {_shown(value)}, which cannot be stored as a result.",
        hint=_remedy(value),
    )


def _shown(value: object) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"a value of type {name}{size}"


def _remedy(value: object) -> str:
    if callable(getattr(value, "tolist", None)):
        return ".tolist() turns a small one into a list; save a large one under ctx.folder."
    if isinstance(value, Mapping):
        return "lift its entries to the top level, each under its own name."
    if isinstance(value, set | frozenset):
        return "return sorted(...) of it, a list."
    if isinstance(value, complex):
        return "return its .real and .imag as two fields."
    return "return numbers, strings, or lists of them; save anything else under ctx.folder."


def _not_a_result(value: object) -> TargetError:
    return TargetError(
        f"The task returned {_shown(value)}; a result is a mapping or a dataclass, "
        "so that each value has a name.",
        hint='return {"value": x}.',
    )


def _too_deep(path: str) -> TargetError:
    return TargetError(
        f"Cannot store {path[:60]}...: it is nested deeper than {_MAX_DEPTH} levels, "
        "or it contains itself.",
        hint="return a flatter value, or save it under ctx.folder.",
    )
