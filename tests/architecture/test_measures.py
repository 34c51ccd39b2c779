"""``make measures`` counts what it says, on a tree that is small enough to count by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = """
[[tool.importlinter.contracts]]
name = "Layers"
type = "layers"
layers = ["api", "farm", "base"]
"""
TREE = {
    "api/launch.py": """
        from muster.api.look import look
        from muster.base.files import write
        from muster.farm.work import Hooks, Work, work_off

        def run_workload(workload, say):
            look(workload)
            write(workload.name)
            hooks = Hooks(say, 3)
            return work_off(Work(workload), hooks, tell=say)
        """,
    "api/look.py": """
        def look(workload: object) -> None:
            return
        """,
    "base/files.py": """
        from muster.base.disk import sync

        def write(path: str | None) -> None:
            sync(path)
        """,
    "base/disk.py": """
        def sync(path: str | None) -> None:
            return
        """,
    "farm/work.py": """
        from collections.abc import Callable
        from dataclasses import dataclass

        Say = Callable[[str], None]

        @dataclass
        class Work:
            what: object

        @dataclass
        class Hooks:
            say: Say
            most: int

        def work_off(work: Work, hooks: Hooks, tell: Say | None = None) -> None:
            _do(work)

        def _do(work: Work) -> None:
            return
        """,
}


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    try:
        import measure_house
    finally:
        sys.modules.pop("measure_house", None)
    return measure_house


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(LAYERS)
    for name, text in TREE.items():
        path = tmp_path / "src/muster" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path


def test_a_trip_goes_wherever_something_of_the_value_goes(measures: ModuleType, tree: Path) -> None:
    trip = measures.Trip(measures.House(tree), "run_workload")
    assert [name.removeprefix("muster.") for name in trip.modules] == [
        "api.launch", "api.look", "base.files", "base.disk", "farm.work",
    ]  # fmt: skip
    assert trip.upward == 2, "back from what writes, and back from the farm"
    assert trip.above_ground == (3, 1)


def test_a_text_that_is_made_of_the_value_is_not_the_value(
    measures: ModuleType, tree: Path
) -> None:
    trip = measures.Trip(measures.House(tree), "run_workload", itself=True)
    assert [name.removeprefix("muster.") for name in trip.modules] == [
        "api.launch", "api.look", "farm.work",
    ]  # fmt: skip
    assert trip.upward == 1


def test_functions_that_are_handed_down_are_named(measures: ModuleType, tree: Path) -> None:
    trip = measures.Trip(measures.House(tree), "run_workload")
    assert trip.handed == ["muster.farm.work.Hooks(say)", "muster.farm.work.work_off(tell)"]


def test_lines_are_those_of_modules_with_more_than_three(measures: ModuleType, tree: Path) -> None:
    (tree / "src/muster/__init__.py").write_text("\n")
    assert measures.module_lines(measures.House(tree)) == [5, 10, 20], "and not two of three lines"
