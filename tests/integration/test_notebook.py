"""Muster in a notebook: a kernel runs its cells, and workers what they define."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.slurm_cluster import SlurmCluster

pytest.importorskip("ipykernel", reason="ipykernel is not installed: make setup")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make setup")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: make setup")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are of this Python, and leave nothing in the home folder."""
    specs = tmp_path / "jupyter" / "kernels" / "python3"
    specs.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (specs / "kernel.json").write_text(json.dumps(spec))
    for name, folder in (
        ("JUPYTER_PATH", "jupyter"), ("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython"),
        ("JUPYTER_CONFIG_DIR", "config"), ("JUPYTER_DATA_DIR", "data"),
    ):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / folder))


def run(notebook: Any, place: Path, **options: Any) -> None:
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(place)}},
        **options,
    ).execute()  # fmt: skip


def of_cells(*texts: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])


def said(notebook: Any, number: int) -> str:
    """What the cell printed, its result, and the text of what it displayed."""
    texts = []
    for output in notebook.cells[number].outputs:
        texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)


def test_the_example_runs_whole_and_is_kept_without_its_outputs(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    run(notebook, tmp_path)
    texts = {cell.source: number for number, cell in enumerate(notebook.cells)}
    (edited,) = [number for text, number in texts.items() if "PlanMismatchError" in text]
    assert "The code has changed" in said(notebook, edited)
    assert "cells/measure/notebook_cell.py" in said(notebook, edited)
    (mapped,) = [number for text, number in texts.items() if "class Shout" in text]
    assert "ONE!!" in said(notebook, mapped) and "TWO" not in said(notebook, mapped)
    (trained,) = [number for text, number in texts.items() if "class Line" in text]
    assert said(notebook, trained).splitlines()[-1] == "0"


FAILS = """
import muster


def fails(x: int):
    raise ValueError("why it failed")


run = muster.sweep(fails, grid={"x": [1, 2]}, devices="cpu:1", run_dir="f")
print(run.failures()[0].message)
"""


def test_a_cell_says_where_the_causes_of_failures_are(tmp_path: Path) -> None:
    notebook = of_cells(FAILS)
    run(notebook, tmp_path)
    assert "why it failed" in said(notebook, 0)
    shown = [out.data["text/html"] for out in notebook.cells[0].outputs if "data" in out]
    assert "2 failed: failures() of the run has the causes" in shown[-1]


SLOW = """
import json, os, pathlib, time
import muster

json.CUDA_IS_INITIALISED = True

pathlib.Path("kernel").write_text(str(os.getpid()))


def slow(x: int) -> dict[str, object]:
    pathlib.Path(FOLDER, f"began{x}").touch()
    while x == 1 and not pathlib.Path(FOLDER, "go").exists():
        time.sleep(0.01)
    return {"y": x, "is_fork": hasattr(json, "CUDA_IS_INITIALISED")}
"""
SWEEP = """
run = muster.sweep(slow, grid={"x": list(range(4))}, devices="cpu:1", run_dir="r")
print("code", run.exit_code, "rows", run.results()["y"].to_pylist())
print("forks", set(run.results()["is_fork"].to_pylist()))
"""


def test_the_stop_button_drains_and_the_cell_again_goes_on(tmp_path: Path) -> None:
    """CUDA is pretended by a mark in a module: a worker that was forked from the kernel, where CUDA
    has been used and cannot be used any more, would have the mark."""
    keep = "import shutil\nshutil.copytree('r', 'copied')\n"
    notebook = of_cells(f"FOLDER = {str(tmp_path)!r}\n{SLOW}", SWEEP, keep + SWEEP)
    pressed: list[float] = []

    def press() -> None:
        until_s = time.monotonic() + 120
        while not (tmp_path / "began1").exists() and time.monotonic() < until_s:
            time.sleep(0.02)
        os.kill(int((tmp_path / "kernel").read_text()), signal.SIGINT)
        pressed.append(time.monotonic())
        journal = tmp_path / "r" / "events.jsonl"
        while '"event": "wish"' not in journal.read_text() and time.monotonic() < until_s:
            time.sleep(0.02)  # until it drains
        (tmp_path / "go").touch()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        run(notebook, tmp_path)
    finally:
        thread.join()
    assert pressed
    assert "code 130" in said(notebook, 1)
    assert "stopped: what is finished is saved; run this cell again to go on" in said(notebook, 1)
    assert (tmp_path / "began1").exists()
    assert "code 0 rows [0, 1, 2, 3]" in said(notebook, 2)
    assert "forks {False}" in said(notebook, 2)
    assert "4/4 (100 %), 4 done" in said(notebook, 2)
    (shown,) = [one for one in notebook.cells[2].outputs if one.output_type == "display_data"]
    assert '<progress max="4" value="4">' in shown["data"]["text/html"]
    assert "<script" not in shown["data"]["text/html"]
    # What the run needs is in its folder: a copy goes on elsewhere without the kernel.
    (tmp_path / "r").rename(tmp_path / "gone")
    words = [sys.executable, "-m", "muster", "resume", "copied"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 done" in done.stdout, done


ON_SLURM = """
import muster
from muster import ClusterRequest

SCALE = 3


class Line:
    def at(self, x):
        return SCALE * x


def measure(x: int):
    return {"y": Line().at(x)}


made = muster.sweep(measure, grid={"x": [1, 2, 3]}, run_dir="r", executor="slurm",
                    cluster=ClusterRequest(num_workers=2))
print("code", made.exit_code, sorted(made.results()["y"].to_pylist()))
"""


@pytest.mark.slurm
@pytest.mark.thorough
def test_a_cell_on_slurm(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    notebook = of_cells(ON_SLURM)
    run(notebook, tmp_path)
    assert "code 0 [3, 6, 9]" in said(notebook, 0), said(notebook, 0)
    first = (tmp_path / "r" / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["workers"] == ["slurm/0", "slurm/1"]


MAGIC = """
def listing(x: int):
    files = !ls
    return {"files": len(files)}


def timed(x: int):
    %time y = x
    return {"y": y}


for one in (listing, timed):
    try:
        muster.sweep(one, grid={"x": [1]}, devices="cpu:1")
    except muster.TargetError as error:
        print(error)
"""


def test_magics_are_refused(tmp_path: Path) -> None:
    notebook = of_cells("import muster", MAGIC)
    run(notebook, tmp_path)
    for name in ("listing", "timed"):
        assert f"Cannot use {name} of this session: it has a %magic, a !command" in said(
            notebook, 1
        )
    assert not (tmp_path / "runs").exists()
