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

A task is a hash of its content (`payload_and_key`), so that resuming never depends on position. The
seed is the parameter ``seed`` and nothing special. The version of the code is not part of the key:
it is recorded beside the run and compared there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from muster.base.errors import TargetError
from muster.base.shown_text import one_line

PLAIN = frozenset({str, int, float, bool, type(None)})
_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1
_INFINITY = float("inf")
#: orjson gives up at 254 levels, and a tagged dict takes three of them.
MAX_DEPTH = 80
#: Without these orjson would write dataclasses and dates as something that does not come back.
_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_CANONICAL = _OPTIONS | orjson.OPT_SORT_KEYS
_LINE = _OPTIONS | orjson.OPT_APPEND_NEWLINE
_MOST_JOINED = 2**24
#: Where this is in an encoded text, it may hold what JSON lacks.
TAG = b'"$'


def encode(value: object) -> bytes:
    """``value`` as JSON bytes that `decode` turns back; TargetError names what cannot be stored."""
    try:
        data = orjson.dumps(value, None, _OPTIONS)
    except TypeError:
        return _encode_tagged(value, _OPTIONS)
    # orjson silently writes NaN as null, so each null is suspicious; scanning the bytes
    # is far cheaper than looking at every value of the many dicts that hold neither.
    if (b"null" in data and not _is_of_none(value, data)) or TAG in data:
        return _encode_tagged(value, _OPTIONS)
    return data


def _is_of_none(value: object, data: bytes) -> bool:
    """Whether each null in ``data`` is one of the values None of a dict."""
    return type(value) is dict and data.count(b"null") == sum(v is None for v in value.values())


def encode_canonical(value: object) -> bytes:
    """The same as `encode` with sorted keys: equal content gives equal bytes.

    ``1``, ``1.0`` and ``True`` stay three different values, and so do ``0.0`` and ``-0.0``.
    """
    try:
        data = orjson.dumps(value, None, _CANONICAL)
    except TypeError:
        return _encode_tagged(value, _CANONICAL)
    if (b"null" in data and not _is_of_none(value, data)) or TAG in data:
        return _encode_tagged(value, _CANONICAL)
    return data


#: `encode` with the end of a line, of what has only values that JSON has: in a third of the time.
encode_json_line: Callable[[object], bytes] = partial(orjson.dumps, option=_LINE)


def decode(data: bytes) -> Any:
    """The value that was encoded; ValueError when ``data`` was not written by this module."""
    value = orjson.loads(data)
    return _untag(value) if TAG in data else value


def decode_all(texts: Sequence[bytes]) -> list[Any]:
    """`decode` of each, read as one text where none has a tag."""
    if sum(map(len, texts)) > _MOST_JOINED:
        return [decode(text) for text in texts]
    joined = b",".join(texts)
    if TAG in joined:
        return [decode(text) for text in texts]
    values: list[Any] = orjson.loads(b"[" + joined + b"]")
    return values


def short_key(key: bytes) -> str:
    """The start of a task's key, by which people and tables name it."""
    return key.hex()[:12]


def task_label(number: int, payload: bytes) -> str:
    """A task as people know it: its number, which `muster logs` takes, and its parameters.

    >>> task_label(3, b'{"lr":0.1,"seed":2}')
    '3 (lr=0.1, seed=2)'
    >>> task_label(4, b'{"order":0,"place":["a.jsonl"],"start":500,"stop":1000}')
    '4 (shard 0, rows 500 to 1,000)'
    """
    try:
        params = decode(payload)
    except (ValueError, LookupError, TypeError):
        return str(number)
    if not isinstance(params, dict) or not params:
        return str(number)
    if {"order", "place", "start", "stop"} <= params.keys():  # a chunk of a map
        rows = f"rows {params['start']:,} to {params['stop']:,}"
        return f"{number} (shard {params['order']}, {rows})"
    shown = ", ".join(f"{name}={one_line(str(value), 30)}" for name, value in params.items())
    return f"{number} ({one_line(shown, 90)})"


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
    if type(value) in PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return value


_SURROGATE = re.compile("[\ud800-\udfff]")
_LOOKS_ESCAPED = re.compile(r"\\ud[89a-f][0-9a-f]{2}")


def escape_surrogates(text: str) -> str:
    """``text`` as Unicode that every table can hold: lone surrogates (bytes of odd file names)
    become ``\\udcff``, and in such a text ``\\`` is doubled. Other texts stay as they are, unless
    they hold what looks like it.
    """
    if _is_unicode(text) and "\\ud" not in text:
        return text
    if not _SURROGATE.search(text) and not _LOOKS_ESCAPED.search(text):
        return text
    doubled = text.replace("\\", "\\\\")
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", doubled)


def csv_cell(text: str) -> str:
    """``text`` with an apostrophe in front where a spreadsheet would take it for a formula.

    Numbers stay as they are, also in columns of texts.
    """
    if not text or text[0] not in "=+-@\t\r":
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _encode_tagged(value: object, option: int) -> bytes:
    return orjson.dumps(_tag(value, "value", option == _CANONICAL, 0), None, option)


def _tag(value: object, path: str, canonical: bool, depth: int) -> object:
    if type(value) is dict and depth < MAX_DEPTH:
        return _tag_dict(value, path, canonical, depth)
    if type(value) not in PLAIN:
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
    if depth >= MAX_DEPTH:
        raise too_deep(path)
    if isinstance(value, list | tuple):
        return [_tag(item, f"{path}[{i}]", canonical, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _tag_dict(value, path, canonical, depth)
    raise TargetError(
        f"Cannot store {path}: {shown_type(value)} has no JSON form.",
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


def shown_type(value: object) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"a value of type {name}{size}"


def too_deep(path: str) -> TargetError:
    return TargetError(
        f"Cannot store {path[:60]}...: it is nested deeper than {MAX_DEPTH} levels, "
        "or it contains itself.",
        hint="return a flatter value, or save it under ctx.folder.",
    )


#: 16 bytes.
TaskKey = bytes

KEY_BYTES = 16


def payload_and_key(target: str) -> Callable[[dict[str, object]], tuple[bytes, TaskKey]]:
    """A function from parameters to (stored payload, key), for enqueuing many tasks.

    The payload is the canonical encoding, the key a hash of the target with it: equal content gives
    equal keys.
    """
    key_of = key_of_payload(target)

    def make(params: dict[str, object]) -> tuple[bytes, TaskKey]:
        payload = encode_canonical(params)
        return payload, key_of(payload)

    return make


def key_of_payload(target: str) -> Callable[[bytes], TaskKey]:
    """The second half of `payload_and_key`."""
    prefix = b"[" + encode_canonical(target) + b","
    size = KEY_BYTES
    return lambda payload: blake2b(prefix + payload + b"]", digest_size=size).digest()
