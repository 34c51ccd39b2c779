"""Modules in a zip file on PYTHONPATH, which Python imports as it does others: they are found,
run, and a part of a run's code.
"""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest
from tests.conftest import MusterCli

from muster.api.runs import Run
from muster.base.code import code_of
from muster.base.errors import TargetError
from muster.base.target import TargetRef, ref_of

TASK = "from zipped.helper import times\n\n\ndef f(x: int):\n    return {'y': times(x)}\n"
STAGE = "def up(record):\n    return {**record, 'n': record['n'] + 1}\n"


def pack(archive: Path, factor: int) -> None:
    archive.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped/__init__.py", "")
        file.writestr("zipped/helper.py", f"def times(x):\n    return {factor} * x\n")
        file.writestr("zipped/task.py", TASK)
        file.writestr("zipped/stage.py", STAGE)
        file.writestr("zipped/__main__.py", "print('from the zip,', __package__)\n")


@pytest.fixture(params=["lib.zip", "elsewhere/lib.zip"])
def archive(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """In the project, or outside of it."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    place = project / request.param if request.param == "lib.zip" else tmp_path / request.param
    pack(place, 2)
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.syspath_prepend(str(place))
    return place


def test_what_lies_in_a_zip_is_a_part_of_the_code(archive: Path) -> None:
    ref = TargetRef("module", "zipped.task", "f")
    before = code_of([ref])
    names = ("__init__", "helper", "task")
    assert sorted(name.rpartition("zipped/")[2] for name in before) == [f"{n}.py" for n in names]
    pack(archive, 3)
    now = code_of([ref])
    assert [name for name in now if now[name] != before[name]] == [
        name for name in before if name.endswith("helper.py")
    ]
    with pytest.raises(TargetError, match=r"There is no module zipped\.none"):
        code_of([TargetRef("module", "zipped.none", "f")])


def test_a_function_of_a_module_in_a_zip_has_a_name(archive: Path) -> None:
    archive.unlink()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("alone_in_zip.py", "def f(x):\n    return x\n")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module("alone_in_zip")
        assert ref_of(module.f) == TargetRef("module", "alone_in_zip", "f")
    finally:
        sys.modules.pop("alone_in_zip", None)


def test_a_sweep_and_a_map_of_it_run(archive: Path, muster_main: MusterCli) -> None:
    words = ("sweep", "zipped.task:f", "--devices", "cpu:1", "--run-dir", "r", "--quiet")
    here = Path.cwd()
    done = muster_main(*words, "--grid", "x=1,2", folder=here)
    assert done.returncode == 0, done.stderr
    assert Run(Path("r")).results()["y"].to_pylist() == [2, 4]
    pack(archive, 3)
    done = muster_main(*words, "--grid", "x=1,2,3", folder=here)
    assert done.returncode == 2 and "The code has changed" in done.stderr
    Path("in.jsonl").write_text('{"n": 1}\n')
    words = ("map", "zipped.stage:up", "--input", "in.jsonl", "--output", "out.jsonl")
    done = muster_main(*words, "--devices", "cpu:1", "--quiet", folder=here)
    assert done.returncode == 0, done.stderr
    assert '"n":2' in Path("out.jsonl").read_text()


def test_a_program_in_it_runs(archive: Path, muster_main: MusterCli) -> None:
    here = Path.cwd()
    words = ("run", "--devices", "cpu:1", "--run-dir", "r")
    done = muster_main(*words, "-m", "zipped", folder=here)
    assert done.returncode == 0, done.stderr
    assert "from the zip, zipped" in Path("r/logs/rank-0.log").read_text()
    done = muster_main(*words, "-m", "zipped.none", folder=here)
    assert done.returncode == 2 and "There is no module zipped.none" in done.stderr
