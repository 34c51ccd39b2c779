"""A phase of an experiment file as the command line that it means, and a command line as a file.

All that a command checks, it checks of the words: a file has no types or names of its own.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from muster.api.experiments.file import (
    ExperimentKeys,
    OrderKeys,
    Phase,
    PhaseKeys,
    Setting,
    escaped,
)
from muster.base.errors import MusterError, UsageError
from muster.base.flags import Alias, kind_of_word
from muster.cli import values
from muster.cli.flags import ONE_TIME, sweep_options
from muster.cli.gang import gang_options
from muster.cli.help_page import own_text
from muster.cli.main import read_command
from muster.cli.options import Option, alias_of, flags_by_name
from muster.cli.parse import Parsed, Said

#: Flags whose values are NAME=V1,V2: a table in a file has a key for each.
_AXES = {"grid", "zip"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """The command line that a phase means. ``origins``: by the name of a flag, where it is said.
    ``waits``: the flags whose value is known only later."""

    phase: Phase
    parsed: Parsed
    origins: Mapping[str, str]
    waits: tuple[Setting, ...] = ()


def line_of(phase: Phase, run_dir: Path, moment: Sequence[str], later: Collection[str]) -> Line:
    """``phase`` as its command reads it, less the keys whose value is known ``later``. ``moment``:
    words of this one start. UsageError, which says the line of the file, for what the command does
    not have or does not take.
    """
    head, program = _head(phase), phase.program
    base = _read(phase, head, [], program)
    names = flags_by_name(base.flags)
    if "settings" not in base.groups:  # --overwrite is for maps
        moment = [word for word in moment if word != "--overwrite"]
    words: dict[str, list[str]] = {}
    origins, waits, seen = {}, [], dict[str, Setting]()
    for one in phase.settings:
        option = names.get(one.key) or names.get(one.key.removeprefix("no-"))
        if option is None:
            if not one.is_shared:
                raise _unknown(phase, head, one, names)
            continue
        _refuse_moment(one, option)
        _refuse_twice(seen.setdefault(option.name, one), one)
        origins[option.name] = one.origin
        if one.key in later:
            waits.append(one)
        else:
            words[one.key] = _words(one, option)
    parsed = base
    try:
        said = [word for own in words.values() for word in own]
        parsed = _read(phase, head, [*said, f"--run-dir={run_dir}", *moment], program)
        if not waits:  # what is together can be checked only when it is whole
            _check(parsed)
    except UsageError as error:
        for one in phase.settings:  # of which line is it?
            try:
                _read(phase, head, words.get(one.key, []), program)
            except UsageError as of_one:
                raise UsageError(f"{one.origin}: {of_one}") from None
        if not waits:
            flag = re.match(r"--([\w-]+)", str(error))
            where = origins.get(flag.group(1)) if flag else None
            raise UsageError(f"{where or phase.origin}: {error}") from None
    return Line(phase=phase, parsed=parsed, origins=origins, waits=tuple(waits))


def refuse_unknown_of_all(phases: Sequence[Phase], lines: Sequence[Line]) -> None:
    """UsageError for what is said of the whole file, and is a flag of no phase."""
    names = {name: None for line in lines for name in flags_by_name(line.parsed.flags)}
    for one in (one for phase in phases for one in phase.settings if one.is_shared):
        if one.key not in names and one.key.removeprefix("no-") not in names:
            near = difflib.get_close_matches(one.key, names, n=1, cutoff=0.6)
            hint = (
                f"did you mean {near[0]}?" if near else "move the key to the phase that it is for."
            )
            raise UsageError(f"{one.origin}: no phase has {one.key}.", hint=hint)


def _check(parsed: Parsed) -> None:
    """Raise UsageError for options that may not have their values, or not all of them together."""
    if parsed.command.split()[0] in ("sweep", "map"):
        sweep_options(parsed)
        for group in {"search", "settings", "recipe"} & parsed.groups.keys():
            parsed.make(group)
    else:
        gang_options(parsed)


def _head(phase: Phase) -> list[str]:
    said = phase.said
    if bool(said.target) == bool(phase.program):
        what = "is both a target and a program" if said.target else "is neither target nor program"
        raise UsageError(
            f"{phase.origin}: there {what}.", hint='say what is run, as target = "train.py:run".'
        )
    if (said.command == "run" and said.target) or (
        said.command in ("map", "train") and phase.program
    ):
        wanted = "program" if said.command == "run" else "target"
        raise UsageError(f"{phase.origin}: muster {said.command} takes a {wanted}.")
    return ["muster", said.command, *([said.target] if said.target else [])]


def _read(phase: Phase, head: list[str], words: list[str], program: list[str]) -> Parsed:
    line = [*head, *words, *(["--", *program] if program else [])]
    try:
        return read_command(line)
    except UsageError:
        raise
    except MusterError as error:
        raise UsageError(f"{phase.origin}: {error}") from None


def _unknown(
    phase: Phase, head: list[str], one: Setting, names: Mapping[str, Option]
) -> UsageError:
    """With the nearest of all keys that may stand there."""
    kinds = (PhaseKeys, OrderKeys) if phase.name else (PhaseKeys, ExperimentKeys)
    own = [name.name.replace("_", "-") for kind in kinds for name in fields(kind)]
    near = difflib.get_close_matches(one.key, [*own, *names], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    line = " ".join(head)
    return UsageError(
        f"{one.origin}: {line} has no {one.key}.",
        hint=f"{hint}`{line} --help-all` lists its flags, which are keys here.",
    )


def _refuse_moment(one: Setting, option: Option) -> None:
    """UsageError for what is said for one start, and not for an experiment."""
    if f"{option.group}.{option.path[-1]}" in ONE_TIME:
        raise UsageError(
            f"{one.origin}: {option.name} is for one start and not for a file.",
            hint=f"muster start --{option.name} FILE",
        )
    if option.group == "options" and option.path[-1] == "run_dir":
        raise UsageError(
            f"{one.origin}: a phase has its folder in that of the experiment.",
            hint="give run_dir to the whole file.",
        )


def _refuse_twice(first: Setting, one: Setting) -> None:
    if first is not one:
        raise UsageError(
            f"{one.origin}: {one.key} says the same as {first.key} at {first.origin}.",
            hint="keep one of them.",
        )


def _words(one: Setting, option: Option) -> list[str]:
    """The words that say it."""
    flag, value = f"--{one.key}", one.value
    alias = alias_of(option, one.key)
    if option.flag.alone is not None:  # --wait, or --wait=2h, and no word after it
        if isinstance(value, bool):
            return [flag] if value else []
        return [f"{flag}={_text(value)}"]
    if option.arity == 0 or (isinstance(alias, Alias) and alias.means is not None):
        if not isinstance(value, bool):
            raise UsageError(f"{one.origin}: {one.key} = {shown(value)}: write true or false.")
        if option.arity == 0:
            return [flag] if value else [f"--no-{one.key}"]
        return [flag] if value else []
    if isinstance(value, Mapping):
        items = [_axis(one, option, name, of) for name, of in value.items()]
    elif isinstance(value, list | tuple):
        if option.name == "seeds" or (option.arity == 1 and option.kind not in (int, float)):
            items = [",".join(map(_text, value)) + "," * (len(value) == 1)]
        elif option.arity == 1:
            raise UsageError(f"{one.origin}: {one.key} = {shown(value)}: write one value.")
        else:
            items = [_text(item) for item in value]
    else:
        items = [_text(value)]
    if not items:
        return [flag]
    if option.collects:
        return [word for item in items for word in _joined(flag, item)]
    return [*_joined(flag, items[0]), *items[1:]]


def _joined(flag: str, item: str) -> list[str]:
    """A value that looks like a flag is joined to its own."""
    return [flag, item] if kind_of_word(item) == "value" else [f"{flag}={item}"]


def _axis(one: Setting, option: Option, name: str, value: Any) -> str:
    """``lr=[0.1, 0.2]``: JSON, which keeps the types."""
    if option.name in _AXES:
        return f"{name}={json.dumps(value if isinstance(value, list) else [value])}"
    if option.name == "space" and isinstance(value, list):
        return f"{name}=choice({','.join(json.dumps(item) for item in value)})"
    if isinstance(value, list | Mapping):
        raise UsageError(f"{one.origin}: {one.key}.{name} = {shown(value)}: write one value.")
    return f"{name}={_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: Any) -> str:
    """A value as a file has it."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------------- settings and origins


class Effective(NamedTuple):
    """A setting that holds: its key, its value as text, and where it comes from."""

    key: str
    value: str
    origin: str


def effective(line: Line, environment: Mapping[str, str]) -> list[Effective]:
    """Every option of a command, said or not, those that were said first."""
    waits = {one.key: one for one in line.waits}
    names = flags_by_name(line.parsed.flags)
    found, rest = [], []
    said = {one.option.name: one for one in line.parsed.said}
    for name, option in names.items():
        if name != option.name or option.group == "shown":
            continue
        if name in line.origins:
            later = next((one for key, one in waits.items() if names.get(key) is option), None)
            value = shown(later.value) if later else _said_text(said.get(name))
            found.append(Effective(name, value, line.origins[name]))
        elif name in said:
            found.append(Effective(name, _said_text(said[name]), ""))
        elif name in environment:
            rest.append(Effective(name, _default_text(option), environment[name]))
        else:
            rest.append(Effective(name, _default_text(option), "default"))
    return [*found, *rest]


def _said_text(said: Said | None) -> str:
    if said is None:  # a sweep file of W&B, which has become other flags
        return "-"
    return " ".join(said.words) if said.words else shown(said.value is not False)


def _default_text(option: Option) -> str:
    value = option.default
    if option.flag.is_negated:
        value = not value
    if value is None or value == () or value == "":
        return "-"
    return shown(value) if isinstance(value, bool) else " ".join(values.texts(value))


# ---------------------------------------------------------------------- a command as a file


def file_of(argv: Sequence[str], why: str, folder: str = "") -> str:
    """A commented TOML file that means the same as a command line: ``muster sweep …``."""
    parsed = read_command(argv)
    command = parsed.command.split()[0]
    lines = [f"# {text}" for text in why.splitlines()]
    lines += [f"# Start it, and go on with it: muster start FILE. All keys: muster {parsed.command}"
              " --help-all", ""]  # fmt: skip
    if folder:
        lines += [f"folder = {shown(folder)}  # where paths begin"]
    lines += [f"command = {shown(command)}"]
    if parsed.target:
        lines += [f"target = {shown(escaped(parsed.target))}"]
    if parsed.program:
        lines += [f"program = {shown([*map(escaped, parsed.program)])}"]
    reserved = {one.name.replace("_", "-") for kind in (PhaseKeys, ExperimentKeys)
                for one in fields(kind)}  # fmt: skip
    own: list[str] = []
    for one in parsed.but({*ONE_TIME, "options.run_dir", "options.name"}):
        if one.option.flag.is_positional:
            continue
        alias = alias_of(one.option, one.name)
        is_read = isinstance(alias, Alias) and bool(alias.read or alias.means is not None)
        key = one.name if is_read else one.option.name
        text = f"{key} = {_toml(one.option, one.words, one.value)}"
        about = own_text(one.option)
        (own if key in reserved else lines).extend(["", *_comment(about), text])
    if own:
        lines += ["", "[flags]", *own]
    return "\n".join(lines).rstrip() + "\n"


def _toml(option: Option, words: Sequence[str], value: Any) -> str:
    if not words:
        if option.arity == 0:
            return shown(bool(value) != option.flag.is_negated)
        return "[]" if option.collects else "true"
    if len(words) > 1 or option.collects:
        return shown([*map(escaped, words)])
    with suppress(ValueError):
        if str(int(words[0])) == words[0] or str(float(words[0])) == words[0]:
            return words[0]
    return shown(escaped(words[0]))


def _comment(text: str) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(text, 96, break_on_hyphens=False)]


def command_text(argv: Sequence[str]) -> str:
    return shlex.join(argv)
