"""Modules as files: found by name and read without importing them, and what is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from muster.base.errors import TargetError

FUNCTION, CLASS = "function", "class"
_INSTALLED = {"site-packages", "dist-packages"}


class Found(NamedTuple):
    """A module: its file (None for a namespace) and, of a package, where its parts are."""

    path: Path | None = None
    folders: tuple[str, ...] | None = None


class Finder:
    """Modules by name as a process finds them that has ``folders`` first on its path."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(dict.fromkeys((*folders, *sys.path)))
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
        if spec is None and not parent:
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


def is_plain_file(file: str) -> bool:
    """Whether a top-level module is a file of the user's rather than installed."""
    path = Path(os.path.abspath(file))
    return path.suffix == ".py" and path.name != "__init__.py" and not is_installed(path)


def read_source(path: Path) -> bytes:
    """The bytes of a source file; TargetError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TargetError(
            f"Cannot read {path}: {error.strerror or error}.", hint="check the target's path."
        ) from error


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
