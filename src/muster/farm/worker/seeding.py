"""Fixes the global generators of random numbers from the key of the task at work.

A worker runs many tasks; without this a result that draws from a global generator would depend on
which tasks the same worker happened to run before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Modules with a global generator, which comes with the import.
_OWNERS = ("random", "numpy.random", "torch")


class Generators:
    """Those that something in this process has imported: nobody can draw from any other, and to
    seed the one of ``random`` alone takes as long as a short task.
    """

    def __init__(self) -> None:
        self._key = ""

    def fix(self, key: str) -> None:
        """``key``: of a task, in hexadecimal."""
        self._key = key
        modules = sys.modules  # where None stands for what somebody wants nobody to import
        if (module := modules.get("random")) is not None:
            self._seed("random", module)
        if (module := modules.get("numpy")) is not None:
            self._seed("numpy.random", module.random)  # imported by being asked for
        if (module := modules.get("torch")) is not None:
            self._seed("torch", module)

    def watch_imports(self) -> None:
        """From now on fix also what a task imports, before anything can draw from it: such a module
        takes its first seed from the system. What comes with the target keeps that until a task.
        """
        sys.meta_path.insert(0, _Finder(self))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_imports)

    def _leave_imports(self) -> None:
        """In a child of a task: all of its children would draw the same numbers."""
        self._key = ""

    def seed_new(self, name: str, module: ModuleType) -> None:
        """Seed a module that has just been executed, if it is in a task."""
        if self._key:
            self._seed(name, module)

    def _seed(self, name: str, module: ModuleType) -> None:
        seed = int(self._key[:8], 16)
        if name == "torch":
            module.manual_seed(seed)
        else:
            module.seed(seed)


class _Finder:
    """Finds these modules as others do, and has them seeded once they are executed."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _OWNERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader = None if spec is None else spec.loader
        if loader is None or isinstance(loader, type):  # a class loads other modules as well
            return spec
        execute = loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # a zip file has one loader for all that is in it
                self._generators.seed_new(name, module)

        # On the loader itself: another one in its place would not be asked for the files of torch.
        loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec
