"""``--python``: tasks run in the Python of a project, which has what Muster's own has not."""

from __future__ import annotations

import json
import shutil
import sys
import venv
from pathlib import Path

import pytest
from tests.conftest import MusterCli

import muster
from muster.farm.executors.worker_process import interpreter

WORK = """
import sys

import only_there


def f(x: int):
    return {"y": only_there.twice(x), "in": sys.prefix, "muster": "muster" in sys.modules}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a package of its own, and with nothing of Muster's."""
    place = tmp_path_factory.mktemp("project") / ".venv"
    venv.create(place, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("def twice(x):\n    return 2 * x\n")
    return place


def test_tasks_run_in_the_python_that_is_named(
    project: Path, tmp_path: Path, muster_cli: MusterCli
) -> None:
    (tmp_path / "work.py").write_text(WORK)
    run = muster.sweep(f"{tmp_path}/work.py:f", grid={"x": [2, 3]}, devices="cpu:1",
                       run_dir=tmp_path / "r", python=str(project))  # fmt: skip
    assert run.exit_code == 0
    rows = run.results().to_pylist()
    assert [(row["y"], row["in"]) for row in rows] == [(4, str(project)), (6, str(project))]
    record = json.loads((tmp_path / "r/run.json").read_bytes())
    assert record["options"]["python"] == str(project) and "python" in record["environment"]
    again = muster_cli("sweep", "work.py:f", "--grid", "x=2", "--devices", "cpu:1", "--python",
                       str(project / "bin/python"), "--run-dir", "again")  # fmt: skip
    assert again.returncode == 0, again.stderr
    resumed = muster_cli("resume", "r")
    assert resumed.returncode == 0, resumed.stderr
    versions = json.loads((tmp_path / "again/run.json").read_bytes())["environment"]
    assert "torch" not in versions and "muster-gpu" in versions
    moved = muster_cli("resume", "again", "--python", sys.executable)
    assert moved.returncode == 0, moved.stderr
    versions = json.loads((tmp_path / "again/run.json").read_bytes())["environment"]
    assert "torch" in versions, "these were the first Python's"
    elsewhere = muster_cli("resume", "again", "--on", "slurm")
    assert elsewhere.returncode == 2 and "--python" in elsewhere.stderr


@pytest.mark.quick
def test_a_python_that_cannot_run_workers_is_refused_before_anything(
    tmp_path: Path, muster_main: MusterCli
) -> None:
    (tmp_path / "work.py").write_text(WORK)
    words = ("sweep", "work.py:f", "--grid", "x=2", "--devices", "cpu:1", "--run-dir", "r")
    for python in ("nowhere/bin/python", "/bin/false", "/bin/true", str(tmp_path), "no-python"):
        done = muster_main(*words, "--python", python)
        assert done.returncode == 2
        assert f"--python {python} is not a Python interpreter: " in done.stderr
        assert "Hint: name a Python 3.11 or newer, or an environment's folder" in done.stderr
        assert "pip" not in done.stderr
        assert not (tmp_path / "r").exists()
    lacking = tmp_path / "lacking"  # a Python in which orjson cannot be imported
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['orjson'] = None\n")
    lacking.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    lacking.chmod(0o755)
    done = muster_main(*words, "--python", str(lacking))
    assert done.returncode == 3
    assert f"--python {lacking} cannot run workers: " in done.stderr
    assert f"what is missing there: {lacking} -m pip install orjson" in done.stderr
    done = muster_main(*words[:1], *words[2:], "--python", ".venv", "--", "echo", "{x}")
    assert done.returncode == 2 and "has no effect on a command" in done.stderr
    assert "Hint: name it in the command: -- " in done.stderr
    done = muster_main(*words, "--python", "python3", "--on", "inline")
    assert done.returncode == 2 and "--python has no effect with --on inline" in done.stderr
    with pytest.raises(muster.UsageError, match="--python"):
        muster.sweep("work.py:f", grid={"x": [1]}, python=Path("python3"), executor="inline")


@pytest.mark.quick
def test_a_program_in_this_folder_goes_before_one_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`./python3` became the `python3` of PATH."""
    monkeypatch.chdir(tmp_path)
    assert interpreter(Path("./python3")) == shutil.which("python3")
    (tmp_path / "python3").touch()
    assert interpreter(Path("./python3")) == str(tmp_path / "python3")


def test_a_program_runs_in_the_python_of_its_project(
    project: Path, tmp_path: Path, muster_main: MusterCli
) -> None:
    """Ranks have no --python: the interpreter is the program. Its children are its own too."""
    (tmp_path / "main.py").write_text(
        "import multiprocessing, os, sys\nimport only_there\n"
        "def child():\n    assert only_there.twice(1) == 2 and sys.prefix == os.environ['WANTED']\n"
        "if __name__ == '__main__':\n    os.environ['WANTED'] = sys.prefix\n"
        "    one = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    one.start()\n    one.join()\n"
        "    print(os.environ['RANK'], one.exitcode, sys.prefix)\n"
    )
    python = str(project / "bin" / "python")
    words = ("run", "--devices", "cpu:1", "--run-dir", "r", "--no-python", python, "main.py")
    done = muster_main(*words)
    assert done.returncode == 0, done.stderr
    assert f"[0] 0 0 {project}" in done.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--python", ".venv", "t.py"), "write muster run --no-python .venv/bin/python"),
        (("train", "digits", "--python", ".venv"), "install muster-gpu in that environment"),
        (("verify", "digits", "--python", ".venv"), "install muster-gpu in that environment"),
    ],
)
def test_ranks_say_how_they_get_another_python(
    words: tuple[str, ...], says: str, muster_main: MusterCli
) -> None:
    done = muster_main(*words)
    assert done.returncode == 2 and says in done.stderr, done.stderr
