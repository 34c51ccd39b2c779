"""Finding modules by name and telling what is installed, without importing anything."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

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
