"""What may be meant by a word or flag that a command does not know: told where it is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.base.errors import UsageError
from muster.base.flags import Alias
from muster.base.shown_text import shell_word
from muster.cli.options import Option, alias_of, flags_by_name, options_of

if TYPE_CHECKING:
    from muster.cli.parse import Said

_SETTING = re.compile(r"(-*)([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_OFF = {"0", "false", "no", "off"}
_TABLES = {".csv", ".parquet", ".jsonl"}


def for_word(
    word: str, before: Said | None, known: Mapping[str, Option], said: Collection[str]
) -> str:
    """How a word is typed that is no flag and has no place; "" where that cannot be told.

    ``before``: the flag before it, with the value that it has; ``known``: the command's flags, and
    ``said`` the names of those that were given.
    """
    setting = _SETTING.fullmatch(word)
    if setting is not None:
        _, name, value = setting.groups()
        flag = name.replace("_", "-")
        if flag in known:
            return f"write {_said(flag, known[flag], value)}."
        return f"write --grid {shell_word(word)}." if "grid" in known else ""
    if "input" in known and "input" not in said and Path(word).exists():
        return f"write --input {shell_word(word)}."
    if "input" in said and "output" in known and "output" not in said and Path(word).suffix:
        return f"write --output {shell_word(word)}."
    if "to" in known and "to" not in said and Path(word).suffix in _TABLES:
        return f"write --to {shell_word(word)}."
    return "" if before is None else _for_word_behind(before, word)


def _said(flag: str, option: Option, value: str) -> str:
    """``--flag`` with this value, as it is typed."""
    if option.flag.alone is not None and flag == option.name and value:
        return f"--{flag}={shell_word(value)}"
    if option.num_words(flag) == 0:
        return f"--no-{flag}" if value.lower() in _OFF and option.arity == 0 else f"--{flag}"
    return f"--{flag} {shell_word(value)}"


def _for_word_behind(before: Said, word: str) -> str:
    """``word`` stands behind a flag that has all its values."""
    option, name = before.option, before.name
    if option.flag.alone is not None and name == option.name:
        if option.flag.read is not None:
            try:
                option.flag.read(word, f"--{name}")
            except UsageError:
                return ""
        return f"write --{name}={shell_word(word)}."
    if option.num_words(name) != 1:
        return ""
    (value,) = before.words
    if option.name == "devices" and value == "cpu" and word.isdecimal():
        return f"write --{name} cpu:{word}."
    # Another name that reads its value differently has no description of it.
    about = "" if isinstance(alias_of(option, name), Alias) else f": {option.metavar}"
    return f"{'-' if len(name) == 1 else '--'}{name} takes one value, and has {value}{about}."


def commands_with(flag: str) -> list[str]:
    """The commands that make a run and have this flag, whatever they run."""
    from muster.cli.commands.sweep import GROUPS
    from muster.cli.map_flags import COMMON
    from muster.cli.train_flags import common_groups, gang_flags

    groups: dict[str, Sequence[Any]] = {
        "sweep": list(GROUPS.values()), "map": list(COMMON.values()), "train": common_groups(),
        "run": gang_flags(),
    }  # fmt: skip
    return [
        command
        for command, parts in groups.items()
        if flag in flags_by_name([option for part in parts for option in options_of("", part)])
    ]
