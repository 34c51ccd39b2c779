"""Which source files a run's code is made of, and whether they have changed since.

The files of a target are its own and every module that it imports, directly or not, from below
the project folder. They are found by reading: nothing is imported, nothing that is not imported
is opened, and nothing is kept on disk. Not seen: imports whose name is made while the program
runs, files that are opened as data, and installed packages.

A recipe is part of this package, so its code is the version of the package *and* the recipe's own
files: with an editable install the version stays the same while the files change. Muster itself
is never followed; a repair in it must not refuse every run that there is.
"""

from __future__ import annotations

import ast
import os
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from muster.base.cells import is_snapshot, name_of
from muster.base.errors import PlanMismatchError, TargetError
from muster.base.modules import (
    Finder,
    Found,
    Interpreter,
    is_installed,
    read_source,
    version_of,
)  # fmt: skip
from muster.base.target import TargetRef, find_source

#: File name (relative to the project folder, with ``/``) → sha256 of its bytes; and for recipes
#: the package's name → its version.
Code = Mapping[str, str]

_PACKAGE = "muster-gpu"
_MUSTER = Path(__file__).parents[1]
_RECIPES = _MUSTER.parent / "muster_recipes"
_CHECKOUT = (".git", ".hg", ".svn")
_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")
_SCRIPTS = (".py", ".sh", ".bash", ".zsh", ".R", ".jl", ".pl", ".lua", ".rb", ".js")
_SHOWN = 8


def code_of(
    refs: Iterable[TargetRef], base_folder: Path | None = None, other: Interpreter | None = None
) -> dict[str, str]:
    """The code of these targets, which ``other`` runs if it is given; TargetError for a file that
    is missing or no Python.
    """
    walk = _Walk(Path.cwd() if base_folder is None else base_folder, other=other)
    for ref in dict.fromkeys(refs):
        walk.add_target(ref)
    return walk.result()


def code_of_command(argv: Sequence[str], base_folder: Path | None = None) -> dict[str, str]:
    """The scripts that a command names, and what those written in Python import.

    A script is a file with the name of one, and below the project folder also the program itself
    and what begins with ``#!``; other files are data. ``-m package.module`` counts as well. One
    word may be a whole shell line. What cannot be parsed may be meant for another Python: it
    counts with its bytes alone.
    """
    walk = _Walk(Path.cwd() if base_folder is None else base_folder, is_strict=False)
    lines = [argv, *(_shell_words(word) for word in argv if " " in word)]
    for words in lines:
        for position, word in enumerate(words):
            if position and words[position - 1] == "-m":
                walk.add_module(word)
            target = word.partition(":")[0] if ".py:" in word else word  # of muster train
            for text in dict.fromkeys((target, word.partition("=")[2])):
                walk.add_script(text, is_program=position == 0)
    return walk.result()


def changed_files(before: Code, now: Code) -> list[str]:
    """What is not as it was, by name; nothing where nothing is known of before.

    A file of the same content under another name is the same (a folder was renamed, or ``before``
    was written by a muster that noted the target's own file only).
    """
    contents = set(now.values())
    gone = [n for n, digest in before.items() if n not in now and digest and digest not in contents]
    other = [name for name in before if name in now and now[name] != before[name]]
    is_complete = bool(before) and before.keys() <= now.keys()
    new = [name for name in now if name not in before] if is_complete else []
    return sorted((*gone, *other, *new))


def check_same_code(before: Code, now: Code, folder: Path, as_before: Code | None = None) -> None:
    """PlanMismatchError where the work in ``folder`` was done by another code, with the files.

    ``as_before``: the same code as an earlier version would have recorded it, in other files.
    """
    files = changed_files(before, now)
    if not files or (as_before is not None and not changed_files(before, as_before)):
        return
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    raise PlanMismatchError(
        f"The code has changed since the work in {folder} was done: {', '.join(files[:_SHOWN])}"
        f"{more}. Old and new would be mixed in one run.",
        hint="--restart begins anew and keeps the old run beside the new one, --allow-changed-code "
        "goes on with both, another --run-dir leaves this one as it is.",
    )


def code_id(code: Code) -> str:
    """A short name of all of it; empty where nothing is known."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(code.items()))
    return sha256(lines.encode()).hexdigest()[:16] if code else ""


def project_folder(folder: Path) -> Path:
    """The checkout that ``folder`` lies in, else the project, else the folder itself."""
    for marks in (_CHECKOUT, _PROJECT):
        for place in (folder, *folder.parents):
            if any((place / mark).exists() for mark in marks):
                return place
    return folder


class _Source(NamedTuple):
    """What a file imports, as (level, module, names), and the ``__all__`` that it lists."""

    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    exported: tuple[str, ...]


class _Walk:
    """From the first files to everything that they import and that is the user's."""

    def __init__(
        self, base: Path, *, is_strict: bool = True, other: Interpreter | None = None
    ) -> None:
        self._other = other
        self._base = Path(os.path.abspath(base))
        self._is_strict = is_strict
        self._roots = [project_folder(self._base)]
        self._has_recipe = False
        self._names: dict[str, Path] = {}
        self._digests: dict[Path, str] = {}
        self._sources: dict[Path, _Source] = {}
        self._walked: set[tuple[Path, str]] = set()
        self._ours: dict[Path, bool] = {}

    def result(self) -> dict[str, str]:
        found = {name: self._digests[path] for name, path in self._names.items()}
        if self._has_recipe:
            found[_PACKAGE] = _version()
        return dict(sorted(found.items()))

    def add_target(self, ref: TargetRef) -> None:
        path = find_source(ref, self._base)
        if ref.kind == "file":
            assert path is not None
            self._add_file(Path(os.path.abspath(path)))
            return
        is_recipe = ref.location.split(".")[0] == _RECIPES.name
        self._has_recipe |= is_recipe
        if path is None:  # not written in Python
            return
        own = Path(os.path.abspath(path))
        if not is_recipe:
            self._add_root(own.parent)
        self._import(ref.location, self._finder(self._base))
        if own not in self._digests:  # installed: its own file counts all the same
            self._note(own, is_python=True)

    def add_module(self, name: str) -> None:
        """What ``python -m name`` runs, if it is the user's."""
        if not all(part.isidentifier() for part in name.split(".")):
            return
        finder = self._finder(self._base)
        self._import(name, finder)
        self._import(f"{name}.__main__", finder)

    def add_script(self, text: str, *, is_program: bool) -> None:
        """The file that ``text`` names, if there is one and it is a script."""
        if not text or len(text) > 4096 or "\0" in text:
            return
        path = Path(os.path.abspath(self._base / text))
        if path.is_dir() and not is_program:
            path /= "__main__.py"
        if path in self._digests or not path.is_file() or is_installed(path):
            return
        if path.suffix == ".py":
            self._add_file(path)
        elif path.suffix in _SCRIPTS:
            self._add_root(path.parent)
            self._note(path, is_python=False)
        elif self._is_ours(path) and (is_program or _has_shebang(path)):
            self._note(path, is_python=False)

    def _add_file(self, path: Path) -> None:
        """A file that is run by its path: its own folder is the first on its module path."""
        self._add_root(path.parent)
        self._walk(path, "", False, self._finder(path.parent, self._base))

    def _finder(self, *folders: Path) -> Finder:
        return Finder([str(folder) for folder in folders], self._other)

    def _add_root(self, folder: Path) -> None:
        if not any(_is_below(folder, root) for root in self._roots):
            self._roots.append(project_folder(folder))

    def _import(self, name: str, finder: Finder) -> None:
        for path, dotted, is_package in self._chain(name, finder):
            self._walk(path, dotted, is_package, finder)

    def _chain(self, name: str, finder: Finder) -> Iterator[tuple[Path, str, bool]]:
        """``import a.b.c`` runs a, a.b and a.b.c: those that are there and the user's."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            dotted = ".".join(parts[:count])
            found = finder.find(dotted)
            if found is None or not self._may_hold_ours(found):
                return
            if found.path is not None:
                yield found.path, dotted, found.folders is not None

    def _walk(self, path: Path, name: str, is_package: bool, finder: Finder) -> None:
        """Take in a file and what it imports. A loop: chains of imports can be long."""
        waiting = [(path, name, is_package)]
        while waiting:
            path, name, is_package = waiting.pop()
            if (path, name) in self._walked:
                continue
            self._walked.add((path, name))
            package = name if is_package else name.rpartition(".")[0]
            for dotted in self._imported(self._read(path), package, finder):
                waiting += self._chain(dotted, finder)

    def _imported(self, source: _Source, package: str, finder: Finder) -> Iterator[str]:
        """Names of modules that these statements run; some of what is named is no module."""
        for level, module, names in source.imports:
            start = _absolute(level, module, package)
            if start is None:
                continue
            yield start
            top = finder.find(start.partition(".")[0]) if names else None
            if top is None or not self._may_hold_ours(top):
                continue
            found = finder.find(start)
            if found is None or found.folders is None:  # only a package has modules to import
                continue
            if "*" in names and found.path is not None:
                names = self._read(found.path).exported
            yield from (f"{start}.{name}" for name in names if name != "*")

    def _may_hold_ours(self, found: Found) -> bool:
        return found.path is None or self._is_ours(found.path)

    def _read(self, path: Path) -> _Source:
        if path not in self._sources:
            self._sources[path] = self._note(path, is_python=path.suffix == ".py")
        return self._sources[path]

    def _note(self, path: Path, *, is_python: bool) -> _Source:
        data = read_source(path)
        self._digests[path] = sha256(data).hexdigest()
        name = self._name_of(path)
        if self._names.setdefault(name, path) != path:  # the same name in two projects
            self._names[path.as_posix()] = path
        if not is_python:
            return _Source((), ())
        try:
            return _parse(data)
        except (SyntaxError, ValueError, RecursionError) as error:
            if not self._is_strict:
                return _Source((), ())
            line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            raise TargetError(
                f"Cannot read {path}, which the target consists of or imports: {what}{line}.",
                hint="correct that line." if line else "is it Python?",
            ) from None

    def _name_of(self, path: Path) -> str:
        if self._has_recipe and _is_below(path, _RECIPES):
            return path.relative_to(_RECIPES.parent).as_posix()
        if is_snapshot(str(path)):  # of a notebook, in whatever run folder
            return name_of(str(path))
        for root in self._roots:
            for file, folder in ((path, root), (path.resolve(), root.resolve())):
                if file.is_relative_to(folder):
                    return file.relative_to(folder).as_posix()
        return path.name

    def _is_ours(self, path: Path) -> bool:
        if path not in self._ours:
            self._ours[path] = self._judge(path)
        return self._ours[path]

    def _judge(self, path: Path) -> bool:
        if path.is_relative_to(_MUSTER):
            return False
        if path.is_relative_to(_RECIPES):
            return self._has_recipe
        if self._other is not None and path.is_relative_to(self._other.library):
            return False
        return not is_installed(path) and any(_is_below(path, root) for root in self._roots)


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) or path.resolve().is_relative_to(folder.resolve())


def _absolute(level: int, module: str, package: str) -> str | None:
    """The module that an import is from; None where it leads out of the package."""
    if not level:
        return module
    parts = package.split(".") if package else []
    if len(parts) < level:
        return None
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _parse(data: bytes) -> _Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on odd escapes; Python says it when the file is run
        tree = ast.parse(data)
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    exported: list[str] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append((node.level, node.module or "", names))
        elif isinstance(node, ast.Assign | ast.AugAssign):
            exported += _exported(node)
    return _Source(tuple(imports), tuple(exported))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, also inside functions and conditions, without a look at expressions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for inner in getattr(node, name, ()):
                yield inner
                waiting.append(inner)


def _exported(node: ast.Assign | ast.AugAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
        return []
    items = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else []
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def _shell_words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that the shell may understand
        return line.split()


def _has_shebang(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _version() -> str:
    return version_of(_PACKAGE) or "unknown"
