"""Modules as files: found by name and read without importing them; what is installed, and what
installed packages add; and Muster in a Python that does not have it, which ``--python`` names.

There, a finder of modules brings Muster with what a worker needs, while everything else is that
Python's own. The children that multiprocessing spawns need it as well: functions of a user's file
are modules below Muster's (`muster.base.target_files`), by which name pickle looks them up.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from muster.base.errors import TargetError
from muster.base.settings import variable
from muster.base.shown_text import one_line, shell_word

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


FUNCTION, CLASS = "function", "class"
_INSTALLED = {"site-packages", "dist-packages"}


class Found(NamedTuple):
    """A module: its file (None for a namespace) and, of a package, where its parts are."""

    path: Path | None = None
    folders: tuple[str, ...] | None = None


class Interpreter(NamedTuple):
    """Another Python: where it looks for modules, in its order, and where its own library is."""

    path: tuple[str, ...]
    library: str


class Finder:
    """Modules by name as a process finds them that has ``folders`` first on its path: one of this
    Python, or of ``other``.
    """

    def __init__(self, folders: Sequence[str], other: Interpreter | None = None) -> None:
        self._is_ours = other is None
        self.folders = list(dict.fromkeys((*folders, *(sys.path if other is None else other.path))))
        self._known: dict[str, Found | None] = {}
        importlib.invalidate_caches()

    def find(self, name: str) -> Found | None:
        """None where there is no such module. Not even parent packages are imported."""
        if name not in self._known:
            self._known[name] = self._look_up(name)
        return self._known[name]

    def _look_up(self, name: str) -> Found | None:
        parent, _, last = name.rpartition(".")
        folders: Sequence[str] | None = self.folders
        if parent:
            above = self.find(parent)
            folders = None if above is None else above.folders
        elif name in sys.builtin_module_names:
            return Found()
        if folders is None:
            return None
        # Only the last part is given: with the dotted name a namespace package would ask
        # sys.modules for its parent, which is not imported.
        spec = PathFinder.find_spec(last, folders)
        if spec is None and not parent and self._is_ours:
            try:
                # Editable installs register finders of their own; a top-level name imports nothing.
                spec = importlib.util.find_spec(last)
            except (ImportError, ValueError):
                return None
        if spec is None:
            return None
        places = spec.submodule_search_locations
        is_file = spec.origin is not None and spec.has_location
        return Found(
            Path(os.path.abspath(str(spec.origin))) if is_file else None,
            None if places is None else tuple(places),
        )


def is_installed(path: Path) -> bool:
    """Whether it belongs to Python, to an installed package, or to an environment's programs."""
    if _INSTALLED & set(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")):
        return True
    above = path.parent.parent
    return any((above / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))


def environment_with(package: str) -> str:
    """The folder of an environment other than this one that has ``package``, as a shell takes it;
    empty where none is seen. A project's own is looked for here and above, then the active one.
    """
    here = Path.cwd()
    own = [folder / name for folder in (here, *here.parents) for name in (".venv", "venv")]
    active = [variable(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    for place in (*own, *(Path(text) for text in active if text)):
        with suppress(OSError):
            is_there = any(place.glob(f"lib/python3*/site-packages/{package}/__init__.py"))
            if is_there and not place.samefile(sys.prefix):
                return shell_word(place.relative_to(here) if place.is_relative_to(here) else place)
    return ""


def is_plain_file(file: str) -> bool:
    """Whether a top-level module is a file of the user's, neither installed nor in a zip file."""
    path = Path(os.path.abspath(file))
    is_module = path.suffix == ".py" and path.name != "__init__.py"
    return is_module and path.is_file() and not is_installed(path)


def read_source(path: Path) -> bytes:
    """The bytes of a source file, also in a zip file; TargetError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        if (data := _in_zip(path)) is not None:
            return data
        raise TargetError(
            f"Cannot read {path}: {error.strerror or error}.", hint="check the target's path."
        ) from error


def _in_zip(path: Path) -> bytes | None:
    """What Python, which looks for modules in zip files too, would read there."""
    import zipfile  # here, as below: few modules lie in one
    import zlib

    # RuntimeError: it has a password, or is compressed in a way that this Python does not know.
    with suppress(OSError, zipfile.BadZipFile, zlib.error, RuntimeError, KeyError):
        archive = next((place for place in path.parents if place.is_file()), path)
        with zipfile.ZipFile(archive) as opened:
            return opened.read(path.relative_to(archive).as_posix())
    return None


def names_at_top(source: str | bytes, kind: str = FUNCTION) -> list[str]:
    """The public functions or classes of ``source``; SyntaxError if it is not Python."""
    wanted = ast.ClassDef if kind == CLASS else ast.FunctionDef
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, wanted) and not node.name.startswith("_")
    ]


def names_in(module: object, kind: str) -> list[str]:
    """The public functions or classes that a module defines itself."""
    name = getattr(module, "__name__", None)
    return [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == name
        and isinstance(value, type) == (kind == CLASS)
    ]


Kind = Literal["recipe", "executor", "check", "tracker", "engine"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Names become parts of commands and of file names.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


# A package offers recipes, executors, checks, trackers and engines of its own by entry points. They
# are listed without importing anything of the package, and imported when a command uses one; a
# broken one is an error of that command alone.


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


def version_of(package: str) -> str | None:
    """The version of a package that is installed here; None where it is not.

    Read off the name of the folder of its metadata: the library for that is 30 modules, in every
    start of a run.
    """
    start = f"{package.replace('-', '_')}-"
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.startswith(start) and name.endswith((".dist-info", ".egg-info")):
                    return name.removeprefix(start).rpartition(".")[0].partition("-")[0]
    return None


def _judged(name: str, several: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
    problem = ""
    if not _NAME.fullmatch(name):
        problem = "its name has to be of letters, digits, and _ . -"
    elif len(several) > 1:
        problem = f"{' and '.join(one.package for one in several)} both offer it"
    return tuple(one._replace(problem=problem) for one in several)


#: Makes Muster importable; ``ours`` are the folders that it and orjson are in. orjson may be
#: compiled for another Python; then theirs has to do.
FINDER = """
import sys
from importlib.machinery import PathFinder
class FindsMuster:
    @staticmethod
    def find_spec(name, path=None, target=None):
        known = ("muster", "muster_recipes", "orjson")
        return PathFinder.find_spec(name, ours) if name in known else None
sys.meta_path.insert(0, FindsMuster)
"""


class _RunsThere:
    """Nothing but what unpickling it does."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        return exec, (self._code, {})  # names of its own


def bring_to_children(ours: list[str]) -> None:
    """Have the children that this process spawns find Muster before they import anything.

    What multiprocessing tells a child first is pickled, and of that it ignores what it does not
    know. A folder at the end of the children's path would bring along all that lies in it.
    """
    import multiprocessing.spawn as spawn  # here: few processes need it

    tell = spawn.get_preparation_data
    finds = _RunsThere(f"ours = {ours!r}\n{FINDER}")

    def tell_more(name: str) -> dict[str, Any]:
        return {**tell(name), "muster": finds}

    spawn.get_preparation_data = tell_more
