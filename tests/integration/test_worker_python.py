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


@pytest.fixture
def with_package(tmp_path: Path) -> tuple[Path, Path]:
    """A project whose own package only its environment finds, as after `pip install -e .`: a
    folder on the path, and a finder of setuptools that maps names to places."""
    for name in ("src/mine", "flat/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "model.py").write_text("SCALE = 2\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    (tmp_path / "work.py").write_text(
        "from mine.model import SCALE\nfrom other import model\n\n\n"
        "def f(x: int):\n    return {'y': x * SCALE * model.SCALE}\n\n\n"
        "def g(record):\n    return {'n': record['n'] * SCALE}\n"
    )
    (tmp_path / "in.jsonl").write_text('{"n": 1}\n')
    python = tmp_path / ".venv"
    venv.create(python, with_pip=False)
    (packages,) = python.glob("lib/python*/site-packages")
    (packages / "mine.pth").write_text(f"{tmp_path / 'src'}\n")
    (packages / "finder_of_other.py").write_text(
        "import importlib.util, sys\n"
        f"MAPPING = {{'other': '{tmp_path}/flat/other'}}\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in MAPPING:\n"
        "            return importlib.util.spec_from_file_location(\n"
        "                name, MAPPING[name] + '/__init__.py')\n"
        "sys.meta_path.append(Finder)\n"
    )
    (packages / "other.pth").write_text("import finder_of_other\n")
    return tmp_path, python


@pytest.mark.parametrize("changed", ["src/mine/model.py", "flat/other/model.py"])
def test_a_package_that_only_the_other_python_finds_is_followed(
    changed: str, with_package: tuple[Path, Path], muster_main: MusterCli
) -> None:
    """A change in it went unnoticed: old and new results stood in one table."""
    place, python = with_package
    words = ("sweep", "work.py:f", "--grid", "x=2", "--devices", "cpu:1", "--run-dir", "r")
    there = ("--python", str(python))
    done = muster_main(*words, *there)
    assert done.returncode == 0, done.stderr
    code = json.loads((place / "r/run.json").read_bytes())["code"]
    assert {"work.py", "src/mine/model.py", "flat/other/model.py"} <= set(code)
    again = muster_main(*words, *there)
    assert again.returncode == 0, "nothing has changed"
    assert muster_main("resume", "r").returncode == 0
    (place / changed).write_text("SCALE = 3\n")
    for refused in (
        muster_main(*words[:3], "x=2,5", *words[4:], *there),
        muster_main(*words, *there, "--dry-run"),
        muster_main("resume", "r"),
        muster_main("add", "r", "--grid", "x=5"),
    ):
        assert refused.returncode == 2 and changed in refused.stderr, refused
    mixed = muster_main(*words[:3], "x=2,5", *words[4:], *there, "--allow-changed-code")
    assert mixed.returncode == 0, mixed.stderr


def test_a_run_that_an_earlier_version_began_goes_on_where_nothing_it_knew_has_changed(
    with_package: tuple[Path, Path], muster_main: MusterCli
) -> None:
    """It recorded what its own Python found, so not the packages of the other one."""
    place, python = with_package
    words = ("sweep", "work.py:f", "--grid", "x=2", "--devices", "cpu:1", "--run-dir", "r",
             "--python", str(python))  # fmt: skip
    assert muster_main(*words).returncode == 0
    record = json.loads((place / "r/run.json").read_bytes())
    old = {name: digest for name, digest in record["code"].items() if name == "work.py"}

    def begun_by_an_earlier_version() -> None:
        (place / "r/run.json").write_text(json.dumps({**record, "code": old}))

    more = (*words[:3], "x=2,5", *words[4:])
    for again in (("add", "r", "--grid", "x=5"), ("resume", "r"), more):
        begun_by_an_earlier_version()
        done = muster_main(*again)
        assert done.returncode == 0, done.stderr
    # It is recorded whole from then on.
    code = json.loads((place / "r/run.json").read_bytes())["code"]
    assert {"work.py", "src/mine/model.py", "flat/other/model.py"} <= set(code)
    begun_by_an_earlier_version()
    (place / "work.py").write_text((place / "work.py").read_text() + "# changed\n")
    refused = muster_main("resume", "r")
    assert refused.returncode == 2 and "work.py" in refused.stderr


def test_a_map_follows_it_too(with_package: tuple[Path, Path], muster_main: MusterCli) -> None:
    """Muster's own Python loads the file of a stage, so that the import has to wait."""
    place, python = with_package
    words = ("map", "work.py:g", "--input", "in.jsonl", "--output", "out.jsonl", "--run-dir", "m",
             "--devices", "cpu:1", "--python", str(python))  # fmt: skip
    done = muster_main(*words)
    assert done.returncode == 2 and "this Python, which has no module mine" in done.stderr
    assert "import mine inside of the function or of setup()" in done.stderr
    (place / "work.py").write_text(
        "def g(record):\n    from mine.model import SCALE\n    return {'n': record['n'] * SCALE}\n"
    )
    done = muster_main(*words)
    assert done.returncode == 0, done.stderr
    assert muster_main(*words).returncode == 0
    (place / "src/mine/model.py").write_text("SCALE = 3\n")
    refused = muster_main(*words)
    assert refused.returncode == 2 and "src/mine/model.py" in refused.stderr, refused


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_children_that_a_task_spawns_are_of_the_same_python(
    way: str, project: Path, tmp_path: Path, muster_main: MusterCli
) -> None:
    """Workers of a data loader are such: they find the task's file, and the project's packages."""
    (tmp_path / "work.py").write_text(
        "import multiprocessing, sys\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "import only_there\n\n\n"
        "def twice(x):\n    return only_there.twice(x), sys.prefix\n\n\n"
        "def f(x: int):\n"
        "    context = multiprocessing.get_context('WAY')\n"
        "    with ProcessPoolExecutor(2, mp_context=context) as pool:\n"
        "        (y, place), = pool.map(twice, [x])\n"
        "    return {'y': y, 'in': place}\n".replace("WAY", way)
    )
    done = muster_main("sweep", "work.py:f", "--grid", "x=2,3", "--devices", "cpu:1",
                       "--python", str(project), "--run-dir", "r")  # fmt: skip
    assert done.returncode == 0, done
    rows = muster.Run(tmp_path / "r").results().to_pylist()
    assert [(row["y"], row["in"]) for row in rows] == [(4, str(project)), (6, str(project))]
