"""What a user's dataclass says to tyro about its fields, as our flags.

tyro's markers stand in ``Annotated`` types, as ``Flag`` does. Those with a counterpart here are
taken over and those that change nothing here are passed over. Any other is refused: the flag would
mean something else than the class says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from muster.base.errors import TargetError
from muster.base.flags import Flag
from muster.cli import values

#: Fields inside fields have no prefix here, nothing is a subcommand, a list may be given in parts,
#: and help from a comment or a flag --no-NAME harms nobody.
_WITHOUT_EFFECT = {
    "AvoidSubcommands", "FlagCreatePairsOff", "HelptextFromCommentsOff", "OmitArgPrefixes",
    "OmitSubcommandPrefixes", "PositionalMetavarFromFieldName", "ShowSourcePath", "SuppressFixed",
    "UseAppendAction",
}  # fmt: skip
_KNOWN = "Positional, Suppress, Fixed, FlagConversionOff and arg(name, metavar, help, aliases)"


def read_marks(marks: Sequence[Any], kind: Any, field: str) -> tuple[Flag, str | None]:
    """The flag of a field of type ``kind``, and its help where the marks say one."""
    flag, text = next((mark for mark in marks if isinstance(mark, Flag)), Flag()), None
    for mark in marks:
        name = repr(mark)
        if not _is_tyros(mark) or name in _WITHOUT_EFFECT:
            continue
        if name == "Positional" and values.arity(kind) == 1:
            flag = replace(flag, is_positional=True)
        elif name in ("Suppress", "Fixed"):
            flag = replace(flag, is_hidden=True)
        elif name == "FlagConversionOff":
            if values.is_switch(kind):
                flag = replace(flag, read=_true_or_false, metavar="true|false")
        elif type(mark).__name__ == "_ArgConfig" and _is_only_words(mark):
            text = mark.help
            flag = replace(
                flag,
                name=_flag_name(mark.name or flag.name),
                metavar=mark.metavar or flag.metavar,
                aliases=(*flag.aliases, *map(_flag_name, mark.aliases or ())),
            )
        else:
            raise TargetError(
                f"{field} cannot be a flag: muster does not know what tyro.conf.{_said(mark)} "
                f"means for {values.metavar(kind)}.",
                hint=f"leave it out; known are {_KNOWN}.",
            )
    return flag, text


def _is_tyros(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "tyro"


def _is_only_words(mark: Any) -> bool:
    """Whether ``arg(…)`` says names and help only: neither a default nor how a value is read."""
    return mark.constructor_factory is None and _is_tyros(getattr(mark, "default", mark))


def _said(mark: Any) -> str:
    names = {"_ArgConfig": "arg(constructor or default)", "_SubcommandConfig": "subcommand"}
    return names.get(type(mark).__name__, repr(mark))


def _flag_name(text: str) -> str:
    return text.lstrip("-").replace("_", "-")


def _true_or_false(text: str, flag: str) -> bool:
    found: bool = values.read(bool, [text], flag, None)
    return found
