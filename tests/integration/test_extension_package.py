"""The template of an extension: its wheel is built and installed without a network, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGE = """
from muster import generation


class Ask:
    concurrency = 8

    async def setup(self, device):
        self._lent = await generation.shared(generation.EngineSpec(engine="echo"), device)

    async def process_one(self, record):
        answer = await self._lent.engine.generate(generation.Request(prompt=record["text"]))
        return {**record, "answer": answer.text}

    async def close(self):
        await self._lent.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    place = tmp_path_factory.mktemp("extension")
    source = place / "source"  # the template is left as it is
    shutil.copytree(ROOT / "examples" / "extension", source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    pip += ["--no-index", "--no-compile", "--target", str(place / "packages")]
    subprocess.run([*pip, str(*place.glob("*.whl"))], check=True, capture_output=True)
    return place


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(installed / "packages"), *([before] if before else [])])
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def test_a_recipe_an_executor_and_a_tracker_work_in_one_sweep(
    installed: Path, tmp_path: Path
) -> None:
    done = run(installed, tmp_path, "-m", "muster", "sweep", "squares", "--widths", "2", "3",
               "--on", "counted", "--log-to", "lines", "--devices", "cpu:1",
               "--run-dir", "r")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "r/sent.txt").read_text() == "task\n" * 2
    assert "3,9.0" in (tmp_path / "r/table.csv").read_text()
    files = list((tmp_path / "r/trackers/lines").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sum(line.get("name") == "width" for line in lines) == 6
    assert [line["state"] for line in lines if "state" in line] == ["done"] * 2


def test_an_engine_answers_in_a_map(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(STAGE)
    (tmp_path / "in.jsonl").write_text('{"text": "one two"}\n')
    done = run(installed, tmp_path, "-m", "muster", "map", "ask.py:Ask", "--input", "in.jsonl",
               "--output", "out.jsonl", "--devices", "cpu:1")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["answer"] == "ONE TWO"


def test_the_doctor_lists_them_and_runs_the_check(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "muster", "doctor", "--quick", "--json")
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["extensions"]["what"] == (
        "muster-example 0.1.0 adds: recipe squares, executor counted, check scratch, "
        "tracker lines, engine echo."
    )
    assert "MiB are free where runs are written" in found["muster-example:scratch"]["what"]


def test_its_own_tests_pass(installed: Path) -> None:
    done = run(installed, installed / "source", "-m", "pytest", "-q", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
