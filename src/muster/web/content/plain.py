"""Values made fit for a page: what JSON has, without secrets, controls and megabytes of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from muster.api.report.content import Block as Block
from muster.api.report.content import Facts, Listing, Picture, Table, Text, in_words
from muster.base.shown_text import clean_text, hide_secrets, safe_line, without_secrets

_MOST_CHARS = 500
#: Of a traceback or a log the last lines are read; what is longer is cut in front.
_MOST_LISTED = 20_000
#: A browser knows whole numbers up to 53 bits.
_MOST_EXACT = 2**53 - 1
#: NaN and infinity become null.
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER


def finite(value: Any) -> float | None:
    """A number that a curve can show, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def plain(value: Any) -> Any:
    """A cell: numbers as numbers, where JSON and a browser hold them exactly, all else as text.

    >>> [plain(value) for value in (0.5, True, None, float("nan"), -math.inf, 2**60, "a\\x1b[2Jb")]
    [0.5, True, None, 'nan', '-inf', '1152921504606846976', 'ab']
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _MOST_EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return line(value)
    return line(in_words(hide_secrets(value)))


def line(text: str, most: int = _MOST_CHARS) -> str:
    """A text on one line, without controls and without what looks like a secret."""
    return safe_line(text, most)


def listing(text: str) -> str:
    """Lines as they are, without controls; of many the last."""
    kept = text[-_MOST_LISTED:]
    front = "" if len(kept) == len(text) else f"({len(text) - len(kept):,} characters before)\n"
    return front + clean_text(without_secrets(kept))


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; those that are named like secrets have lost their values."""
    return {line(str(name)): plain(value) for name, value in hide_secrets(values).items()}


def block(given: Block) -> dict[str, Any]:
    """A block of the report as a page holds it; a picture is its alternative text."""
    match given:
        case Table(caption, columns, rows, note):
            return {
                "kind": "table",
                "caption": caption,
                "columns": [line(column) for column in columns],
                "rows": [[line(in_words(cell)) for cell in row] for row in rows],
                "note": note,
            }
        case Facts(caption, pairs, _):
            return {
                "kind": "facts",
                "caption": caption,
                "pairs": [[line(name), plain(value)] for name, value in pairs],
            }
        case Listing(summary, text):
            return {"kind": "listing", "caption": line(summary), "text": listing(text)}
        case Text(text):
            return {"kind": "text", "text": line(text, 2000)}
        case Picture(_, alt, _):
            return {"kind": "text", "text": line(alt)}


def to_json(value: Any) -> bytes:
    """
    >>> to_json({"a": 2**60, "b": float("nan"), "c": "\\udcff"}).decode()
    '{"a":"1152921504606846976","b":null,"c":"\\\\\\\\udcff"}'
    """
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_jsonable(value), option=_OPTIONS)


def _jsonable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _MOST_EXACT else str(value)
    if isinstance(value, dict):
        return {_jsonable(str(name)): _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return _jsonable(str(value))
