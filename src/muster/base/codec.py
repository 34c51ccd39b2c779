"""Dataclasses to JSON and back, for the small files of a run folder."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.base.atomic_files import write_atomic
from muster.base.errors import SetupError


def to_json(record: Any) -> bytes:
    """Readable, key-ordered JSON of a dataclass or of plain values; tuples become lists."""
    text = json.dumps(_plain(record), indent=2, ensure_ascii=False)
    # A lone surrogate, of a file's name, becomes \udcff, which JSON reads back.
    return text.encode("utf-8", "backslashreplace") + b"\n"


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


def read_record(
    path: Path, what: str, shape: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """A JSON object with at least these fields, of these types: SetupError for any other JSON."""
    record = read_json(path, what)
    wrong = "" if isinstance(record, dict) else "it is no object"
    for name, kind in shape.items():
        if not wrong and not isinstance(record.get(name), kind):
            wrong = f"{name} is {'of another type' if name in record else 'missing'}"
    if wrong:
        raise SetupError(
            f"The {what} at {path} is damaged: {wrong}.", hint="restore it from a copy."
        )
    assert isinstance(record, dict)
    return record


def from_record(kind: type, record: Mapping[str, Any]) -> Any:
    """A dataclass from its JSON: lists become tuples and texts paths, as annotated."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = record.get(field.name, field.default)
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and Path in (
            hints[field.name],
            *typing.get_args(hints[field.name]),
        ):
            value = Path(value)
        values[field.name] = value
    return kind(**values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
