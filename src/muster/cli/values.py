"""From the words of a command line to values, by the types of the fields that they are for."""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import types
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from muster.base.errors import UsageError

_MANY = (tuple, list, set, frozenset)
_WORDS = {
    int: "a whole number", float: "a number", str: "a text", Path: "a path", bool: "true or false",
}  # fmt: skip
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: "true|false"}


def plain(kind: Any) -> Any:
    """The type without ``Annotated``."""
    return plain(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    kind = plain(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(one for part in get_args(kind) for one in members(part))
    return (kind,)


def marks(kind: Any) -> tuple[Any, ...]:
    """What ``Annotated`` says, also about the types of a union."""
    own: tuple[Any, ...] = getattr(kind, "__metadata__", ())
    bare = plain(kind)
    parts = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else ()
    return (*own, *(mark for part in parts for mark in marks(part)))


def choices(kind: Any) -> list[str]:
    """What can be chosen from; empty where values are not all known by name."""
    kinds = [one for one in members(kind) if one is not types.NoneType]
    if not all(get_origin(one) is Literal for one in kinds):
        return []
    return [str(value) for one in kinds for value in get_args(one)]


def collects(kind: Any) -> bool:
    """Whether it holds any number of values, so that a flag said twice adds to it."""
    return any((get_origin(one) or one) in (*_MANY, dict) for one in members(kind)) and (
        arity(kind) is None
    )


def is_switch(kind: Any) -> bool:
    return plain(kind) is bool


def arity(kind: Any) -> int | None:
    """How many words a value has; None: as many as there are."""
    for one in members(kind):
        if (get_origin(one) or one) in _MANY:
            parts = get_args(one)
            is_fixed = get_origin(one) is tuple and Ellipsis not in parts and parts
            return len(parts) if is_fixed else None
        if not _is_known(one):
            return None
    return 0 if is_switch(kind) else 1


def read(kind: Any, words: Sequence[str], flag: str, default: Any) -> Any:
    """The value of type ``kind`` in ``words``; UsageError where they cannot be one."""
    kinds = members(kind)
    if types.NoneType in kinds and list(words) == ["None"]:
        return None
    for one in kinds:
        container = get_origin(one) or one
        if container in _MANY:
            return _read_many(one, container, words, flag)
    if not all(map(_is_known, kinds)):
        return _read_foreign(kind, words, flag, default)
    text = words[0]
    for one in kinds:
        try:
            return _read_one(one, text)
        except ValueError:
            continue
    raise _refused(flag, text, kinds)


def _read_many(kind: Any, container: Any, words: Sequence[str], flag: str) -> Any:
    parts = get_args(kind) or (str,)
    if container is tuple and Ellipsis not in parts and get_args(kind):
        if len(words) != len(parts):
            raise UsageError(f"{flag} {' '.join(words)}: write {len(parts)} values.")
        return tuple(
            read(part, [word], flag, None) for part, word in zip(parts, words, strict=True)
        )
    return container(read(parts[0], [word], flag, None) for word in words)


def _is_known(kind: Any) -> bool:
    return kind in (int, float, str, bool, Path, types.NoneType, Any) or get_origin(kind) is Literal


def _read_one(kind: Any, text: str) -> Any:
    """ValueError where ``text`` is no such value."""
    if get_origin(kind) is Literal:
        return {str(value): value for value in get_args(kind)}[_known_key(kind, text)]
    if kind is types.NoneType:
        raise ValueError
    if kind is bool:
        return {"true": True, "false": False}[_one_of(text.lower(), ("true", "false"))]
    if kind is Path:
        return Path(os.path.expanduser(text))  # noqa: PTH111 Path.expanduser raises for ~nobody
    return text if kind is Any else kind(text)


def _known_key(kind: Any, text: str) -> str:
    return _one_of(text, [str(value) for value in get_args(kind)])


def _one_of(text: str, known: Iterable[str]) -> str:
    if text not in known:
        raise ValueError
    return text


def _refused(flag: str, text: str, kinds: Sequence[Any]) -> UsageError:
    """What may be written instead."""
    choices = [str(value) for kind in kinds for value in get_args(kind)]
    near = difflib.get_close_matches(text, choices, n=1)
    wanted = [*(_WORDS[kind] for kind in kinds if kind in _WORDS), *choices]
    listed = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    return UsageError(
        f"{flag} {text}: write {listed}.", hint=f"did you mean {near[0]}?" if near else None
    )


def _read_foreign(kind: Any, words: Sequence[str], flag: str, default: Any) -> Any:
    """A type that only a user's own dataclass has (a dict, an enum, a date): tyro knows many."""
    import tyro

    field: Any = ("value", kind, dataclasses.field(default_factory=lambda: default))
    holder = dataclasses.make_dataclass("Holder", [field])
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            found: Any = tyro.cli(holder, args=["--value", *words])
    except (SystemExit, Exception):
        name = getattr(kind, "__name__", str(kind))
        raise UsageError(f"{flag} {' '.join(words)}: cannot be read as {name}.") from None
    return found.value


def metavar(kind: Any) -> str:
    """What a value looks like: ``N``, ``adam|sgd``, ``N ...``."""
    kinds = [one for one in members(kind) if one is not types.NoneType]
    return "|".join(_metavar_of(one) for one in kinds)


def _metavar_of(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, parts))
    if (origin or kind) in _MANY:
        if origin is tuple and Ellipsis not in parts:
            return " ".join(map(metavar, parts))
        return f"{metavar(parts[0]) if parts else 'TEXT'} ..."
    if kind in _METAVARS:
        return _METAVARS[kind]
    return "VALUE"


def texts(value: Any) -> list[str]:
    """``value`` as the words that ``read`` makes it from."""
    if isinstance(value, tuple | list | set | frozenset):
        return [text for one in value for text in texts(one)]
    return [str(value)]
