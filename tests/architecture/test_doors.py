"""One door each: what may be imported or called only in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

DOORS = {
    "pynvml": ("muster/devices/nvml.py",),
    "sqlite3": ("muster/farm/ledger/",),
    "ray": ("muster/farm/executors/ray.py",),
    "submitit": ("muster/farm/executors/slurm.py", "muster/gang/slurm.py"),
    "torch": ("muster_recipes/", "muster/gang/", "muster/train/", "muster/rl/", "muster/pipeline/"),
    "matplotlib": ("muster_recipes/",),
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Top-level packages imported anywhere in the module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("name", sorted(DOORS))
def test_one_door(name: str) -> None:
    through = [
        place(path)
        for path in modules()
        if name in set(imports(ast.parse(path.read_text())))
        and not place(path).startswith(DOORS[name])
    ]
    assert through == []


def test_the_environment_is_read_in_one_module() -> None:
    readers = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if is_read and place(path) not in (
                "muster/base/settings.py",
                "muster/gang/topology.py",
            ):
                readers.append(place(path))
    assert readers == []


def test_one_module_prints() -> None:
    printers = {
        place(path)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    }
    assert printers == {"muster/cli/output.py"}


def test_a_package_imports_nothing_for_convenience() -> None:
    for path in modules():
        if path.name == "__init__.py" and place(path) != "muster/__init__.py":
            names = set(imports(ast.parse(path.read_text()))) - {"__future__"}
            assert names == set(), place(path)


def test_recipes_use_public_names_only() -> None:
    for path in modules():
        if not place(path).startswith("muster_recipes/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster."):
                raise AssertionError(f"{place(path)} imports {node.module}")
