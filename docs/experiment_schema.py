"""The JSON schema of experiment files, from the dataclasses that say their keys and flags. Editors
read what it makes, and Muster never does.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from muster.api.experiments.file import ExperimentKeys, OrderKeys, PhaseKeys
from muster.cli import values
from muster.cli.flags import ONE_TIME
from muster.cli.help_page import field_texts, is_own, own_text
from muster.cli.main import read_command
from muster.cli.options import Option, flags_by_name

#: A command line of each command, which has all flags that do not come with what is run.
_LINES = {
    "sweep": ("sweep", "train.py:run"),
    "map": ("map", "embed"),
    "train": ("train", "digits"),
    "run": ("run", "train.py"),
}
_REFERENCE = r"\$\{.*\}"
Schema = dict[str, Any]


def experiment_schema() -> Schema:
    """Of draft 2020-12. Where flags come with what is run, other keys are allowed."""
    flags: dict[str, Schema] = {}
    commands = {command: _of_command(command, flags) for command in _LINES}
    phases = [_keys(command, of, in_phase=True) for command, of in commands.items()]
    singles = [_keys(command, of, in_phase=False) for command, of in commands.items()]
    of_all = {name: key for of in reversed(commands.values()) for name, key in of.items()}
    of_a_phase = [{"required": [name]} for name in {**_fields(PhaseKeys), **_fields(OrderKeys)}]
    with_phases = {
        "type": "object", "required": ["phase"], "not": {"anyOf": of_a_phase},
        "properties": {
            **{name: {"$ref": f"#/$defs/{key}"} for name, key in sorted(of_all.items())},
            **_fields(ExperimentKeys),
            "phase": {"type": "object", "minProperties": 1,
                      "additionalProperties": {"anyOf": phases},
                      "propertyNames": {"pattern": r"^[A-Za-z_][\w-]*$"}},
        },
    }  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An experiment file of Muster",
        "description": "Made by docs/generate_reference.py; docs/experiments.md explains it.",
        "if": {"type": "object", "required": ["phase"]},
        "then": with_phases,
        "else": {"anyOf": singles},
        "$defs": dict(sorted(flags.items())),
    }


def _of_command(command: str, flags: dict[str, Schema]) -> dict[str, str]:
    """The keys of a command, with hyphens and with underscores, each with its definition."""
    found: dict[str, str] = {}
    parsed = read_command(["muster", *_LINES[command]])
    for name, option in flags_by_name(parsed.flags).items():
        moment = f"{option.group}.{option.path[-1]}" in ONE_TIME or option.path[-1] == "run_dir"
        if is_own(option) or moment or name == "h":
            continue
        schema = _of_option(option)
        key = name if flags.setdefault(name, schema) == schema else f"{command}.{name}"
        flags[key] = schema
        found[name] = found[name.replace("-", "_")] = key
    return found


def _keys(command: str, of: dict[str, str], *, in_phase: bool) -> Schema:
    own = _fields(OrderKeys if in_phase else ExperimentKeys)
    if not in_phase:
        del own["phase"]
    properties = {name: {"$ref": f"#/$defs/{key}"} for name, key in of.items()}
    properties |= {**_fields(PhaseKeys), **own, "command": {"const": command}}
    schema: Schema = {"type": "object", "required": ["command"], "properties": properties}
    if command == "run":
        return {**schema, "required": ["command", "program"], "additionalProperties": False}
    if command == "sweep":  # a function and a program have no flags of their own
        named = {"required": ["target"], "properties": {"target": {"not": {"pattern": ":"}}}}
        return {**schema, "if": named, "else": {"propertyNames": {"enum": [*properties]}}}
    return {**schema, "required": ["command", "target"]}


def _fields(kind: type) -> dict[str, Schema]:
    """The keys that are no flags."""
    import typing

    found: dict[str, Schema] = {}
    texts = field_texts(kind)
    for name, hint in typing.get_type_hints(kind).items():
        schema = {**_of_kind(hint), "description": " ".join(texts.get(name, "").split())}
        found[name] = found[name.replace("_", "-")] = schema
    return found


def _of_option(option: Option) -> Schema:
    schema: Schema
    if option.arity == 0:
        schema = {"type": "boolean"}
    elif option.flag.read or option.reader or str in values.members(option.kind):
        schema = {"type": ["string", "number", "array", "boolean"]}
    else:
        schema = _of_kind(option.kind)
        if option.collects:
            scalar = schema.get("items", {})
            schema = {"anyOf": [{"type": ["array", "object"]}, scalar or {"type": "string"}]}
    return {**schema, "description": own_text(option)}


_REST = {"type": "string", "pattern": _REFERENCE}
_OF: dict[Any, Schema] = {
    bool: {"type": "boolean"}, str: {"type": ["string", "number"]},
    Path: {"type": ["string", "array"]}, int: {"type": ["integer", "string"]},
    float: {"type": ["number", "string"]},
}  # fmt: skip


def _of_kind(kind: Any) -> Schema:
    """What a value may be: as its type, or as text, which its flag reads."""
    kinds = [one for one in values.members(kind) if one is not types.NoneType]
    if len(kinds) > 1:
        return {"anyOf": [_of_kind(one) for one in kinds]}
    kind = kinds[0]
    origin = get_origin(kind) or kind
    if origin is Literal:
        return {"anyOf": [{"enum": [*get_args(kind)]}, _REST]}
    if origin in (tuple, list, set, frozenset):
        parts = [one for one in get_args(kind) if one is not Ellipsis]
        return {"type": "array", "items": _of_kind(parts[0]) if parts else {}}
    if kind in _OF:
        return dict(_OF[kind])
    return {"type": "object"} if "Mapping" in str(kind) else {}
