"""What a target takes: read from its source, or else by importing it in another process.

``python -m muster.farm.look ANSWER KIND TARGET`` is that process: it imports the target and writes
its signature as JSON, so that the coordinator stays free of what the target imports.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.base.errors import MusterError, TargetError
from muster.base.modules import read_source
from muster.base.target import TargetRef, check_may_run, find_source, load, see_working_folder
from muster.farm.batched import BatchSpec, check_batch_spec
from muster.farm.kinds import ANY, Kind, literal_kind, union_kind
from muster.farm.parameters import (
    CONTEXT,
    Parameter,
    Signature,
    build_batched,
    build_signature,
    signature_of,
)
from muster.farm.results import note_on

_BATCHED = ("muster.batched", "muster.farm.batched.batched")
_PATHS = ("pathlib.Path", "pathlib.PurePath")
_TYPING = ("typing", "typing_extensions", "collections.abc")
_SIMPLE = {
    "int": "int",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "None": "none",
    **dict.fromkeys(("dict", "Dict", "Mapping"), "dict"),
    **dict.fromkeys(_PATHS, "path"),
}
_LISTS = ("list", "List", "Sequence")
_TUPLES = ("tuple", "Tuple")
_ANYTHING = ("object", "Any")


class _Unclear(Exception):
    """Only an import can tell."""


def inspect_source(source: str | bytes, attribute: str) -> Signature | None:
    """What the function ``attribute`` of ``source`` takes, or None when only an import can tell.

    Understood: a function defined once at the top level, bare or under muster's ``batched``, with
    annotations int, float, str, bool, Path, Literal, ``X | None``, Optional, Union, list, tuple,
    dict and Any. SyntaxError if ``source`` is not Python; TargetError if tasks cannot call it.
    """
    tree = ast.parse(source)
    function = _the_function(tree, attribute)
    if function is None:
        return None
    names = _Names(tree)
    try:
        spec, declared = _decoration(function, names)
        entries = list(_entries(function.args, names, batched=spec is not None))
        if spec is None:
            found = build_signature(attribute, entries)
        else:
            found = build_batched(attribute, entries, spec, declared)
        note = "" if function.returns is None else note_on(ast.unparse(function.returns))
        return replace(found, note=note)
    except _Unclear:
        return None


def _the_function(tree: ast.Module, attribute: str) -> ast.FunctionDef | None:
    """The one top-level definition of ``attribute``, None if it is bound in any other way."""
    found: list[ast.stmt] = [node for node in tree.body if attribute in _bound_by(node)]
    only = found[0] if len(found) == 1 else None
    if only is not None and any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(only)):
        return None  # its own, or that of a function in it
    return only if isinstance(only, ast.FunctionDef) else None


def _bound_by(node: ast.stmt) -> set[str]:
    """The names a top-level statement binds; too many rather than too few."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    bound: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            bound.add(inner.id)
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(inner.name)
        elif isinstance(inner, ast.alias):
            bound.add(inner.asname or inner.name.partition(".")[0])
        elif isinstance(inner, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and inner.name:
            bound.add(inner.name)
    return bound


class _Names:
    """What the names at the top level of a module stand for."""

    def __init__(self, tree: ast.Module) -> None:
        #: Name -> dotted origin for plain imports, "" for everything else.
        self._origin: dict[str, str] = {}
        for node in tree.body:
            imported = dict(_imports(node))
            for name in _bound_by(node):
                origin = imported.get(name, "")
                # Bound twice, a name may mean either.
                same = self._origin.get(name, origin) == origin
                self._origin[name] = origin if same else ""

    def resolve(self, node: ast.expr) -> str:
        """``pathlib.Path`` for an expression that means it; _Unclear for what is not known."""
        if isinstance(node, ast.Attribute):
            return f"{self.resolve(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            if node.id not in self._origin and hasattr(builtins, node.id):
                return node.id
            origin = self._origin.get(node.id)
            if origin:
                return origin
        raise _Unclear

    def kind(self, node: ast.expr | None) -> Kind:
        """The `Kind` of an annotation; _Unclear for what is not simple."""
        if node is None:
            return ANY
        if isinstance(node, ast.Constant):
            if node.value is None:
                return Kind("none")
            if isinstance(node.value, str):
                return self.kind(_parse_annotation(node.value))
            raise _Unclear
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return _flat_union([self.kind(node.left), self.kind(node.right)])
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        origin = self._type_name(node)
        if origin in _SIMPLE:
            return Kind(_SIMPLE[origin])
        if origin in _LISTS or origin in _TUPLES:
            return Kind("list" if origin in _LISTS else "tuple_of", (ANY,))
        if origin in _ANYTHING:
            return ANY
        raise _Unclear

    def _type_name(self, node: ast.expr) -> str:
        """`resolve`, and what comes from a typing module without the module."""
        origin = self.resolve(node)
        module, _, short = origin.rpartition(".")
        return short if module in _TYPING else origin

    def _subscript(self, node: ast.Subscript) -> Kind:
        origin = self._type_name(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if origin == "Literal":
            return literal_kind([_constant(item) for item in inner])
        if origin == "Optional":
            return _flat_union([self.kind(inner[0]), Kind("none")])
        if origin == "Union":
            return _flat_union([self.kind(item) for item in inner])
        if origin == "Annotated":
            return self.kind(inner[0])
        if origin in _LISTS:
            return Kind("list", (self.kind(inner[0]),))
        if _SIMPLE.get(origin) == "dict":
            return Kind("dict")
        if origin in _TUPLES:
            last = inner[-1]
            if len(inner) == 2 and isinstance(last, ast.Constant) and last.value is Ellipsis:
                return Kind("tuple_of", (self.kind(inner[0]),))
            return Kind("tuple", tuple(self.kind(item) for item in inner))
        raise _Unclear


def _imports(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _entries(
    args: ast.arguments, names: _Names, *, batched: bool
) -> Iterator[tuple[str, str, bool, Kind]]:
    """(name, how it is passed, required, kind) as `build_signature` wants them."""

    def kind(arg: ast.arg) -> Kind:
        # The context and a batch are muster's to pass: their annotations convert nothing.
        return ANY if batched or arg.arg == CONTEXT else names.kind(arg.annotation)

    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    for index, arg in enumerate(positional):
        how = "positional-only" if index < len(args.posonlyargs) else "positional or keyword"
        yield arg.arg, how, index < first_default, kind(arg)
    if args.vararg:
        yield args.vararg.arg, "variadic positional", True, ANY
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield arg.arg, "keyword-only", default is None, kind(arg)
    if args.kwarg:
        yield args.kwarg.arg, "variadic keyword", True, kind(args.kwarg)


def _decoration(
    function: ast.FunctionDef, names: _Names
) -> tuple[BatchSpec | None, tuple[Parameter, ...] | None]:
    """The arguments of ``@batched``; (None, None) for a bare function, else _Unclear."""
    if not function.decorator_list:
        return None, None
    call = function.decorator_list[0]
    if len(function.decorator_list) > 1 or not isinstance(call, ast.Call) or call.args:
        raise _Unclear
    if names.resolve(call.func) not in _BATCHED:
        raise _Unclear
    given: dict[str, Any] = {}
    declared: tuple[Parameter, ...] | None = None
    for keyword in call.keywords:
        if keyword.arg == "params":
            declared = _declared(keyword.value, names)
        elif keyword.arg in ("static", "max_batch", "max_batch_on_cpu"):
            given[keyword.arg] = _constant(keyword.value)
        else:
            raise _Unclear
    spec = BatchSpec()
    return (
        check_batch_spec(
            given.get("static", spec.static),
            given.get("max_batch", spec.max_batch),
            max_batch_on_cpu=given.get("max_batch_on_cpu"),
        ),
        declared,
    )


def _declared(node: ast.expr, names: _Names) -> tuple[Parameter, ...] | None:
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if not isinstance(node, ast.Dict):
        raise _Unclear
    parameters = []
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise _Unclear
        parameters.append(Parameter(key.value, True, names.kind(value)))
    return tuple(parameters)


def _flat_union(members: list[Kind]) -> Kind:
    """`union_kind` with nested unions lifted and repeats dropped, as an evaluated one has them."""
    flat: list[Kind] = []
    for member in members:
        for kind in member.items if member.form == "union" else (member,):
            if kind not in flat:
                flat.append(kind)
    return union_kind(flat) if len(flat) > 1 else flat[0]


def _parse_annotation(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _Unclear from None


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _Unclear from None


def static_signature(ref: TargetRef, base_folder: Path | None = None) -> Signature | None:
    """What the target takes, read from its source without running any of it.

    None when the source alone does not tell: the name is imported or assigned, wrapped in a
    decorator other than muster's, or annotated with types of its own. Then import it for real,
    in a process that may load what it likes. TargetError when tasks cannot call it.
    """
    path = find_source(ref, base_folder)
    if path is None:
        return None
    return inspect_file(path, ref.attribute)


def inspect_file(path: Path, attribute: str) -> Signature | None:
    """`static_signature` of ``attribute`` in the file at ``path``."""
    try:
        return inspect_source(read_source(path), attribute)
    except SyntaxError as error:
        raise TargetError(
            f"Cannot read {path}: {error.msg} in line {error.lineno}.", hint="correct that line."
        ) from error


_LIMIT_S = 300.0


def look(ref: TargetRef) -> Signature:
    """What the target takes: from its source where that tells, else by importing it elsewhere."""
    signature = static_signature(ref)
    if signature is not None:
        return signature
    check_may_run(ref)
    import subprocess  # here: few targets cannot be read from their source
    import tempfile

    with tempfile.TemporaryDirectory(prefix="muster-look-") as folder:
        # A file and not standard output, which belongs to what the module prints on import.
        answer_file = Path(folder) / "answer.json"
        words = ("muster.farm.look", str(answer_file), ref.kind, str(ref))
        argv = [sys.executable, "-P", "-m", *words]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise TargetError(f"Importing {ref} took longer than {_LIMIT_S:.0f} s.") from None
        if not answer_file.exists():
            raise TargetError(f"Importing {ref} ended its process with code {done.returncode}.")
        answer = json.loads(answer_file.read_bytes())
    if "error" in answer:
        raise TargetError(answer["error"])
    return Signature.from_record(answer)


def main(argv: list[str]) -> int:
    see_working_folder()
    location, _, attribute = argv[2].rpartition(":")
    ref = TargetRef("file" if argv[1] == "file" else "module", location, attribute)
    try:
        record = signature_of(load(ref)).to_record()
    except MusterError as error:
        record = {"error": str(error)}
    Path(argv[0]).write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
