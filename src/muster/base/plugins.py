"""What installed packages add: recipes, executors, checks, trackers and engines of their own.

A package offers them by entry points. They are listed without importing anything of the package,
and imported when a command uses one; a broken one is an error of that command alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from muster.base.errors import TargetError
from muster.base.shown_text import one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["recipe", "executor", "check", "tracker", "engine"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Names become parts of commands and of file names.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class Plugin(NamedTuple):
    """``place``: ``module:attribute``. ``problem``: why it cannot be used, as far as can be told
    without importing it."""

    kind: Kind
    name: str
    place: str
    package: str
    version: str
    problem: str = ""


def group_of(kind: Kind) -> str:
    return f"muster.{kind}s"


def plugins(kind: Kind) -> Mapping[str, Plugin]:
    """What installed packages offer of this kind, by name."""
    return {name: found[0] for name, (found, _) in _installed(kind, tuple(sys.path)).items()}


def all_plugins() -> Iterator[Plugin]:
    """Those of all kinds, also several of one name."""
    for kind in KINDS:
        for found, _ in _installed(kind, tuple(sys.path)).values():
            yield from found


def check_plugin(kind: Kind, name: str) -> Plugin:
    """The one that ``plugins(kind)`` has as ``name``; TargetError where it cannot be used. Nothing
    is imported."""
    plugin = plugins(kind)[name]
    if plugin.problem:
        raise TargetError(
            f"The {kind} {name} cannot be used: {plugin.problem}.",
            hint="uninstall a package that you do not need, or ask its authors for another name.",
        )
    return plugin


def load_plugin(kind: Kind, name: str) -> Any:
    """Import what ``plugins(kind)`` has as ``name``; TargetError where that cannot be done."""
    plugin = check_plugin(kind, name)
    _, entry = _installed(kind, tuple(sys.path))[name]
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no output of the command
            return entry.load()
    except (Exception, SystemExit) as error:  # a foreign package's code
        raise TargetError(
            f"The {kind} {name} of {plugin.package} cannot be loaded from {plugin.place}: "
            f"{type(error).__name__}: {one_line(str(error))}.",
            hint="reinstall or repair the package that offers it.",
        ) from error


@lru_cache(maxsize=64)
def _installed(
    kind: Kind, path: tuple[str, ...]
) -> Mapping[str, tuple[tuple[Plugin, ...], EntryPoint]]:
    """By name: who offers it, and the entry point of the first. ``path`` is where is looked."""
    import importlib.metadata  # not light, and most commands have no use for it

    found: dict[str, tuple[tuple[Plugin, ...], EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=group_of(kind)):
        package, version = ("an unknown package", "")
        if entry.dist is not None:
            package, version = entry.dist.name, entry.dist.version
        plugin = Plugin(kind, entry.name, entry.value, package, version)
        before, first = found.get(entry.name, ((), entry))
        found[entry.name] = ((*before, plugin), first)
    return {name: (_judged(name, several), first) for name, (several, first) in found.items()}


def _judged(name: str, several: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
    problem = ""
    if not _NAME.fullmatch(name):
        problem = "its name has to be of letters, digits, and _ . -"
    elif len(several) > 1:
        problem = f"{' and '.join(one.package for one in several)} both offer it"
    return tuple(one._replace(problem=problem) for one in several)
