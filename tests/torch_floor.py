"""What of torch the project uses, by name and by keyword, and what an older torch has of it.

``python -m tests.torch_floor SITE_PACKAGES`` reads the torch that is installed there, as text and
without importing it, and writes ``torch_floor.txt``: what we use and it has. It is run with the
oldest torch of pyproject.toml, unpacked from its wheel (a checkout lacks the generated stubs); what
that torch lacks is printed and the table left as it was. Methods of torch's objects are not seen.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/torch_floor.txt"
#: Where names are that a module has of the C library.
_STUBS = {
    "torch": ("torch._C", "torch._C._VariableFunctions"),
    "torch.distributed": ("torch._C._distributed_c10d",),
    "torch.linalg": ("torch._C._linalg",),
    "torch.nn.functional": ("torch._C._nn", "torch._C._VariableFunctions"),
}


def uses() -> set[str]:
    """``torch.cat`` and ``torch.cat dim`` for each name and each of its keywords in the code."""
    found = set[str]()
    for file in (*ROOT.glob("src/**/*.py"), *ROOT.glob("scripts/acceptance/**/*.py")):
        tree = ast.parse(file.read_text())
        known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.split(".")[0] == "torch":
                        known[name.asname or "torch"] = name.name if name.asname else "torch"
                        found.add(name.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for name in node.names:
                    known[name.asname or name.name] = f"{node.module}.{name.name}"
                    found.add(f"{node.module}.{name.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (dotted := _dotted(node, known)):
                found.add(dotted)
            if isinstance(node, ast.Call) and (dotted := _dotted(node.func, known)):
                found |= {f"{dotted} {word.arg}" for word in node.keywords if word.arg}
    return found


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value, known)
        return f"{inner}.{node.attr}" if inner else ""
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


class Sources:
    """A torch as text."""

    def __init__(self, site_packages: Path) -> None:
        self._root = site_packages
        self.version = re.findall(
            r"__version__ = '(\d+\.\d+)", (site_packages / "torch/version.py").read_text()
        )[0]
        self._index = cache(_index)

    def has(self, use: str) -> bool:
        dotted, _, keyword = use.partition(" ")
        if dotted.startswith("torch.ops."):  # made at run time
            return True
        module, rest = dotted, list[str]()
        while not self._files(module):
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        if not rest:
            return True
        nodes = [n for m in (module, *_STUBS.get(module, ())) for n in self._named(m, rest[0])]
        for name in rest[1:]:  # inside a class, or in an object of which nothing more is known
            inside = [n for n in nodes if isinstance(n, ast.ClassDef)]
            if inside and not any(n.keywords for n in inside):  # a metaclass may have more
                nodes = [n for c in inside for n in _defined(c.body, name)]
        return any(_takes(node, keyword) for node in nodes) if keyword else bool(nodes)

    def _files(self, module: str) -> list[Path]:
        path = self._root / module.replace(".", "/")
        ends = (".py", "/__init__.py", ".pyi", "/__init__.pyi")
        return [file for end in ends if (file := Path(f"{path}{end}")).exists()]

    def _named(self, module: str, name: str, depth: int = 0) -> Iterator[ast.AST]:
        if depth > 6:
            return
        for file in self._files(module):
            named, imports = self._index(file)
            yield from named.get(name, ())
            package = module if file.stem == "__init__" else module.rpartition(".")[0]
            for node in imports:
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, (above, node.module)))
                for given in node.names:
                    if given.name == "*" and node.level + source.startswith("torch"):
                        yield from self._named(source, name, depth + 1)
                    elif (given.asname or given.name) == name:
                        yield given
                        yield from self._named(source, given.name, depth + 1)


def _index(file: Path) -> tuple[dict[str, list[ast.AST]], list[ast.ImportFrom]]:
    nodes = list(ast.walk(ast.parse(file.read_text(errors="replace"))))
    named: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = getattr(target, "id", "") or getattr(target, "attr", "")
                named.setdefault(name, []).append(node)
    return named, [node for node in nodes if isinstance(node, ast.ImportFrom)]


def _defined(body: object, name: str) -> Iterator[ast.AST]:
    for node in body:  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(name in (getattr(t, "id", ""), getattr(t, "attr", "")) for t in targets):
                yield node


def _takes(node: ast.AST, keyword: str) -> bool:
    if isinstance(node, ast.ClassDef):
        makers = [n for m in ("__init__", "__new__") for n in _defined(node.body, m)]
        return any(_takes(n, keyword) for n in makers) or any(
            isinstance(n, ast.AnnAssign) for n in _defined(node.body, keyword)
        )
    if isinstance(node, ast.FunctionDef):
        words = (*node.args.args, *node.args.kwonlyargs)
        return node.args.kwarg is not None or keyword in {word.arg for word in words}
    return isinstance(node, ast.Assign)  # made by a call: its keywords are not to be seen


def main() -> int:
    there = Sources(Path(sys.argv[1]))
    lacking = sorted(use for use in uses() if not there.has(use))
    if lacking:
        print(f"torch {there.version} lacks:", *lacking, sep="\n  ")
        return 1
    TABLE.write_text("\n".join((f"torch {there.version}", *sorted(uses()))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
