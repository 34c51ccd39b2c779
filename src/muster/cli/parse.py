"""The command line of every command, from the dataclasses that hold its options.

A command names its groups of options (classes, or values whose fields are the defaults); their
fields are its flags. ``Parsed`` gives the groups back as values, and the command line as words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

from muster.base.errors import EXIT_OK, UsageError, nearest
from muster.base.flags import Alias, Flag, kind_of_word
from muster.cli import values
from muster.cli.options import Option, alias_of, build, flag_name, flags_by_name, options_of

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Which run."""

    run: Annotated[str, Flag(is_positional=True)]
    """The run's folder, or its name below ./runs."""


_HELP_WORDS = {"help", "h", "help-all"}
#: Commands whose flags are easily taken for each other's.
_MAKE_RUNS = {"sweep", "map", "train", "run"}


class MissingFlag(UsageError):
    """An option that cannot be left out was not said."""

    def __init__(self, command: str, option: Option) -> None:
        name = option.name.upper() if option.flag.is_positional else f"--{option.name}"
        super().__init__(f"{name} is missing.", hint=f"`muster {command} --help` has examples.")
        self.option = option


class UnknownFlag(UsageError):
    """A flag that the command does not have; ``name`` is without hyphens at its front."""

    def __init__(self, message: str, hint: str, name: str) -> None:
        super().__init__(message, hint=hint)
        self.name = name


class Said(NamedTuple):
    """A flag of a command line, by the name that was typed, with its words and its value."""

    option: Option
    name: str
    words: tuple[str, ...]
    value: Any


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a command line says. A group is an attribute: ``parsed.device``."""

    command: str
    groups: Mapping[str, Any]
    flags: tuple[Option, ...]
    said: tuple[Said, ...]
    program: tuple[str, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """What the flags are for: the task, recipe or function; empty where there is none."""
        return self.command.partition(" ")[2]

    def given(self, group: str) -> dict[str, Any]:
        """The fields of a group that were said, as they were said last."""
        return {said.option.path[-1]: said.value for said in self._of(group)}

    def make(self, group: str, of: Any = None, **changes: Any) -> Any:
        """The group as a value: its defaults, or ``of``, with what was said and ``changes`` on
        top."""
        said = {one.option.path: one.value for one in self._of(group)}
        said.update({(name,): value for name, value in changes.items()})
        return build(self.groups[group] if of is None else of, said)

    def _of(self, group: str) -> list[Said]:
        return [one for one in self.said if one.option.group == group]

    def __getattr__(self, group: str) -> Any:
        if group.startswith("_") or group not in self.groups:
            raise AttributeError(group)
        if group not in self.made:
            self.made[group] = self.make(group)
        return self.made[group]

    def but(self, without: Collection[str]) -> list[Said]:
        """What was said of other fields than these, each by its name or as ``group.name``."""
        kept = []
        for one in self.said:
            group, name = one.option.group, one.option.path[-1]
            if name not in without and f"{group}.{name}" not in without:
                kept.append(one)
        return kept

    def saying(self, without: Collection[str] = (), **changes: Any) -> Parsed:
        """The same command line without some fields, and with other values of ``changes``."""
        said = self.but({*without, *changes})
        by_field = {option.path[-1]: option for option in self.flags}
        for name, value in changes.items():
            option = by_field[name]
            words = () if option.arity == 0 else tuple(values.texts(value))
            said.append(Said(option, "", words, value))
        return dataclasses.replace(self, said=tuple(said), made={})

    def argv(self, without: Collection[str] = (), **changes: Any) -> list[str]:
        """The whole command line that says the same; see ``words``."""
        program = ["--", *self.program] if self.program else []
        head = self.command.split(" ", 1)
        return ["muster", *head, *self.words(without, **changes), *program]

    def words(self, without: Collection[str] = (), **changes: Any) -> list[str]:
        """The words that say the same, in the names that are shown.

        ``without``: fields that are left out; ``changes``: fields that are said anew.
        """
        kept = self.saying(without, **changes).said
        places = [word for one in kept if one.option.flag.is_positional for word in one.words]
        said = [one for one in kept if not one.option.flag.is_positional]
        # Where a program follows, a flag takes one value at a time.
        flags = [word for one in said for word in _say(one, apart=bool(self.program))]
        return [*places, *flags]


def _say(said: Said, *, apart: bool) -> list[str]:
    option = said.option
    if option.arity == 0 and not said.words:
        is_off = said.value == option.flag.is_negated and not said.name
        is_off = is_off or (said.value is False and not option.flag.is_negated)
        return [f"--no-{option.name}" if is_off else f"--{option.name}"]
    alias, flag = alias_of(option, said.name), f"--{option.name}"
    if isinstance(alias, Alias) and (alias.read or alias.means is not None):
        flag = f"--{alias.name}"
    words: list[str] = []
    for word in said.words:
        if kind_of_word(word) != "value" or option.flag.alone is not None:  # unless `=` joins them
            words.append(f"{flag}={word}")
        elif not words or (apart and option.collects):
            words += [flag, word]
        else:
            words.append(word)
    return words or [flag]


def parse(kind: type[_T], argv: Sequence[str], command: str, text: str) -> _T:
    """The flags in ``argv`` as a ``kind``. Hyphens and underscores mean the same."""
    made: _T = parse_groups({"all": kind}, argv, command, text).make("all")
    return made


def parse_groups(
    groups: Mapping[str, Any],
    argv: Sequence[str],
    command: str,
    text: str,
    *,
    common: Sequence[str] = (),
    program: str = "",
    takes_rest: bool = False,
    refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> Parsed:
    """What ``argv`` says of these groups; UsageError for what it cannot mean.

    ``common``: fields that the help shows first; empty: all. ``program``: the first word that is no
    flag begins a program, whose words are not read; how the help names it. ``takes_rest``: the
    command does something with the words behind ``--``. ``refused``: flags that others have, why
    they are none here, and what to do instead. ``--help`` shows the help and ends.
    """
    options = tuple(option for name, group in groups.items() for option in options_of(name, group))
    reading = _Reading(command, options, list(argv), bool(program), refused)
    said, rest, wants_help = reading.read()
    if wants_help:
        from muster.cli import help_page

        engine = next((one.words[0] for one in said if one.option.name == "on" and one.words), "")
        is_all = wants_help == "help-all"
        help_page.show(command, text, options, common, is_all, engine, program)
        raise SystemExit(EXIT_OK)
    if rest and not (program or takes_rest):
        raise UsageError(
            f"muster {command} does not know what to do with the words after `--`: "
            f"{' '.join(rest)}",
            hint="write flags before it, or leave it out.",
        )
    _check_choices(said, reading.names)
    said = _joined(said)
    _check_there(command, options, said)
    return Parsed(
        command=command,
        groups=groups,
        flags=options,
        said=tuple(said),
        program=tuple(rest),
    )


class _Reading:
    """One command line, from its first word to its last."""

    def __init__(
        self, command: str, options: Sequence[Option], words: list[str], stops: bool,
        refused: Mapping[str, tuple[str, str]],
    ) -> None:  # fmt: skip
        self._command, self._words, self._stops = command, words, stops
        self._refused = refused
        self._places = [option for option in options if option.flag.is_positional]
        self._names = flags_by_name(options)
        self._at = 0

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def read(self) -> tuple[list[Said], list[str], str]:
        """What is said, the words of a program, and which help is asked for."""
        said: list[Said] = []
        wants_help = ""
        places = list(self._places)
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            kind = kind_of_word(word)
            if kind == "end":
                return said, self._words[self._at :], wants_help
            if kind == "value":
                if self._stops:
                    return said, self._words[self._at - 1 :], wants_help
                if not places:
                    raise self._unexpected(word, said)
                place = places[0] if places[0].collects else places.pop(0)
                value = _value(place, None, (word,), place.name.upper())
                said.append(Said(place, word, (word,), value))
            elif (name := flag_name(word)) in _HELP_WORDS and name not in self._names:
                wants_help = "help-all" if name == "help-all" else wants_help or "help"
            else:
                said.append(self._flag(word, name, is_help=bool(wants_help)))
        return said, [], wants_help

    def _flag(self, word: str, name: str, *, is_help: bool) -> Said:
        option, is_off = self._names.get(name), False
        if option is None and name.startswith("no-"):
            option = self._names.get(name.removeprefix("no-"))
            is_off = option is not None and option.arity == 0
            option = option if is_off else None
        is_letter = len(word.partition("=")[0]) == 2  # -x, which is not --x
        flag = "-" + name if is_letter else "--" + name
        if option is None:
            raise self._unknown(flag, name)
        _, equals, text = word.partition("=")
        alias = alias_of(option, name)
        if isinstance(alias, Alias) and alias.means is not None:
            return Said(option, name, (), alias.means)
        if option.flag.alone is not None and not equals:
            return Said(option, name, (), option.flag.alone)
        if option.arity == 0:
            if equals:
                raise UsageError(f"{flag} takes no value.", hint=f"write {flag} alone.")
            return Said(option, name, (), is_off == option.flag.is_negated)
        words = self._values(option, text if equals else None)
        if not words and option.arity is not None:
            if is_help:  # the flag that is asked about
                return Said(option, name, (), option.default)
            raise UsageError(f"{flag} needs a value: {option.metavar}.")
        return Said(option, name, tuple(words), _value(option, alias, words, flag))

    def _values(self, option: Option, text: str | None) -> list[str]:
        # Where a program follows, its name would be taken for one more value.
        any_number = 1 if self._stops else math.inf
        limit = any_number if option.arity is None else option.arity
        words = [] if text is None else [text]
        while len(words) < limit and self._at < len(self._words):
            word = self._words[self._at]
            if kind_of_word(word) != "value":
                break
            words.append(word)
            self._at += 1
        return words

    def _unexpected(self, word: str, said: Sequence[Said]) -> UsageError:
        from muster.cli.advice import for_word

        # A flag that `=` joins to its value has nothing to do with the next word.
        before = said[-1] if said else None
        if before is not None:
            flag = self._words[max(0, self._at - 2 - len(before.words))]
            is_apart = kind_of_word(flag) == "flag" and "=" not in flag
            before = before if is_apart and flag_name(flag) == before.name else None
        meant = for_word(word, before, self._names, [one.option.name for one in said])
        return UsageError(
            f"muster {self._command} does not know what to do with {word!r}.",
            hint=meant or f"`muster {self._command} --help` says what it takes.",
        )

    def _unknown(self, flag: str, name: str) -> UsageError:
        if name in self._refused:
            why, hint = self._refused[name]
            return UsageError(f"muster {self._command.split()[0]} has no {flag}: {why}", hint=hint)
        for group in _SYNONYMS:
            ours = [other for other in group if other in self._names]
            if name in group and ours:
                return UsageError(
                    f"muster {self._command} has no flag {flag}.",
                    hint=f"did you mean --{ours[0]}? It is what {flag} is called here.",
                )
        near = nearest(name, self._names, cutoff=0.7)
        hint = f"did you mean --{near}? " if near else ""
        command = self._command.split()[0]
        if not near and command in _MAKE_RUNS:
            from muster.cli.advice import commands_with

            others = [f"muster {other}" for other in commands_with(name) if other != command]
            hint = f"it is a flag of {', '.join(others)}. " if others else ""
        return UnknownFlag(
            f"muster {self._command} has no flag {flag}.",
            f"{hint}`muster {self._command} --help-all` lists its flags.",
            name,
        )


def _value(option: Option, alias: Any, words: Sequence[str], flag: str) -> Any:
    if option.reader is not None:
        return option.reader(words)
    reader = (isinstance(alias, Alias) and alias.read) or option.flag.read
    if reader is not None:
        if list(words) == ["None"] and option.default is None:
            return None
        return reader(words[0], flag)
    return values.read(option.kind, words, flag, option.default)


def _joined(said: Sequence[Said]) -> list[Said]:
    """Of a flag that takes any number of values, all of them at its first place; of others, the
    last."""
    found: dict[tuple[str, tuple[str, ...]], Said] = {}
    for one in said:
        key = (one.option.group, one.option.path)
        before = found.get(key)
        if before is not None and one.option.collects:
            words = (*before.words, *one.words)
            value = _value(one.option, None, words, f"--{one.name}")
            one = before._replace(words=words, value=value)
        found[key] = one
    return list(found.values())


def _check_choices(said: Sequence[Said], order: Sequence[str]) -> None:
    """UsageError where one thing is chosen by two flags, or a flag is given by two names."""
    for what in {one.option.flag.chooses for one in said} - {""}:
        names = {one.name for one in said if one.option.flag.chooses == what}
        if len(names) > 1:
            listed = " and ".join(f"--{name}" for name in sorted(names, key=order.index))
            raise UsageError(f"{listed} each choose {what}.", hint="give one of them.")
    for one in said:
        same = [other for other in said if other.option is one.option and other.name != one.name]
        differs = [other for other in same if other.value != one.value]
        if differs and not one.option.collects:
            first, second = (" ".join((f"--{s.name}", *s.words)) for s in (one, differs[0]))
            raise UsageError(
                f"{first} and {second} contradict each other.", hint="give one of them."
            )


def _check_there(command: str, options: Sequence[Option], said: Sequence[Said]) -> None:
    there = {one.option.path for one in said}
    for option in options:
        if option.default is dataclasses.MISSING and option.path not in there:
            raise MissingFlag(command, option)


#: What other programs call the same, each group with our own name among them.
_SYNONYMS = (
    ("lr", "learning-rate", "learn-rate", "eta"),
    ("epochs", "num-epochs", "n-epochs", "max-epochs", "num-train-epochs"),
    ("global-batch", "batch-size", "bs", "batch", "global-batch-size", "train-batch-size"),
    ("weight-decay", "wd"),
    ("seeds", "num-seeds", "seed", "n-seeds"),
    ("run-dir", "output-dir", "out-dir", "output", "log-dir", "save-dir", "default-root-dir"),
    ("gpus", "nproc-per-node", "nproc", "num-gpus", "n-gpus", "ngpus", "num-processes"),
    ("input", "in", "i", "inputs", "input-file"),
    ("output", "out", "o", "output-file"),
    ("nodes", "nnodes", "num-nodes"),
    ("global-accumulation", "accumulate", "grad-accum", "gradient-accumulation-steps"),
    ("precision", "dtype", "mixed-precision"),
)
