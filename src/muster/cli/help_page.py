"""The help of a command: what it does, examples, and its flags, the common ones first."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from muster.cli import output
from muster.cli.options import Option

#: A page of help is read only when it is one page.
MOST_FLAGS = 30
_LEFT, _WIDEST = 32, 100
#: Who hears of the options instead of seeing a page: what completes a command line.
HEARS: ContextVar[Callable[[Sequence[Option]], None] | None] = ContextVar("hears", default=None)


def show(
    command: str, text: str, options: Sequence[Option], common: Sequence[str], is_all: bool,
    engine: str, program: str,
) -> None:  # fmt: skip
    """``engine``: the word after ``--on``, whose flags are shown as well. ``program``: how the
    words are called that follow the flags."""
    if (hears := HEARS.get()) is not None:
        hears(options)
        return
    for line in page(command, text, options, common, is_all, engine, program):
        output.say(line)


def page(
    command: str, text: str, options: Sequence[Option], common: Sequence[str], is_all: bool,
    engine: str = "", program: str = "",
) -> list[str]:  # fmt: skip
    """The lines of the help."""
    places = [option for option in options if option.flag.is_positional]
    flags = _by_name([option for option in options if not option.flag.is_positional])
    words = [*map(place_word, places), "[FLAGS]", *([program] if program else [])]
    lines = [f"Usage: muster {command} {' '.join(words)}", ""]
    lines += text.strip().splitlines()
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    shown = flags if is_all else _chosen(flags, common, engine)
    for title, group in _titled([*places, *shown], common, is_all):
        lines += ["", f"{title}:"]
        for option in group:
            lines += _entry(option, width)
    if len(shown) < len(flags):
        more = f"{len(flags) - len(shown)} more flags: muster {command} --help-all"
        lines += ["", more]
    return lines


def _by_name(options: Sequence[Option]) -> list[Option]:
    """The first of each name, which is the one that is parsed."""
    return list({option.name: option for option in reversed(options)}.values())[::-1]


def _chosen(flags: Sequence[Option], common: Sequence[str], engine: str) -> list[Option]:
    """The flags that are shown without being asked for all of them."""
    fitting = [o for o in flags if not o.flag.engines or engine in o.flag.engines]
    if not common:
        return fitting[:MOST_FLAGS]
    by_engine = [o for o in fitting if engine and o.flag.engines]
    own = [o for o in fitting if is_own(o)]
    first = [o for name in common for o in fitting if o.path[-1] == name and o not in own]
    room = MOST_FLAGS - min(len(own), 12)
    chosen = [*own[: MOST_FLAGS - len(first)], *[*by_engine, *first][:room]]
    return list({o.name: o for o in chosen}.values())[:MOST_FLAGS]


def is_own(option: Option) -> bool:
    """Whether it belongs to a recipe or to what the user has written."""
    return option.group in ("recipe", "task", "stage")


def _titled(
    options: Sequence[Option], common: Sequence[str], is_all: bool
) -> list[tuple[str, list[Option]]]:
    """Titles and their flags: by class, or own ones and common ones."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        if is_all or is_own(option) or not common:
            title = first_sentence(option.owner)
        else:
            title = "Common flags"
        groups.setdefault(title, []).append(option)
    return list(groups.items())


def first_sentence(owner: type) -> str:
    text = " ".join((owner.__doc__ or "").split("\n\n")[0].split())
    if not text or text.startswith(f"{owner.__name__}("):
        return "Flags"
    return re.split(r"\.\s+(?=[A-Z`])", text)[0].rstrip(".:")


def place_word(option: Option) -> str:
    word = option.flag.metavar or option.path[-1].upper()
    is_needed = option.default is dataclasses.MISSING
    return word if is_needed or word.startswith("[") else f"[{word}]"


def flag_words(option: Option) -> str:
    """``--devices auto|N|0,2|cpu:8``."""
    if option.flag.is_positional:
        return place_word(option)
    name = option.name
    if option.arity == 0:
        is_on = option.default is True and not option.flag.is_negated
        return f"--[no-]{name}" if is_on else f"--{name}"
    if option.flag.alone is not None:
        return f"--{name}[={option.metavar}]"
    return f"--{name} {option.metavar}".rstrip()


def _entry(option: Option, width: int) -> list[str]:
    head = f"  {flag_words(option)}"
    body = help_text(option)
    lines = textwrap.wrap(body, max(40, width - _LEFT), break_on_hyphens=False) or [""]
    pad = " " * _LEFT
    if len(head) > _LEFT - 2:
        return [head, *(pad + line for line in lines if line)]
    return [(head.ljust(_LEFT) + lines[0]).rstrip(), *(pad + line for line in lines[1:])]


def own_text(option: Option) -> str:
    """What is written about the field."""
    text = option.text or field_texts(option.owner).get(option.path[-1], "")
    return " ".join(text.split())


def help_text(option: Option) -> str:
    """What is written about the field, and its default where that says something."""
    text = own_text(option)
    shown = _default_text(option)
    if not shown or "Default:" in text or "default is" in text:
        return text
    return f"{text} (default: {shown})".strip()


def _default_text(option: Option) -> str:
    value: Any = option.default
    if value is True and not option.flag.is_negated:
        return "on"
    if option.arity == 0 or value is dataclasses.MISSING or value is None or value in ("", ()):
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str | int | Path) else ""


_ATTRIBUTE = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)$")


@cache
def field_texts(owner: type) -> dict[str, str]:
    """What is written about the fields of a dataclass: the text below each, the comment beside
    it, or its line under ``Attributes`` or ``Args`` in the docstring of the class."""
    found: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        if dataclasses.is_dataclass(kind):
            found.update(_of_docstring(inspect.getdoc(kind) or ""))
            found.update(_of_source(kind))
    return found


def _of_source(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
        body = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return {}
    if not isinstance(body, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    lines = source.splitlines()
    for one, following in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[one.target.id] = str(following.value.value)
        else:
            _, hash_, comment = lines[(one.end_lineno or 1) - 1][
                one.end_col_offset or 0 :
            ].partition("#")
            if hash_:
                found[one.target.id] = comment.strip()
    return found


def _of_docstring(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, section = text.partition("Attributes\n")
    if not section:
        section = re.split(r"^(?:Attributes|Args|Parameters):?\n", text, maxsplit=1, flags=re.M)[-1]
    for line in section.splitlines():
        match = _ATTRIBUTE.match(line.strip())
        if match:
            names = match.group(1).split(", ")
            found.update(dict.fromkeys(names, match.group(2)))
        elif names and line.startswith("        "):
            for name in names:
                found[name] += f" {line.strip()}"
        else:
            names = []
    return found
