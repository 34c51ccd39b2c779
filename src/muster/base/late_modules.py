"""Modules that others import and seldom use."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system, of every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def imported_when_used(*names: str) -> Iterator[None]:
    """What imports these within this, by their plain names, gets them when it uses them first; what
    imports them afterwards does so as ever.
    """
    late = {name: _Late(name) for name in names if name not in sys.modules}
    sys.modules.update(late)
    try:
        yield
    finally:
        for name, module in late.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
