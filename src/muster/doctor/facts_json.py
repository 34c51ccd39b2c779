"""Facts as JSON and back, for ``--save-facts`` and ``--from-facts``.

What is left out is not known; a key that does not exist is an error, because a misspelt fact would
otherwise be read as an unknown one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from pathlib import Path
from typing import Any

from muster.base.codec import write_json
from muster.base.errors import UsageError
from muster.doctor.facts import FACTS_VERSION, Facts


class _Malformed(ValueError):
    """Where in the file something is wrong, and what."""


def save_facts(path: Path, facts: Facts) -> None:
    """Replace ``path``; raises OSError where that fails."""
    write_json(path, facts)


def load_facts(path: Path) -> Facts:
    """The facts in ``path``; UsageError when it is missing or is no facts file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the facts in {path}: {error.strerror or error}.",
            hint="record a machine there with `muster doctor --save-facts FILE`.",
        ) from None
    return facts_from_json(data, str(path))


def facts_from_json(data: bytes, source: str) -> Facts:
    """The facts in ``data``; ``source`` names it in the UsageError."""
    try:
        record = json.loads(data)
        version = record.get("version", FACTS_VERSION) if isinstance(record, dict) else None
        if isinstance(version, int) and version > FACTS_VERSION:
            raise _Malformed(
                f"it has version {version}, and this muster reads up to {FACTS_VERSION}"
            )
        facts: Facts = decode(Facts, record, "the file")
    except (_Malformed, ValueError) as error:
        raise UsageError(
            f"The facts in {source} cannot be used: {error}.",
            hint="record them again with `muster doctor --save-facts FILE`.",
        ) from None
    return facts


def decode(kind: Any, value: Any, where: str) -> Any:
    """``value`` of JSON as the annotated ``kind``: dataclasses, tuples, dicts, unions, literals.

    Raises ValueError with ``where`` it does not fit.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return decode(next(part for part in arguments if part is not type(None)), value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _Malformed(f"{where} must be an object, not {type(value).__name__}")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is typing.Literal:
        if value not in arguments:
            raise _Malformed(f"{where} is {value!r}, not one of {', '.join(map(str, arguments))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    # bool is an int to Python, but true is no number of MiB.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise _Malformed(f"{where} is {value!r}, which is no {kind.__name__}")
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _Malformed(f"{where} must be a list, not {type(value).__name__}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds: tuple[Any, ...] = (arguments[0],) * len(value)
    elif len(arguments) == len(value):
        kinds = arguments
    else:
        raise _Malformed(f"{where} must have {len(arguments)} entries, not {len(value)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(decode(kind, item, f"{where}[{at}]") for at, (kind, item) in pairs)


def _record(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _Malformed(f"{where} must be an object, not {type(value).__name__}")
    hints = _hints(kind)
    for key in value:
        if key not in hints:
            raise _Malformed(f"{where} has the unknown key {key!r} (known: {', '.join(hints)})")
    fields = {key: decode(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in fields
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise _Malformed(f"{where} lacks {', '.join(missing)}")
    return kind(**fields)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
