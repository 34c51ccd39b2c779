"""The fields of dataclasses as options, and what was said of them as values again.

A user's dataclass may say with tyro's markers what it wants of its flags; they stand in
``Annotated`` types, as ``Flag`` does. Those with a counterpart here are taken over and those that
change nothing here are passed over. Any other is refused: the flag would mean something else than
the class says.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, get_origin

from muster.base.errors import TargetError
from muster.base.flags import Alias, Flag
from muster.cli import values


@dataclass(frozen=True, kw_only=True)
class Part:
    """A group of options of which a command takes ``only`` some, or leaves some out.

    ``is_loose``: the values come as they are, because the class is the user's and is made
    elsewhere. ``readers``: how fields are read here. ``texts``: help of fields, where it differs.
    """

    of: Any
    only: Collection[str] = ()
    without: Collection[str] = ()
    is_loose: bool = False
    readers: Mapping[str, Callable[[Sequence[str]], Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field as a flag. ``path``: where it is inside its group."""

    group: str
    path: tuple[str, ...]
    kind: Any
    flag: Flag
    default: Any
    owner: type
    reader: Callable[[Sequence[str]], Any] | None = None
    text: str | None = None

    @property
    def name(self) -> str:
        return self.flag.name or self.path[-1].replace("_", "-")

    @property
    def metavar(self) -> str:
        return self.flag.metavar or values.metavar(self.kind)

    @property
    def arity(self) -> int | None:
        if self.flag.read is not None:
            return 1
        return 0 if self.flag.is_negated else values.arity(self.kind)

    def num_words(self, name: str) -> int | None:
        """How many words behind the flag, typed as ``name``, are its values where none is joined to
        it by ``=``; None: as many as there are.
        """
        alias = alias_of(self, name)
        stands_alone = isinstance(alias, Alias) and alias.means is not None
        return 0 if stands_alone or self.flag.alone is not None else self.arity

    @property
    def collects(self) -> bool:
        """Whether the flag adds to what it was given before: a list that has no words of its own,
        as ``--seeds 3`` has, which are three."""
        return self.reader is None is self.flag.read and values.collects(self.kind)


def options_of(name: str, group: Any) -> list[Option]:
    """The fields of a group as flags, those of dataclasses inside it included."""
    part = group if isinstance(group, Part) else Part(of=group)
    kind = part.of if isinstance(part.of, type) else type(part.of)
    default = None if isinstance(part.of, type) else part.of
    return [
        option
        for option in _fields(name, part, kind, default, ())
        if (not part.only or option.path[0] in part.only) and option.path[0] not in part.without
    ]


def _fields(name: str, part: Part, kind: type, default: Any, path: tuple[str, ...]) -> list[Option]:
    found: list[Option] = []
    hints = _hints(kind)
    for one in dataclasses.fields(kind):
        hint = hints[one.name]
        if not one.init or get_origin(hint) is ClassVar:
            continue
        value = _default_of(one) if default is None else getattr(default, one.name)
        bare = values.plain(hint)
        marks = (*getattr(kind, "__tyro_markers__", ()), *values.marks(hint))
        flag, text = read_marks(marks, bare, f"{kind.__name__}.{one.name}")
        here = (*path, one.name)
        if flag.is_hidden and value is not dataclasses.MISSING:
            continue
        if isinstance(bare, type) and dataclasses.is_dataclass(bare):
            inside = None if value is dataclasses.MISSING else value
            found += _fields(name, part, bare, inside, here)
            continue
        if value is dataclasses.MISSING and (part.is_loose or flag.is_hidden):
            raise TargetError(
                f"The field {one.name} of {kind.__name__} has no default.",
                hint="give it one; the command line overrides it.",
            )
        found.append(
            Option(
                group=name, path=here, kind=bare, flag=flag, default=value,
                owner=_owner(kind, one.name),
                reader=part.readers.get(one.name), text=part.texts.get(one.name, text),
            )
        )  # fmt: skip
    return found


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """A command asks for them several times, and they cost more than all else about its flags."""
    return typing.get_type_hints(kind, include_extras=True)


def _owner(kind: type, name: str) -> type:
    """The class that says the field, of those that ``kind`` is made from."""
    return next(one for one in kind.__mro__ if name in _said_in(one))


_said_in = functools.cache(inspect.get_annotations)


def _default_of(one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return one.default


def flags_by_name(options: Sequence[Option]) -> dict[str, Option]:
    """Every name that a flag may be said by."""
    flags = [option for option in options if not option.flag.is_positional]
    # A group that comes first keeps its names; other names give way to all of these.
    names = {option.name: option for option in reversed(flags)}
    found = {option.name: names[option.name] for option in flags}
    for option in flags:
        for alias in option.flag.aliases:
            found.setdefault(alias if isinstance(alias, str) else alias.name, option)
    return found


def alias_of(option: Option, name: str) -> str | Alias | None:
    """The other name that ``name`` is, None where it is the flag's own."""
    for alias in option.flag.aliases:
        if name == (alias if isinstance(alias, str) else alias.name):
            return alias
    return None


def flag_name(word: str) -> str:
    """The name in ``--name`` or ``--name=value``; hyphens and underscores mean the same."""
    return word.lstrip("-").partition("=")[0].replace("_", "-")


def build(group: Any, said: Mapping[tuple[str, ...], Any]) -> Any:
    """The group as a value, from what was said by the fields' paths."""
    part = group if isinstance(group, Part) else Part(of=group)
    if part.is_loose:
        defaults = {option.path[-1]: option.default for option in options_of("", part)}
        return SimpleNamespace(**{**defaults, **{path[-1]: value for path, value in said.items()}})
    return _built(part.of, said)


def _built(of: Any, said: Mapping[tuple[str, ...], Any]) -> Any:
    """``of`` (a class or a value) with these values, from the innermost dataclass outwards."""
    direct = {path[0]: value for path, value in said.items() if len(path) == 1}
    for outer in {path[0] for path in said if len(path) > 1}:
        inner = {path[1:]: value for path, value in said.items() if path[0] == outer}
        direct[outer] = _built(_inside(of, outer), inner)
    if isinstance(of, type):
        return of(**direct)
    return dataclasses.replace(of, **direct) if direct else of


def _inside(of: Any, name: str) -> Any:
    if not isinstance(of, type):
        return getattr(of, name)
    one = next(entry for entry in dataclasses.fields(of) if entry.name == name)
    value = _default_of(one)
    if value is not dataclasses.MISSING:
        return value
    return values.plain(typing.get_type_hints(of, include_extras=True)[name])


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
        if not _is_tyros(mark) or (name := repr(mark)) in _WITHOUT_EFFECT:
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
