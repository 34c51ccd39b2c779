"""One call into tyro for all commands: parses, or ends with exit code 2 and a clear message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Any, TypeVar

import tyro

from muster.base.errors import UsageError

_T = TypeVar("_T")


def parse(
    kind: type[_T], argv: Sequence[str], command: str, description: str, *, pairs: bool = True
) -> _T:
    """The flags in ``argv`` as a ``kind``. Hyphens and underscores mean the same.

    ``pairs``: plain bools have a ``--no-`` form as well.
    """
    single = () if pairs else (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(
        kind,
        prog=f"muster {command}",
        args=list(argv),
        description=description,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, *single),
    )


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--`` and those after it; UsageError where nothing follows it."""
    words = list(argv)
    if "--" not in words:
        return words, []
    cut = words.index("--")
    if cut + 1 == len(words):
        raise UsageError("There is no command after `--`.", hint="write: -- python train.py …")
    return words[:cut], words[cut + 1 :]


def bundle(name: str, groups: dict[str, Any], positional: dict[str, Any] | None = None) -> type:
    """A class with one field per group of flags, so that commands share groups of flags.

    A group is a class with defaults, or a (frozen) value whose fields are the defaults.
    """
    fields: list[Any] = [(key, kind) for key, kind in (positional or {}).items()]
    for key, kind in groups.items():
        if isinstance(kind, type):
            fields.append((key, kind, field(default_factory=kind)))
        else:
            fields.append((key, type(kind), field(default=kind)))
    return make_dataclass(name, fields, frozen=True)
