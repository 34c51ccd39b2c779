"""The schemas of ``--json``, which a test holds against what a command has really printed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "json"


@cache
def schemas() -> dict[str, Any]:
    """By the name of its file, without the suffix."""
    return {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}


@cache
def _registry() -> Registry[Any]:
    found = [(f"{name}.json", Resource.from_contents(_closed(s))) for name, s in schemas().items()]
    registry: Registry[Any] = Registry().with_resources(found)
    return registry


def _closed(schema: Any) -> Any:
    """The same, where an object may have no key that is not named: what is printed is described."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _closed(one) for key, one in schema.items()}
    # An `if` only asks, and an object without named keys has those of its user.
    if schema.get("properties") and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def problems(name: str, value: Any) -> list[str]:
    """What is wrong with ``value`` by the schema ``name``."""
    kind = jsonschema.Draft202012Validator
    validator = kind(_closed(schemas()[name]), registry=_registry())
    return [
        f"{error.json_path}: {(jsonschema.exceptions.best_match([error]) or error).message[:300]}"
        for error in validator.iter_errors(value)
    ]


def check_printed(name: str, text: str) -> Any:
    """One JSON document, which is as the schema ``name`` says; returns it."""
    value = json.loads(text)
    assert not (found := problems(name, value)), found
    return value
