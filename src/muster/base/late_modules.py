"""Modules that are imported late: when they are used, or when a command is sure to need them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the import system asks every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def imported_to_stay(name: str) -> ModuleType:
    """The module; what it brings, the collector need not look at: neither meanwhile, which takes a
    twentieth of the time, nor again and again later.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()
    finally:
        if collects:
            gc.enable()
    return module


@contextlib.contextmanager
def imported_when_used(*names: str) -> Iterator[None]:
    """What imports these within this, by their plain names, gets them when it uses them first; what
    imports them afterwards does so as ever.
    """
    late: dict[str, ModuleType] = {}
    for name in names:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            late[name] = _Late(name)
            late[name].__spec__ = spec  # for those who ask whether it is installed
    sys.modules.update(late)
    try:
        yield
    finally:
        for name, module in late.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
