"""The benchmarks run and say what they measured; their figures are no matter of pass or fail."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.settings import kept_environment
from muster.farm.worker.inbox import Line

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Libraries; what made a fixture; what runs the others.
NO_BENCHMARKS = {"measuring", "dashboard_peers", "record_digits_grid", "all"}
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in NO_BENCHMARKS)
#: The last test below runs it, with the others' table.
NAMES.remove("makespan")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_ends_with_a_table_and_a_record(name: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--json", record],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
    assert json.loads(record.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_each_finds_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with kept_environment():
        assert callable(runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"])


def test_what_stands_for_a_workers_line_has_all_that_tasks_ask_of_one() -> None:
    nobody = runpy.run_path(str(BENCHMARKS / "programs/ssvae_call.py"))["Nobody"]
    asked = {name for name in [*vars(Line), *Line.__annotations__] if not name.startswith("_")}
    assert asked and asked <= {*dir(nobody)}


def test_one_table_has_the_goals_of_all_that_were_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "all.py", "--quick", "--only", "makespan", "--to", "to"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [goal] = json.loads((tmp_path / "to/makespan.json").read_text())["goals"]
    assert goal["what"] == "makespan, × the bound"
    assert f"makespan   {goal['what']}  {goal['wanted']}" in done.stdout
