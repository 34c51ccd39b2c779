"""The text of an experiment file, TOML or YAML, as a tree of values, and the line of each."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, UsageError

Keys = tuple[str, ...]
#: Where each value stands: the keys that lead to it → ``file.toml:7``.
Places = dict[Keys, str]


def read_tree(file: Path) -> tuple[dict[str, Any], Places]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # an editor may have put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        written = [f"{file}{ending}" for ending in (".toml", ".yaml", ".yml")]
        there = [name for name in written if Path(name).is_file()]
        near = f"did you mean {there[0]}?" if there else "`muster init FILE` writes one."
        raise UsageError(
            f"Cannot read {file}: {why}.",
            hint=f"{near} A run that was started goes on with `muster resume RUN`.",
        ) from None
    if file.suffix.lower() in (".yaml", ".yml"):
        return _read_yaml(text, file.name)
    if file.suffix.lower() != ".toml":
        raise UsageError(
            f"{file} is not an experiment file.", hint="its name must end in .toml, .yaml or .yml."
        )
    try:
        return _plain(tomllib.loads(text)), places_in_toml(text, file.name)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        where = f"{file.name}:{at.group(1)}" if at else file.name
        said = str(error)[: at.start()] if at else str(error)
        raise UsageError(
            f"{where} is not TOML: {said[:1].lower()}{said[1:]}.",
            hint='write texts in quotes: target = "train.py:run".',
        ) from None


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]")
_PAIR = re.compile(rf"\s*({_DOTTED})\s*=")


def places_in_toml(text: str, name: str) -> Places:
    """The line of each key. tomllib does not tell; a line of a longer text may be taken for a key,
    which then is none of the file's, and is never looked up."""
    places: Places = {}
    table: Keys = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _parts(match.group(1))
            places.setdefault(table, f"{name}:{number}")
        elif match := _PAIR.match(line):
            places.setdefault((*table, *_parts(match.group(1))), f"{name}:{number}")
    return places


def _parts(dotted: str) -> Keys:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, dotted))


def _read_yaml(text: str, name: str) -> tuple[dict[str, Any], Places]:
    try:
        import yaml
    except ImportError:
        raise MissingPackageError(
            f"Reading {name}", "pyyaml", "", instead="write the same as TOML"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """As YAML 1.2 reads numbers and truths: 1e-3 is a number, 010 is ten, 4:00:00 and on are
        texts."""

    own = (":bool", ":float", ":int", ":timestamp")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if not tag.endswith(own)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    truth, whole, number = (
        re.compile(r"(?:true|false|True|False)$"),
        re.compile(r"[-+]?\d+$"),
        re.compile(
            r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf)$|\.(?:nan|NaN)$"
        ),
    )
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", truth, list("tTfF"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", whole, list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    Loader.add_constructor(
        "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
    )
    places: Places = {}
    loader = Loader(text)

    def value_of(node: Any, at: Keys) -> Any:
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(loader.construct_object(key_node, deep=True))
                where = f"{name}:{key_node.start_mark.line + 1}"
                if key in found:
                    first = places[(*at, key)]
                    raise UsageError(f"{where}: {key} is given a second time; first at {first}.")
                places[(*at, key)] = where
                found[key] = value_of(value_node, (*at, key))
            return found
        if isinstance(node, yaml.SequenceNode):
            return [value_of(one, at) for one in node.value]
        return loader.construct_object(node, deep=True)

    try:
        root = loader.get_single_node()
        tree = {} if root is None else value_of(root, ())
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: !!int x
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(f"{where} is not YAML: {problem}.") from None
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise UsageError(f"{name} holds no keys.", hint="write key: value.")
    return _plain(tree), places


def _plain(value: Any) -> Any:
    """Dates and times as texts: neither flags nor the record of an experiment have them."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, date | time) else value


def set_value(tree: dict[str, Any], places: Places, text: str) -> None:
    """Put ``a.b=value`` into the tree; the value is read as TOML has it, else it is a text."""
    path, equals, said = text.partition("=")
    keys = tuple(part.strip() for part in path.split("."))
    if not equals or not all(keys):
        raise UsageError(f"--set {text}: write a.b=value.", hint="such as --set grid.lr=[0.1,0.2]")
    try:
        value = _plain(tomllib.loads(f"value = {said}")["value"])
    except (tomllib.TOMLDecodeError, KeyError):
        value = said
    phases = tree.get("phase")
    if isinstance(phases, Mapping) and keys[0] in phases:
        keys = ("phase", *keys)
    at: Any = tree
    for depth, key in enumerate(keys[:-1]):
        name = _same_key(at, key)
        if depth == len(keys) - 2 and _are_axes(at.get(name)):
            at[name] = [one for one in at[name] if one.partition("=")[0].strip() != keys[-1]]
            at[name].append(f"{keys[-1]}={json.dumps(value) if isinstance(value, list) else said}")
            _mark(places, (*keys[:-2], name))
            return
        if at.get(name) is not None and not isinstance(at[name], dict):
            raise UsageError(
                f"--set {text}: {'.'.join(keys[: depth + 1])} is a value, and has no "
                f"{keys[depth + 1]}."
            )
        at = at.setdefault(name, {})
    last = _same_key(at, keys[-1])
    at[last] = value
    _mark(places, (*keys[:-1], last))


def _are_axes(value: Any) -> bool:
    """Whether these are the words of a command, as `muster init` writes a grid: ["lr=0.1,0.2"]."""
    return isinstance(value, list) and all(isinstance(one, str) and "=" in one for one in value)


def _mark(places: Places, keys: Keys) -> None:
    for known in [one for one in places if one[: len(keys)] == keys]:
        del places[known]
    places[keys] = "--set"


def _same_key(at: Mapping[str, Any], key: str) -> str:
    """As the file writes it: hyphens and underscores mean the same."""
    same = {one.replace("-", "_"): one for one in at}
    return same.get(key.replace("-", "_"), key)
