"""The wheel, installed where nothing is but the base dependencies: no torch, no matplotlib."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WORK = """
def square(x: int) -> dict[str, int]:
    return {"y": x * x}


def upper(record):
    return {**record, "text": record["text"].upper()}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    place = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d"]
    subprocess.run([*build, str(place)], cwd=ROOT, check=True, capture_output=True)
    return place


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what its metadata asks for, taken from this one."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    packages = next(place.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    wheel = str(*built.glob("*.whl"))
    install = ["install", "-q", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    meta = next(iter(importlib.metadata.distributions(name="muster-gpu", path=[str(packages)])))
    for name in closure(meta.requires or []):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    assert not {"torch", "matplotlib", "pandas"} & {path.name for path in packages.iterdir()}
    return place


def closure(requirements: list[str]) -> set[str]:
    """What these need without extras, and what that needs."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in found or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, importlib.metadata.distribution(name).requires or ())
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "words.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def untouched(bare: Path) -> Iterator[None]:
    """Nothing is written where muster is installed, which may be read-only."""
    package = next(bare.glob("lib/python*/site-packages/muster"))
    paths = (package, *package.rglob("*/"))
    for path in paths:
        path.chmod(0o555)
    before = files_of(package)
    yield
    for path in paths:
        path.chmod(0o755)
    assert files_of(package) == before


def files_of(package: Path) -> set[Path]:
    """Python itself writes what it has compiled, where it may: root may everywhere."""
    return {path for path in package.rglob("*") if "__pycache__" not in path.parts}


def muster(bare: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(bare / "bin/muster"), *words],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_sdist_has_what_the_wheel_has(built: Path) -> None:
    wheel = set(zipfile.ZipFile(*built.glob("*.whl")).namelist())
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    ours = {name for name in wheel if ".dist-info/" not in name}
    assert {f"src/{name}" for name in ours} <= names
    assert {"muster/py.typed", "muster_recipes/py.typed", "muster/web/static/app.js"} <= ours
    assert {"LICENSE", "README.md", "CITATION.cff", "Makefile", "tests/conftest.py"} <= names


def test_functions_and_commands_are_swept_without_torch(bare: Path, place: Path) -> None:
    done = muster(bare, place, "sweep", "work.py:square", "--grid", "x=2,3", "--devices", "cpu:1",
                  "--run-dir", "r")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((place / "r/results.csv").read_text().splitlines()))
    assert [row["y"] for row in rows] == ["4", "9"]
    done = muster(bare, place, "sweep", "--grid", "x=2", "--devices", "cpu:1", "--run-dir", "c",
                  "--", "echo", "{x}")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_records_are_mapped_without_torch(bare: Path, place: Path) -> None:
    done = muster(bare, place, "map", "work.py:upper", "--input", "words.jsonl", "--output",
                  "out.jsonl", "--devices", "cpu:1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in (place / "out.jsonl").read_text().splitlines()]
    assert texts == ["ONE", "TWO"]


def test_what_needs_torch_says_so_in_one_way(bare: Path, place: Path) -> None:
    (place / "needs.py").write_text("import torch\n\ndef f(x: int):\n    return {'y': x}\n")
    hint = "Hint: pip install 'muster-gpu[torch]'"
    for words in (("train", "digits"), ("run", "work.py")):
        done = muster(bare, place, *words, "--devices", "cpu:1")
        assert done.returncode == 3, done
        assert "needs the package torch, which is not installed." in done.stderr
        assert hint in done.stderr
        assert not (place / "runs").exists()
    done = muster(bare, place, "sweep", "needs.py:f", "--grid", "x=1", "--devices", "cpu:1")
    assert done.returncode == 2 and hint in done.stderr, done


def test_the_environment_that_has_torch_is_named(bare: Path, place: Path) -> None:
    (place / "needs.py").write_text("import torch\n\ndef f(x: int):\n    return {'y': x}\n")
    package = place / ".venv/lib/python3.11/site-packages/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (place / "below").mkdir()
    done = muster(bare, place, "sweep", "needs.py:f", "--grid", "x=1", "--devices", "cpu:1")
    assert "or name the Python that has torch: --python .venv." in done.stderr, done
    done = muster(bare, place, "train", "digits", "--devices", "cpu:1")
    assert "or .venv/bin/pip install muster-gpu, and then .venv/bin/muster." in done.stderr
    done = muster(bare, place / "below", "train", "digits", "--devices", "cpu:1")
    assert f"or {place}/.venv/bin/pip install" in done.stderr


def test_the_machine_is_looked_at_without_torch(bare: Path, place: Path) -> None:
    done = muster(bare, place, "doctor", "--quick", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done
    (torch,) = [one for one in found["findings"] if one["check"] == "torch-build"]
    assert torch["severity"] == "note" and "muster-gpu[torch]" in torch["fix"]
    done = muster(bare, place, "monitor", "--duration", "0.1")
    assert done.returncode == 0, done
