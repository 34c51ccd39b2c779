"""An experiment file: what it says, where it says it, and what in it is said of other phases.

A file is one run, or phases of which each is one. Its keys are the flags of the run's command; only
the keys of the dataclasses here mean something of their own. Values are checked where flags are.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from muster.api.experiments.text import Keys, read_tree, set_value
from muster.base.codec import MalformedError, decode
from muster.base.errors import UnknownNameError, UsageError
from muster.run.folder import default_root

Command = Literal["sweep", "map", "train", "run"]


@dataclass(frozen=True, kw_only=True)
class ExperimentKeys:
    """What a whole file says, beside the flags of its command or of all its phases."""

    name: str = ""
    """The name of the run folder below runs. Default: that of the file."""
    run_dir: str = ""
    """The run folder. Default: runs/NAME."""
    folder: str = "."
    """Where paths begin, seen from the file."""
    phase: Mapping[str, Any] = field(default_factory=dict)
    """The phases, a table each: [phase.NAME]."""


@dataclass(frozen=True, kw_only=True)
class PhaseKeys:
    """What a phase says, or a file that has none, beside the flags of its command."""

    command: Command
    """What it is: sweep, map, train or run."""
    target: str = ""
    """What is run: file.py:name, package.module:name or a recipe."""
    program: str | tuple[str, ...] = ()
    """What is run instead, as words or as one line: a command of a sweep, a script of a run."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags that are called like a key of the file."""


@dataclass(frozen=True, kw_only=True)
class OrderKeys:
    """What a phase says of other phases."""

    after: tuple[str, ...] = ()
    """Phases that must be done first; those that a ${…} names need not be listed."""
    requires: tuple[str, ...] = ()
    """Files that must be there when it begins."""
    produces: Mapping[str, str] = field(default_factory=dict)
    """Files that must be there when it is done, by the names that ${PHASE.NAME} gives them."""
    best: str = ""
    """How ${PHASE.best.NAME} chooses in a sweep that is not a search: "maximize accuracy"."""
    may_fail: bool = False
    """Begin the phases after it although some of its tasks have failed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A flag as a file says it, and where. ``is_shared``: of all phases whose command has it."""

    key: str
    value: Any
    origin: str
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One run. ``name``: empty where the file has no phases."""

    name: str
    origin: str
    said: PhaseKeys
    order: OrderKeys
    settings: tuple[Setting, ...]

    @property
    def program(self) -> list[str]:
        words = self.said.program
        try:
            return shlex.split(words) if isinstance(words, str) else list(words)
        except ValueError:
            raise UsageError(
                f"{self.origin}: program = {words!r}: a quotation mark is missing."
            ) from None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a file means. ``folder``: where its paths begin; ``run_dir`` is seen from there."""

    file: Path
    folder: Path
    name: str
    run_dir: Path
    phases: tuple[Phase, ...]
    tree: Mapping[str, Any]
    places: Mapping[Keys, str]

    @property
    def is_single(self) -> bool:
        return not self.phases[0].name

    @property
    def run_dir_origin(self) -> str:
        for key in ("run_dir", "run-dir", "name"):
            if (key,) in self.places:
                return self.places[(key,)]
        return "default"


def read_experiment(file: Path, sets: Sequence[str] = ()) -> Experiment:
    """What ``file`` says, with ``sets`` (``a.b=value``) on top; UsageError for what it may not."""
    tree, places = read_tree(file)
    for text in sets:
        set_value(tree, places, text)
    return experiment_of(file, tree, places)


def experiment_of(file: Path, tree: Mapping[str, Any], places: Mapping[Keys, str]) -> Experiment:
    """The same of a tree that was read before."""
    top, rest = _split(tree, (), (ExperimentKeys,), places)
    whole: ExperimentKeys = top[ExperimentKeys]
    name = whole.name or file.stem
    if not whole.run_dir and (name in (".", "..") or "/" in name or not name):
        raise UsageError(f"{_at(places, ('name',))}{name!r} cannot be the name of a folder.")
    if "phase" not in tree:
        phases = [_phase("", {**rest}, (), places, str(file))]
    else:
        if not whole.phase:
            raise UsageError(f"{_at(places, ('phase',))}there is no phase.", hint="[phase.NAME]")
        own = _names(PhaseKeys, OrderKeys)
        for key in rest:
            if key.replace("-", "_") in own:
                raise UsageError(
                    f"{_at(places, (key,))}{key} is set for the whole file, which has phases.",
                    hint=f"set it in one of them: {', '.join(whole.phase)}.",
                )
        phases = [
            _phase(one, said, ("phase", one), places, "") for one, said in whole.phase.items()
        ]
        shared = _settings(rest, (), places)
        phases = [_with_shared(phase, shared) for phase in phases]
    folder = file.parent / os.path.expanduser(whole.folder)  # noqa: PTH111 as flags have it
    run_dir = default_root() / name
    if whole.run_dir:
        run_dir = Path(os.path.expanduser(whole.run_dir))  # noqa: PTH111
    return Experiment(
        file=file, folder=folder, name=name, run_dir=run_dir, tree=tree, places=places,
        phases=tuple(in_order(phases)),
    )  # fmt: skip


def _phase(name: str, said: Any, at: Keys, places: Mapping[Keys, str], origin: str) -> Phase:
    origin = places.get(at, origin)
    if not isinstance(said, Mapping):
        raise UsageError(
            f"{_at(places, at)}phase {name} has to be a table of keys.", hint=f"[phase.{name}]"
        )
    if (name and not re.fullmatch(r"[A-Za-z_][\w-]*", name)) or name == "env":
        raise UsageError(
            f"{_at(places, at)}{name!r} cannot be the name of a phase.",
            hint="letters, digits, _ and -, as in [phase.teacher].",
        )
    made, rest = _split(said, at, (PhaseKeys, OrderKeys) if name else (PhaseKeys,), places)
    flags = made[PhaseKeys].flags
    settings = (*_settings(rest, at, places), *_settings(flags, (*at, "flags"), places))
    return Phase(
        name=name, origin=origin, said=made[PhaseKeys], order=made.get(OrderKeys, OrderKeys()),
        settings=_once(settings),
    )  # fmt: skip


def _split(
    tree: Mapping[str, Any], at: Keys, kinds: Sequence[type], places: Mapping[Keys, str]
) -> tuple[dict[type, Any], dict[str, Any]]:
    """What ``tree`` says of each kind of keys, and the rest, which are flags."""
    made: dict[type, Any] = {}
    rest = dict(tree)
    for kind in kinds:
        own = {}
        for key in tree:
            name = key.replace("-", "_")
            if name in _names(kind):
                if name in own:
                    raise UsageError(f"{_at(places, (*at, key))}{key} is given a second time.")
                own[name] = rest.pop(key)
        try:
            made[kind] = decode(kind, own)
        except MalformedError as error:
            key = next((k for k in tree if str(error).startswith(k.replace("-", "_"))), "")
            whole = f"phase {at[-1]}" if at else "the file"
            what = re.sub(r"^it\b", whole, str(error))
            raise UsageError(f"{_at(places, (*at, key))}{what}.") from None
    return made, rest


def _names(*kinds: type) -> set[str]:
    return {one.name for kind in kinds for one in fields(kind)}


def _settings(said: Mapping[str, Any], at: Keys, places: Mapping[Keys, str]) -> tuple[Setting, ...]:
    return tuple(
        Setting(key=key.replace("_", "-"), value=value, origin=_origin(places, (*at, key)))
        for key, value in said.items()
        if value is not None
    )


def _once(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    seen: dict[str, Setting] = {}
    for one in settings:
        if one.key in seen:
            raise UsageError(
                f"{one.origin}: {one.key} is given a second time; first at {seen[one.key].origin}."
            )
        seen[one.key] = one
    return tuple(seen.values())


def _with_shared(phase: Phase, shared: Sequence[Setting]) -> Phase:
    own = {one.key for one in phase.settings}
    more = [replace(one, is_shared=True) for one in shared if one.key not in own]
    return replace(phase, settings=(*more, *phase.settings))


def _origin(places: Mapping[Keys, str], at: Keys) -> str:
    """Where a value stands, or the first one in it, or the table that it is in."""
    while at:
        for keys, place in places.items():
            if keys[: len(at)] == at:
                return place
        at = at[:-1]
    return ""


def _at(places: Mapping[Keys, str], at: Keys) -> str:
    found = _origin(places, at)
    return f"{found}: " if found else ""


# ---------------------------------------------------------------------- the order of phases

_REFERENCE = re.compile(r"\$(\$?)\{([^}]*)\}")


class Reference(NamedTuple):
    """``${teacher.best.lr}``: head ``teacher`` and rest ``best.lr``."""

    head: str
    rest: str


def references(value: Any) -> Iterator[Reference]:
    """All ``${…}`` in a value; ``$${…}`` stands for itself."""
    if isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            if not match.group(1):
                head, _, rest = match.group(2).strip().partition(".")
                yield Reference(head, rest)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from references(one)


def escaped(text: str) -> str:
    """The text that stands for this one."""
    return _REFERENCE.sub(lambda match: f"${match.group(0)}", text)


def resolved(value: Any, look: Callable[[Reference], Any]) -> Any:
    """The value with what each ``${…}`` stands for; one that is nothing else keeps its type."""
    if isinstance(value, Mapping):
        return {key: resolved(one, look) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(one, look) for one in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> Any:
        if match.group(1):
            return match.group(0)[1:]
        head, _, rest = match.group(2).strip().partition(".")
        return look(Reference(head, rest))

    whole = _REFERENCE.fullmatch(value)
    if whole:
        return found(whole)
    return _REFERENCE.sub(lambda match: str(found(match)), value)


def needs(phase: Phase) -> list[str]:
    """The phases that a phase comes after: those it says, and those its values name."""
    said = [phase.said.program, phase.said.target, *phase.order.requires,
            *phase.order.produces.values(), *(one.value for one in phase.settings)]  # fmt: skip
    named = [one.head for one in references(said) if one.head not in ("env", "dir")]
    return list(dict.fromkeys([*phase.order.after, *named]))


def in_order(phases: Sequence[Phase]) -> list[Phase]:
    """Each phase behind those that it needs, otherwise as the file has them."""
    names = {phase.name for phase in phases}
    for phase in phases:
        for one in needs(phase):
            if one not in names or one == phase.name:
                where = f"{phase.origin}: " if phase.origin else ""
                if one == phase.name and one:
                    raise UsageError(f"{where}phase {one} comes after itself.")
                known = [other for other in names if other and other != phase.name]
                what = "phase" if phase.name else "reference"
                raise UnknownNameError(f"{what} in {phase.origin or 'the file'}:", one,
                                       [*known, "env.NAME", "dir"])  # fmt: skip
    ordered: list[Phase] = []
    left = list(phases)
    while left:
        done = {phase.name for phase in ordered}
        ready = next((one for one in left if done.issuperset(needs(one))), None)
        if ready is None:
            circle = ", ".join(f"{one.name} (after {', '.join(needs(one))})" for one in left)
            raise UsageError(
                f"{left[0].origin}: these phases wait for each other: {circle}.",
                hint="drop one `after`, or one ${…}.",
            )
        ordered.append(ready)
        left.remove(ready)
    return ordered
