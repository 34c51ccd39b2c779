"""Users' files as modules of their own: ``muster.base.target_files.NAME_PLACE``.

Never as ``__main__``: what a script does under ``if __name__ == "__main__"`` must not run in
workers. Such a module can be imported by its name in every process that has its folder on
``sys.path``. The children that multiprocessing spawns are such, and find the user's functions and
classes, which pickle names by their module.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec

PRIVATE_PREFIX = f"{__name__}."
#: Python looks for modules below this one, and finds them with the finder at the end.
__path__: list[str] = []


def load_file(path: str, source: bytes) -> types.ModuleType:
    """The module of ``source``, read from ``path`` (absolute); imported once per content.

    What is raised on the way is raised, and leaves no half module.
    """
    name, digest = _name_of(path), sha256(source).hexdigest()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__muster_source__", None) == digest:
        return known
    module = module_from_spec(_spec_of(name, path))
    sys.modules[name] = module
    try:
        _execute(module, path, source)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


class _File(SourceFileLoader):
    """Reads the file itself: cached byte code is found by time stamp and size, and can be older
    than an edit within the same second.
    """

    def exec_module(self, module: types.ModuleType) -> None:
        with open(self.path, "rb") as file:  # noqa: PTH123  (spawned children: no pathlib)
            _execute(module, self.path, file.read())


class _Finder:
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not fullname.startswith(PRIVATE_PREFIX):
            return None
        for folder in map(os.path.abspath, sys.path):
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in names:
                file = os.path.join(folder, name)  # noqa: PTH118
                if _name_of(file) == fullname:
                    return _spec_of(fullname, file)
        return None


def _name_of(path: str) -> str:
    """From the file's name and from where it lies, so that two of one name stay apart."""
    stem = os.path.splitext(os.path.basename(path))[0]  # noqa: PTH119, PTH122
    place = sha256(os.fsencode(path)).hexdigest()[:8]
    word = re.sub(r"\W", "_", stem)
    return f"{PRIVATE_PREFIX}{word}_{place}"


class _Spec(ModuleSpec):
    """Of a module in no package of the user's, whatever its name: a relative import says so."""

    @property
    def parent(self) -> str:
        return ""


def _spec_of(name: str, path: str) -> ModuleSpec:
    spec = _Spec(name, _File(name, path), origin=path)
    spec.has_location = True
    return spec


def _execute(module: types.ModuleType, path: str, source: bytes) -> None:
    module.__dict__["__muster_source__"] = sha256(source).hexdigest()
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


sys.meta_path.append(_Finder())
