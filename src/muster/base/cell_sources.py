"""Where the definitions of a notebook's cells are: what ``linecache`` has of what was typed."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
from abc import ABCMeta
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

from muster.base.cell_values import Written, write_value


class Unknown(Exception):
    """Why the source cannot be had, as the end of a sentence about it."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint or "put it into a .py file and import it from there."


def earlier(name: str) -> Unknown:
    """Of what is called ``name`` itself, where something else is now."""
    return Unknown(f"is an earlier {name}: that name means something else now", _AGAIN)


def is_of_cells(value: object) -> bool:
    """A function or class that was defined in ``__main__``."""
    is_definition = isinstance(value, type) or _function_of(value) is not None
    return is_definition and _is_of_main(value)


def _is_of_main(value: object) -> bool:
    return getattr(value, "__module__", None) == "__main__"


def definition(name: str, value: Any) -> str:
    """The text that defines a function or class of a cell under ``name``; Unknown without one."""
    if isinstance(value, type):
        return _of_class(name, value)
    function = _function_of(value)
    assert function is not None
    code = function.__code__
    tree = _tree_of(code.co_filename)
    if tree is None:
        raise Unknown(f"has no source here: it was compiled from {code.co_filename}")
    for node in _top(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name and _lines(node).start == code.co_firstlineno:
                _check_wrappers(node, value)
                _check_defaults(node, function)
                text = _text(code.co_filename, node, is_nested=node not in tree.body)
                return _checked(text, [code])
        elif name in _bound_by(node) and code.co_firstlineno in _lines(node):
            if code.co_name == "<lambda>":
                inner = getattr(node, "value", None)
                if isinstance(inner, ast.Lambda):
                    _check_defaults(inner, function)
                return _checked(ast.unparse(node), [code])
            raise Unknown("is not defined by def or class at the top of a cell")
    raise Unknown("is not defined at the top of a cell")


def statement(name: str) -> str:
    """The one assignment that binds ``name`` in cells; Unknown where they differ."""
    texts = {
        ast.unparse(node)
        for _, tree in _cells()
        for node in _top(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _bound_by(node)
    }
    if len(texts) != 1:
        why = "is bound differently in several cells" if texts else "is bound by no cell"
        raise Unknown(why, _ANEW)
    return texts.pop()


def import_of(name: str, value: object) -> tuple[str, str] | None:
    """The module and attribute by which another process imports ``value``; None if there are none.

    Those that the value names itself, or a cell's ``from module import name``.
    """
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(attribute, str) and module != "__main__":
        known = getattr(sys.modules.get(module), attribute, None)
        if known is value:
            return module, attribute
    for _, tree in _cells():
        for node in _top(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            for alias in node.names:
                known = getattr(sys.modules.get(node.module), alias.name, None)
                if (alias.asname or alias.name) == name and known is value:
                    return node.module, alias.name
    return None


def _of_class(name: str, kind: type) -> str:
    methods = [one for one in map(_function_of, vars(kind).values()) if _is_of_main(one)]
    codes = [one.__code__ for one in methods if one is not None]
    written = [code for code in codes if code.co_filename in linecache.cache]
    places = dict.fromkeys(code.co_filename for code in written)
    candidates = [(file, tree) for file in places if (tree := _tree_of(file)) is not None]
    found: dict[str, str] = {}
    problem: Unknown | None = None
    for file, tree in candidates or _cells():
        for node in _top(tree):
            if isinstance(node, ast.ClassDef) and node.name == name and _fits(node, kind, written):
                try:
                    _check_untouched(node, kind)
                except Unknown as error:  # or it is of another cell, which had other settings
                    problem = error
                else:
                    found[ast.unparse(node)] = _text(file, node, is_nested=node not in tree.body)
    if not found:
        if (made_by := _statement_that_makes(name, kind)) is not None:
            return made_by
        if problem is not None:
            raise problem
        if kind.__name__ != name:
            raise earlier(kind.__name__)
        if candidates:
            raise Unknown("has a method that has been replaced since its cell ran", _AGAIN)
        raise Unknown("has no source here")
    if len(found) > 1:
        raise Unknown("is defined differently in several cells", _ANEW)
    (text,) = found.values()
    return _checked(text, written)


def _statement_that_makes(name: str, kind: type) -> str | None:
    """Of a namedtuple, or an Enum that was called: what makes the class anew. Another name for a
    class that has been defined anew since would be the new one."""
    with suppress(Unknown):
        text = statement(name)
        value = getattr(ast.parse(text).body[0], "value", None)
        is_made_there = isinstance(value, ast.Call) and name not in _names_in(value)
        if is_made_there or (isinstance(value, ast.expr) and kind in _now(value)):
            return text
    return None


def _checked(text: str, codes: list[types.CodeType]) -> str:
    """``text``, which means these codes; Unknown where a file has been edited since it was run."""
    meant = list(_codes_in(compile(text, "cell", "exec", dont_inherit=True)))
    for code in codes:
        if not any(_is_same(code, one) for one in meant):
            raise Unknown("is not what its source says now", _AGAIN)
    return text


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner
            yield from _codes_in(inner)


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    def consts(code: types.CodeType) -> list[object]:
        return [c for c in code.co_consts if not isinstance(c, types.CodeType)]

    inner = zip(_codes_in(one), _codes_in(other), strict=False)
    return (
        one.co_qualname == other.co_qualname
        and one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and repr(consts(one)) == repr(consts(other))
        and all(_is_same(mine, its) for mine, its in inner)
    )


_AGAIN = "run the cell that defines it again, or restart the kernel."
_ANEW = "restart the kernel and run the cells again, or give it another name."


def _fits(node: ast.ClassDef, kind: type, codes: list[types.CodeType]) -> bool:
    """Whether this may be the class's definition: with its annotations and methods."""
    annotated = [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    has_bases = any(ast.unparse(base) != "object" for base in node.bases)
    if has_bases != (kind.__bases__ != (object,)):
        return False
    if annotated != list(inspect.get_annotations(kind)):
        return False
    return all(code.co_firstlineno in _lines(node) for code in codes)


def _check_untouched(node: ast.ClassDef, kind: type) -> None:
    """Unknown where an attribute has been set or added since, or what the cell read has changed."""
    _check_bases(node, kind)
    bound: set[str] = set()
    values: dict[str, ast.expr] = {}
    for item in node.body:
        # Whatever is named in a loop or under a condition may be bound there.
        names = _names_in(item) if isinstance(item, _COMPOUND) else _bound_by(item)
        bound |= names
        for name in names:
            values.pop(name, None)
            is_plain = all(isinstance(target, ast.Name) for target in _targets(item))
            if is_plain and isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
                values[name] = item.value
    for name, value in values.items():
        for then in _now(value, hidden=bound) if name in vars(kind) else ():
            has = vars(kind)[name]
            # Slots, and what a metaclass makes of a value, such as a member of an Enum.
            is_made = type(kind) not in (type, ABCMeta) and type(has) is not type(then)
            if not is_made and not inspect.isdatadescriptor(has) and not _means_same(has, then):
                raise Unknown(f"has another {name} now than in its cell", _AGAIN)
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            method = _function_of(vars(kind).get(item.name))
            if method is not None and method.__code__.co_firstlineno == _lines(item).start:
                _check_defaults(item, method, hidden=bound)
            elif method is not None and not _is_of_main(method) and not item.decorator_list:
                raise Unknown(f"has another {item.name} now than in its cell", _AGAIN)
    is_plain = type(kind) is type and not node.decorator_list
    if is_plain and not any(isinstance(k, _COMPOUND) for k in node.body):
        for name in values:
            if name not in vars(kind) and not name.startswith("__"):
                raise Unknown(f"has no {name} now, unlike in its cell", _AGAIN)
        for name in vars(kind):
            if not name.startswith("_") and name not in bound:
                raise Unknown(f"has an attribute {name} that its cell does not give it", _AGAIN)


def _check_bases(node: ast.ClassDef, kind: type) -> None:
    meant = [getattr(now, "__origin__", now) for base in node.bases for now in _now(base)]
    for now in meant:
        if not isinstance(now, type) or now in kind.__bases__:
            continue
        then = [one for one in kind.__bases__ if one.__name__ == now.__name__]
        if now is kind or not any(_means_same(one, now) for one in then):
            why = f"has a base {now.__name__}, and that name means something else now"
            raise Unknown(why, _AGAIN)


def _check_wrappers(node: ast.FunctionDef | ast.AsyncFunctionDef, value: Any) -> None:
    """Unknown where something has been put around the function after it was defined."""
    num_wrappers, inner = 0, value
    while (inner := getattr(inner, "__wrapped__", None)) is not None:
        num_wrappers += 1
    num_written = len(node.decorator_list)  # one may put several around it
    if num_wrappers > num_written and (not num_written or _is_made_of_itself(node.name)):
        raise Unknown("has been wrapped since it was defined", "write the wrapper as a decorator.")
    registry = getattr(value, "registry", None)
    if isinstance(registry, types.MappingProxyType) and len(registry) > 1:
        raise Unknown("has been given more cases since, by register")


def _is_made_of_itself(name: str) -> bool:
    """Whether a cell has ``f = wrapper(f)``."""
    return any(
        isinstance(node, ast.Assign) and name in _bound_by(node) and name in _names_in(node.value)
        for _, tree in _cells()
        for node in _top(tree)
    )


def _check_defaults(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    function: types.FunctionType,
    hidden: Collection[str] = (),
) -> None:
    """Unknown where a default was made of what has changed since."""
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names = names[len(names) - len(given.defaults) :]
    found = list(zip(names, given.defaults, function.__defaults__ or (), strict=False))
    by_name = function.__kwdefaults__ or {}
    for one, expression in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if expression is not None and one.arg in by_name:
            found.append((one.arg, expression, by_name[one.arg]))
    for name, expression, then in found:
        at_once = _now(expression, hidden) if _names_in(expression) else []  # {} may be a memory
        if not all(_means_same(then, now) for now in at_once):
            raise Unknown(f"has another default of {name} than its cell would give it now", _AGAIN)


#: What gives the same again, and does nothing else.
_QUIET = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def _now(node: ast.expr, hidden: Collection[str] = ()) -> list[Any]:
    """What an expression of a cell means now, alone in a list; [] where it would have to call
    something, or has ``hidden`` names, which are not the cell's."""
    if not all(isinstance(one, _QUIET) for one in ast.walk(node)) or _names_in(node) & {*hidden}:
        return []
    try:
        code = compile(ast.Expression(node), "cell", "eval", dont_inherit=True)
        return [eval(code, vars(sys.modules["__main__"]))]
    except Exception:  # a name that is gone
        return []


def _means_same(one: Any, other: Any) -> bool:
    """Whether both would be the same in another process."""
    if one is other:
        return True
    if is_of_cells(one) and is_of_cells(other):
        with suppress(Unknown, RecursionError, AttributeError):
            return definition(one.__name__, one) == definition(other.__name__, other)
        return False
    mine, its = write_value(one), write_value(other)
    if isinstance(mine, Written) and isinstance(its, Written):
        kinds = zip(mine.types, its.types, strict=False)
        return mine.text == its.text and all(_means_same(*pair) for pair in kinds)
    try:
        return bool(one == other)
    except Exception:  # of arrays
        return False


def _function_of(value: object) -> types.FunctionType | None:
    """The innermost one that a decorated function wraps."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    try:
        inner = inspect.unwrap(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    return inner if isinstance(inner, types.FunctionType) else None


def _cells() -> Iterator[tuple[str, ast.Module]]:
    """What was typed: entries that belong to no file."""
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen"):
            tree = _tree_of(name)
            if tree is not None:
                yield name, tree


def _tree_of(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)) if lines else None
    except (SyntaxError, ValueError):
        return None


def _top(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a cell, also those under ``if``, ``with`` and ``try``."""
    waiting: list[ast.stmt] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If | ast.With | ast.Try | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                waiting += getattr(node, part, [])


def _bound_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    names = (inner for target in _targets(node) for inner in ast.walk(target))
    return {one.id for one in names if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _lines(node: ast.stmt) -> range:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)


def _text(file: str, node: ast.stmt, *, is_nested: bool) -> str:
    """As it was typed, so that line numbers and comments stay; an indented one is written anew."""
    if is_nested:
        return ast.unparse(node)
    return "".join(linecache.getlines(file)[_lines(node).start - 1 : _lines(node).stop - 1])
