"""Values as JSON that every browser reads as they are."""

from __future__ import annotations

from typing import Any

import orjson

#: A browser knows whole numbers up to 53 bits; NaN and infinity become null.
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER
_LARGEST = 2**53 - 1


def to_json(value: Any) -> bytes:
    """
    >>> to_json({"a": 2**60, "b": float("nan"), "c": "\\udcff"}).decode()
    '{"a":"1152921504606846976","b":null,"c":"\\\\\\\\udcff"}'
    """
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_plain(value), option=_OPTIONS)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else str(value)
    if isinstance(value, dict):
        return {_plain(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return _plain(str(value))
