"""A module made of the cells of a notebook, for other processes.

It has the source of the function or class, and of whatever it refers to: other functions
and classes of cells, imports, and constants as they are now. What cannot be written down is refused
with its name: a worker would have something else, or nothing.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from muster.base.cell_sources import (
    Unknown,
    definition,
    earlier,
    import_of,
    is_of_cells,
    statement,
)
from muster.base.cell_values import Written, write_value
from muster.base.errors import TargetError
from muster.base.modules import is_installed
from muster.base.settings import child_environment, secrets
from muster.base.shown_text import secrets_of

_HINT = "make it inside of the function, hand it over as a parameter, or read it from a file there."

#: IPython has its own of these in every session.
_OF_PYTHON = ("open", "exit", "quit")
#: How an imported container gets what it has in the session.
_REFILLED: dict[type, str] = {
    dict: "{0}.clear()\n{0}.update({1})",
    set: "{0}.clear()\n{0}.update({1})",
    list: "{0}[:] = {1}",
}


def snapshot(name: str) -> str:
    """The source of a module that has ``name`` of the running notebook, and all that it needs.

    Raises TargetError for what cannot be in it.
    """
    return _Snapshot(name).text()


class _Part(NamedTuple):
    """``first``: the names that must be there before it is run; ``used``: before it is called."""

    text: str
    first: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()


class _Snapshot:
    def __init__(self, name: str) -> None:
        self._target = name
        self._namespace = vars(sys.modules["__main__"])
        self._imports: dict[str, None] = {}
        self._parts: dict[str, _Part] = {}
        self._why: dict[str, str] = {}  # name → by way of what it is needed
        self._waiting = [name]
        seen = {name}
        while self._waiting:
            one = self._waiting.pop()
            for used in self._add(one):
                if used not in seen:
                    seen.add(used)
                    self._why[used] = one
                    self._waiting.append(used)

    def text(self) -> str:
        lines = [f'"""{self._target}, as it was in a session when the run was started."""', ""]
        if type(self._namespace.get("annotations")).__name__ == "_Feature":
            lines += ["from __future__ import annotations", ""]
        lines += sorted(self._imports)
        for part in self._in_order():
            lines += ["", part.text.rstrip("\n")]
        return "\n".join(lines) + "\n"

    def _in_order(self) -> Iterator[_Part]:
        """Each after what it needs to be run; otherwise by name, so that equal ones are equal."""
        done: set[str] = set()
        begun: set[str] = set()

        def visit(name: str) -> Iterator[_Part]:
            if name in done:
                return
            done.add(name)
            begun.add(name)
            # A decorator is called at once, so what it calls in turn comes before as well. What can
            # only come after one that has begun was not there when the cell ran either.
            for before in sorted(self._with_needed(self._parts[name].first, calls=True)):
                if not begun & self._with_needed([before], calls=False):
                    yield from visit(before)
            begun.remove(name)
            yield self._parts[name]

        for name in sorted(self._parts):
            yield from visit(name)

    def _with_needed(self, names: Iterable[str], *, calls: bool) -> set[str]:
        """These parts and all that are needed to run them; ``calls``: and to call them."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            one = waiting.pop()
            if one in self._parts and one not in found:
                found.add(one)
                part = self._parts[one]
                waiting += part.first | part.used if calls else part.first
        return found

    def _add(self, name: str) -> Iterable[str]:
        """Take in what ``name`` stands for; returns the names that it uses."""
        if name == "get_ipython":
            raise self._refuse(name, "has a %magic, a !command or a call of get_ipython", "")
        if name not in self._namespace:
            found = getattr(builtins, name, None)
            if str(getattr(found, "__module__", "")).startswith("IPython."):  # display
                self._import(found.__module__, found.__name__, name)  # type: ignore[union-attr]
            return ()
        value = self._namespace[name]
        if name.startswith("__") and name.endswith("__"):
            return ()
        if name in _OF_PYTHON and _top_module_of(value) in ("io", "_io", "IPython"):
            return ()
        if isinstance(value, types.ModuleType):
            self._import_module(value, name)
            return ()
        if is_of_cells(value):
            return self._define(name, value)
        found = import_of(name, value)
        if found is not None and (callable(value) or _top_of(found[0]) in sys.stdlib_module_names):
            self._import(*found, name)
            return ()
        try:  # as it is here: an imported setting may have been changed in the session
            return self._assign(name, value, found)
        except TargetError:
            if found is None:
                raise
            self._import(*found, name)
            return ()

    def _define(self, name: str, value: Any) -> Iterable[str]:
        own = value.__name__
        if own not in (name, "<lambda>") and own.isidentifier():
            if self._namespace.get(own) is value:
                self._parts[name] = _Part(f"{name} = {own}", frozenset({own}))
                return (own,)
            if not isinstance(value, type):
                why = _of_other_name(value)
                raise self._refuse(name, str(why), why.hint)
        try:
            text = definition(name, value)
        except Unknown as error:
            raise self._refuse(name, str(error), error.hint) from None
        return self._take(name, text)

    def _assign(self, name: str, value: Any, found: tuple[str, str] | None = None) -> Iterable[str]:
        """Write the value down; what is ``found`` by an import and can be changed in place is, so
        that its module has the change as well."""
        if type(value).__module__ == "typing":  # a TypeVar, an alias
            try:
                return self._take(name, statement(name))
            except Unknown as error:
                raise self._refuse(name, str(error), error.hint) from None
        written = write_value(value)
        if not isinstance(written, Written):
            raise self._refuse(name, written, _HINT)
        if secrets_of((), {name: value}) or any(one in written.text for one in secrets()):
            raise self._refuse(
                name, "looks like a secret, and would be written into the run folder",
                "read it from os.environ inside of the function.",
            )  # fmt: skip
        names: set[str] = set()
        for kind in written.types:
            names.add(kind.__name__)
            if self._namespace.get(kind.__name__) is not kind:
                raise self._refuse(name, f"is of an earlier {kind.__name__}", "run its cell again.")
        for module in written.modules:
            self._check_found(module, name)
        text = "{0} = {1}"
        if found is not None and type(value) in _REFILLED:
            self._import(*found, name)
            text = _REFILLED[type(value)]
        self._imports.update(dict.fromkeys(f"import {module}" for module in written.modules))
        self._parts[name] = _Part(text.format(name, written.text), frozenset(names))
        return names

    def _take(self, name: str, text: str) -> Iterable[str]:
        first, used, assigned = _names_in(text)
        if assigned:
            which = ", ".join(sorted(assigned))
            raise self._refuse(
                name, f"assigns the global {which}, and each worker would have its own",
                "return what it finds out.",
            )  # fmt: skip
        first.discard(name)
        used.discard(name)
        self._parts[name] = _Part(text, frozenset(first), frozenset(used))
        for dotted in _attributes_in(text):
            self._import_inner(dotted)
        return sorted(first | used)

    def _import_module(self, module: types.ModuleType, name: str) -> None:
        real = module.__name__
        if sys.modules.get(real) is not module:
            raise self._refuse(
                name, f"is a module {real} that another process cannot import",
                "put it into a .py file, and import that in the notebook.",
            )  # fmt: skip
        self._check_found(real, name)
        top = real.partition(".")[0]
        plain = name == top and self._namespace[name] is sys.modules.get(top)
        self._imports[f"import {real}" if plain else f"import {real} as {name}"] = None

    def _import(self, module: str, attribute: str, name: str) -> None:
        self._check_found(module, name)
        alias = "" if attribute == name else f" as {name}"
        self._imports[f"from {module} import {attribute}{alias}"] = None

    def _import_inner(self, dotted: str) -> None:
        """``import a.b`` for a use of ``a.b.c``, as some cell has imported it."""
        name, _, rest = dotted.partition(".")
        module = self._namespace.get(name)
        while isinstance(module, types.ModuleType) and rest:
            part, _, rest = rest.partition(".")
            module = sys.modules.get(f"{module.__name__}.{part}")
            if module is not None:
                self._imports[f"import {module.__name__}"] = None

    def _check_found(self, module: str, name: str) -> None:
        """TargetError where a new process would not find the module."""
        top = _top_of(module)
        file = getattr(sys.modules.get(top), "__file__", None)
        if file is None or PathFinder.find_spec(top) is None:  # an editable install's own finder
            return
        path = Path(file).absolute()
        folder = path.parent.parent if path.name == "__init__.py" else path.parent
        if is_installed(path) or folder == Path.cwd() or str(folder) in _path_of_children():
            return
        raise self._refuse(
            name, f"is from {folder}, which was put on sys.path in this session alone",
            f"start the notebook with PYTHONPATH={folder}, or install it: pip install -e …",
        )  # fmt: skip

    def _refuse(self, name: str, why: str, hint: str) -> TargetError:
        if name == self._target:
            return TargetError(f"Cannot use {name} of this session: it {why}.", hint=hint or None)
        if name == "get_ipython":
            user = self._why[name]
            what = "it" if user == self._target else user + self._by_way_of(user)
            text = f"Cannot use {self._target} of this session: {what} {why}."
            return TargetError(text, hint="call Python's own functions in it, such as subprocess.")
        return TargetError(
            f"Cannot use {self._target} of this session: it refers to "
            f"{name}{self._by_way_of(name)}, which {why}.",
            hint=hint or None,
        )

    def _by_way_of(self, name: str) -> str:
        way = []
        while (name := self._why.get(name, self._target)) != self._target:
            way.append(name)
        return f" (by way of {', '.join(reversed(way))})" if way else ""


def _of_other_name(value: Any) -> Unknown:
    """Why a function that calls itself by another name is not that name's."""
    own = value.__name__
    if "<locals>" in getattr(value, "__qualname__", ""):
        hint = "define it at the top of a cell, or put it into a .py file and import it from there."
        return Unknown("was made inside of another function", hint)
    if getattr(value, "__wrapped__", None) is not None:
        return Unknown(f"is {own} inside of a wrapper", "write the wrapper as a decorator.")
    return earlier(own)


def _top_module_of(value: object) -> str:
    return _top_of(str(getattr(value, "__module__", "")))


def _top_of(module: str) -> str:
    return module.partition(".")[0]


def _names_in(text: str) -> tuple[set[str], set[str], set[str]]:
    """Global names that are needed to run ``text``, to call what it defines, and that it assigns
    from inside of a function."""
    first: set[str] = set()
    used: set[str] = set()
    assigned: set[str] = set()

    def read(table: symtable.SymbolTable, *, is_run: bool, is_top: bool) -> None:
        for symbol in table.get_symbols():
            is_global = is_top or symbol.is_global()
            if is_global and symbol.is_referenced():
                (first if is_run else used).add(symbol.get_name())
            if not is_top and symbol.is_declared_global() and symbol.is_assigned():
                assigned.add(symbol.get_name())
        for child in table.get_children():
            runs = child.get_type() == "class" or child.get_name().endswith(("comp", "expr"))
            read(child, is_run=is_run and runs, is_top=False)

    read(symtable.symtable(text, "cell", "exec"), is_run=True, is_top=True)
    return first, used - first, assigned


def _attributes_in(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


@cache
def _path_of_children() -> frozenset[str]:
    """Where a Python that this one starts looks for modules."""
    import subprocess

    program = [sys.executable, "-c", "import sys; print('\\n'.join(sys.path))"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            program, env=child_environment({}), capture_output=True, text=True, timeout=60
        )
        return frozenset(done.stdout.splitlines())
    return frozenset()
