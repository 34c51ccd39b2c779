"""One door each: what may be imported or called only in one place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import muster
from muster import agents, generation, plotting

SOURCE = Path(__file__).parents[2] / "src"

#: What is imported → the files and folders that may. ``gang`` is here because the layers alone
#: would let the farm, which is above it, import it: the engines stay apart.
DOORS = {
    "pynvml": ("muster/devices/nvml.py",),
    "sqlite3": ("muster/farm/ledger/",),
    "ray": ("muster/farm/executors/ray.py", "muster/farm/executors/ray_node.py"),
    "submitit": ("muster/slurm/script.py",),
    "torch": (
        "muster_recipes/",
        "muster/supervisor/",
        "muster/rank/",
        "muster/train/",
        "muster/rl/",
        "muster/pipeline/",
        "muster/doctor/probes/",
        "muster/search/optuna_study.py",  # only where Optuna's Gaussian process has brought it
    ),
    "matplotlib": (
        "muster_recipes/",
        "muster/plotting.py",
    ),
    "gymnasium": ("muster/rl/gymnasium_spaces.py", "muster_recipes/"),
    "muster.gang": (
        "muster/gang/",
        "muster/supervisor/",
        "muster/rank/",
        "muster/train/",
        "muster/rl/",
        "muster/api/",
        "muster/cli/",
    ),
}
# The far end runs alone on another machine, without the rest of the package.
ENVIRONMENT = (
    "muster/base/settings.py", "muster/gang/topology.py", "muster/hosts/far_end.py",
    "muster/farm/executors/ray_fork.py",
)  # fmt: skip
_ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
_IMPORTERS = {"import_module", "__import__"}


class Module(NamedTuple):
    """``imports``: dotted names imported anywhere, in functions too, and by name in a string;
    ``attributes``: every ``.name`` in it.
    """

    imports: tuple[str, ...]
    attributes: frozenset[str]
    prints: bool


def modules(source: Path) -> Iterator[tuple[str, Module]]:
    """Every module with its place, ``muster/farm/space.py``."""
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), _read(path.read_text(encoding="utf-8"))


@functools.cache
def _read(text: str) -> Module:
    """Each file is parsed and walked once for all the tests here."""
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return Module(
        tuple(_imports(nodes)),
        frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        any(isinstance(func, ast.Name) and func.id == "print" for func in calls),
    )


def _imports(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and _called(node) in _IMPORTERS:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def around_the_door(source: Path, name: str) -> list[str]:
    return [
        place
        for place, module in modules(source)
        if any(f"{imported}.".startswith(f"{name}.") for imported in module.imports)
        and not place.startswith(DOORS[name])
    ]


def environment_readers(source: Path) -> list[str]:
    readers = []
    for place, module in modules(source):
        names = module.attributes | {name[3:] for name in module.imports if name.startswith("os.")}
        if names & _ENVIRONMENT_NAMES and place not in ENVIRONMENT:
            readers.append(place)
    return readers


def printers(source: Path) -> set[str]:
    return {place for place, module in modules(source) if module.prints}


def convenient_packages(source: Path) -> list[str]:
    return [
        place
        for place, module in modules(source)
        if place.endswith("/__init__.py")
        and place != "muster/__init__.py"
        and not all(name.startswith("__future__.") for name in module.imports)
    ]


def private_uses(source: Path) -> list[str]:
    """Recipes that use more of muster than its public names."""
    public = {"muster", *(f"muster.{name}" for name in muster.__all__)}
    for face in (agents, generation, plotting):
        public |= {face.__name__, *(f"{face.__name__}.{name}" for name in face.__all__)}
    return [
        f"{place}: {name}"
        for place, module in modules(source)
        if place.startswith("muster_recipes/")
        for name in module.imports
        if name.startswith("muster.") and name not in public
    ]


@pytest.mark.parametrize("name", sorted(DOORS))
def test_one_door(name: str) -> None:
    assert around_the_door(SOURCE, name) == []


def test_the_environment_is_read_in_one_module() -> None:
    assert environment_readers(SOURCE) == []


def test_one_module_prints() -> None:
    assert printers(SOURCE) == {"muster/cli/output.py"}


def test_a_package_imports_nothing_for_convenience() -> None:
    assert convenient_packages(SOURCE) == []


def test_recipes_use_public_names_only() -> None:
    assert private_uses(SOURCE) == []


def _write(folder: Path, place: str, text: str) -> None:
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        ("torch", "muster/api/bad.py", "import torch"),
        ("torch", "muster/api/bad.py", "def f():\n    import torch.nn as nn"),
        ("torch", "muster/api/bad.py", "from torch import nn"),
        ("torch", "muster/api/bad.py", "import importlib\nimportlib.import_module('torch.cuda')"),
        ("torch", "muster/gang/launch.py", "import torch"),
        ("sqlite3", "muster/farm/look.py", "__import__('sqlite3')"),
        ("muster.gang", "muster/farm/bad.py", "from muster import gang"),
        ("muster.gang", "muster/farm/bad.py", "from muster.gang.launch import start"),
    ],
)
def test_a_way_around_a_door_is_seen(name: str, place: str, text: str, tmp_path: Path) -> None:
    _write(tmp_path, place, text)
    assert around_the_door(tmp_path, name) == [place]


def test_doors_let_through_what_may_pass(tmp_path: Path) -> None:
    _write(tmp_path, "muster/rank/meter.py", "import torch")
    _write(tmp_path, "muster/farm/words.py", "import torchless\nprint_me = 'import torch'")
    assert around_the_door(tmp_path, "torch") == []


@pytest.mark.parametrize(
    "text",
    ["import os as o\no.getenv('X')", "from os import environ", "import os\nos.putenv('a', 'b')"],
)
def test_a_second_reader_of_the_environment_is_seen(text: str, tmp_path: Path) -> None:
    _write(tmp_path, "muster/api/bad.py", text)
    assert environment_readers(tmp_path) == ["muster/api/bad.py"]


def test_other_breaches_are_seen(tmp_path: Path) -> None:
    _write(tmp_path, "muster/farm/__init__.py", "from muster.farm.space import grid")
    _write(tmp_path, "muster/base/__init__.py", "from __future__ import annotations")
    _write(tmp_path, "muster/api/loud.py", "print(1)")
    _write(tmp_path, "muster_recipes/a.py", "import muster.farm.decide\nfrom muster import sweep")
    _write(tmp_path, "muster_recipes/b.py", "from muster import api")
    assert convenient_packages(tmp_path) == ["muster/farm/__init__.py"]
    assert printers(tmp_path) == {"muster/api/loud.py"}
    assert private_uses(tmp_path) == [
        "muster_recipes/a.py: muster.farm.decide",
        "muster_recipes/b.py: muster.api",
    ]
