"""The words of a command line: what each is before they are options, where the program begins, and
what to write instead where a program was given as the target of a sweep; and their values, by the
types of the fields that they are for.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shlex
import shutil
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from muster.base.errors import MusterError, UsageError, nearest
from muster.base.flags import kind_of_word, own_words, wants_help

_SCRIPTS = (".py", ".sh")
_PLAIN = re.compile(r"[\w@%+=:,./-]*(\{[\w./-]+\}[\w@%+=:./-]*)*")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--`` and those after it; UsageError where nothing follows it."""
    words, ours = list(argv), own_words(argv)
    if len(ours) + 1 == len(words):
        raise UsageError("There is no command after `--`.", hint="write: -- python train.py …")
    return ours, words[len(ours) + 1 :]


def wants_slurm(words: Sequence[str]) -> bool:
    """Whether ``--on slurm`` is among them, before anything is parsed."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    return any(word == "--on=slurm" or (word, value) == ("--on", "slurm") for word, value in pairs)


#: What starts no ranks here and now: ranks of other hosts, or those after a wait for GPUs, which
#: may take days; a supervisor has torch in its memory.
_NO_RANKS = {"--dry-run", "--dry_run", "--wait", "--hosts"}


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether a command starts ranks here, as far as can be told before anything is parsed. A
    program may have such flags too; its supervisor is then started a moment later.
    """
    said = {word.partition("=")[0] for word in words}
    return bool(words) and not (wants_slurm(words) or wants_help(words) or said & _NO_RANKS)


def is_script(word: str) -> bool:
    return word.endswith(_SCRIPTS) and Path(word).is_file()


def as_program(target: str, words: Sequence[str], takes: Callable[[str], int | None]) -> str | None:
    """The command line that sweeps the program in ``words``; None where there is no program.

    ``target``: the word that begins it. ``takes``: how many values a flag of ``muster sweep`` has,
    which stays before the ``--``; None for another's. All else belongs to the program, and each of
    the user's own parameters gets its place.
    """
    from muster.farm.template import names_in

    options: list[str] = []
    names: list[str] = []
    typed: list[str] = []
    taker, left = "", 0  # the flag of ours that values go to, and how many it may still have
    is_first = False  # which a flag has in any case
    for word in words:
        if kind_of_word(word) == "flag":
            number = takes(word)
            taker, _, value = word.partition("=") if number is not None else ("", "", "")
            taker, left = taker.replace("_", "-"), (number or 0) - ("=" in word)
            names += _names(taker, value)
            (options if taker else typed).append(word)
            is_first = "=" not in word
        elif left > 0 and ("=" in word or left == 1 or (is_first and word != target)):
            names += _names(taker, word)
            options.append(word)
            left, is_first = left - 1, False
        else:
            left = 0
            typed.append(word)
    program = _program(typed[0]) if typed else None
    if program is None:
        return None
    program += typed[1:]
    placed = set().union(*map(names_in, program))
    for name in dict.fromkeys(names):
        if name not in placed:
            program += [f"{name}={{{name}}}"] if "." in name else [f"--{name}", f"{{{name}}}"]
    return " ".join(map(_quoted, ["muster", "sweep", *options, "--", *program]))


def values_of(name: str, words: Sequence[str]) -> list[str]:
    """What stands behind the flag ``--name``, up to the next one; ``--name=value`` as well."""
    found: list[str] = []
    is_inside = False
    for word in words:
        if kind_of_word(word) == "flag":
            flag, equals, value = word.partition("=")
            is_inside = flag.lstrip("-").replace("_", "-") == name.replace("_", "-")
            found += [value] if is_inside and equals else []
        elif is_inside:
            found.append(word)
    return found


def _program(word: str) -> list[str] | None:
    parts = shlex.split(word) if " " in word else [word]
    if not parts:
        return None
    if is_script(parts[0]):
        python = "python" if shutil.which("python") else "python3"
        return [python if parts[0].endswith(".py") else "sh", *parts]
    return parts if shutil.which(parts[0]) is not None else None


def _names(flag: str, value: str) -> list[str]:
    if flag in ("--grid", "--zip"):
        name, equals, _ = value.partition("=")
        return [name] if equals else []
    if flag == "--seeds":
        return ["seed"] if value else []
    if flag == "--list" and value:
        from muster.farm.space_texts import read_list

        try:
            return list(read_list(Path(value)).names)
        except MusterError:
            return []
    return []


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)


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
    near = nearest(text, choices)
    wanted = [*(_WORDS[kind] for kind in kinds if kind in _WORDS), *choices]
    listed = wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    return UsageError(
        f"{flag} {text}: write {listed}.", hint=f"did you mean {near}?" if near else None
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
