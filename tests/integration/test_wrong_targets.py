"""What is typed first and does not work, and the line that does, with the user's own parameters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MusterMain = Callable[..., subprocess.CompletedProcess[str]]

SOURCE = """
import sys

class MyTask:
    pass

class Other:
    pass

def helper(x: int):
    return x

if __name__ == "__main__":
    print(sys.argv)
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prog.py").write_text(SOURCE)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("prog.py", "--grid", "lr=1,2", "--seeds", "3"),
            "muster sweep --grid lr=1,2 --seeds 3 -- python prog.py --lr {lr} --seed {seed}",
        ),
        (
            ("--grid", "lr=1,2", "prog.py"),
            "muster sweep --grid lr=1,2 -- python prog.py --lr {lr}",
        ),
        (
            ("python", "prog.py", "--grid=lr=1,2", "--devices", "cpu:1"),
            "muster sweep --grid=lr=1,2 --devices cpu:1 -- python prog.py --lr {lr}",
        ),
        (
            ("python", "prog.py", "-v", "--lr", "{lr}", "--grid", "lr=1,2", "model.width=8,9"),
            "muster sweep --grid lr=1,2 model.width=8,9 -- python prog.py -v --lr {lr} "
            "model.width={model.width}",
        ),
        (
            ("python prog.py", "--zip", "a=1,2"),
            "muster sweep --zip a=1,2 -- python prog.py --a {a}",
        ),
        (
            ("--grid", "lr=1,2", "--", "python prog.py --lr {lr}"),
            "-- python prog.py --lr {lr}",
        ),
    ],
)
def test_a_program_leads_to_the_line_that_sweeps_it(
    muster_main: MusterMain, words: tuple[str, ...], line: str
) -> None:
    done = muster_main("sweep", *words)
    assert done.returncode == 2
    assert line in done.stderr


def test_the_line_that_was_proposed_is_a_sweep(muster_main: MusterMain) -> None:
    done = muster_main("sweep", "prog.py", "--grid", "lr=1,2", "--devices", "cpu:1", "--dry-run")
    [line] = [text for text in done.stderr.splitlines() if "write muster" in text]
    words = line.partition("write muster ")[2].split()
    shown = muster_main(*words)
    assert shown.returncode == 0, shown.stderr
    assert "2, the first" in shown.stdout


def test_a_file_of_tasks_lists_its_classes(muster_main: MusterMain) -> None:
    missing = muster_main("train", "prog.py", "--dry-run")
    assert "names no class" in missing.stderr
    assert "write prog.py:MyTask; classes there: MyTask, Other." in missing.stderr
    typo = muster_main("train", "prog.py:MyTsk", "--dry-run")
    assert "has no class 'MyTsk'" in typo.stderr
    assert "did you mean 'MyTask'? classes there: MyTask, Other." in typo.stderr


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (("train", "digits", "--learning-rate", "0.1"), "--lr"),
        (("train", "digits", "--max_epochs=3"), "--epochs"),
        (("train", "digits", "--output-dir", "x"), "--run-dir"),
        (("sweep", "prog.py:helper", "--output-dir", "x"), "--run-dir"),
    ],
)
def test_names_of_other_programs_lead_to_ours(
    muster_main: MusterMain, words: tuple[str, ...], ours: str
) -> None:
    done = muster_main(*words, "--dry-run")
    assert done.returncode == 2
    assert f"did you mean {ours}?" in done.stderr


def test_what_goes_into_files_is_said_before_the_work(
    muster_main: MusterMain, tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(
        "import torch\n"
        "def f(x: int) -> dict[str, torch.Tensor]:\n    return {}\n"
        "def g(x: int) -> float:\n    return 1.0\n"
        "def h(x: int):\n    yield 1\n"
    )
    dry = ("--grid", "x=1", "--devices", "cpu:1", "--dry-run")
    said = muster_main("sweep", "t.py:f", *dry).stdout
    assert "any other Tensor is saved as a pickled file" in said
    assert "note" not in muster_main("sweep", "t.py:g", *dry).stdout
    refused = muster_main("sweep", "t.py:h", *dry)
    assert refused.returncode == 2
    assert "h has a yield in it" in refused.stderr


def test_a_sweep_without_numbers_says_how_to_hand_them_over(
    muster_main: MusterMain, tmp_path: Path
) -> None:
    command = ("sweep", "--grid", "x=1", "--devices", "cpu:1", "--", "python", "prog.py", "{x}")
    done = muster_main(*command)
    assert done.returncode == 0, done.stderr
    assert '"$MUSTER_TASK_DIR/result.json"' in done.stdout
    assert "MUSTER_TASK_DIR" in muster_main("sweep", "--help").stdout
    function = muster_main("sweep", "prog.py:helper", "--grid", "x=1", "--devices", "cpu:1")
    assert "No task" not in function.stdout


def test_files_that_are_called_as_modules_are_do_not_keep_workers_from_starting(
    muster_main: MusterMain, tmp_path: Path
) -> None:
    for name in ("types.py", "queue.py", "logging.py", "muster.py"):
        (tmp_path / name).write_text('raise RuntimeError("not that one")\n')
    (tmp_path / "beside.py").write_text("FACTOR = 3\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.py").write_text(
        "import beside\ndef f(x: int):\n    return {'y': beside.FACTOR * x}\n"
    )
    words = ("--grid", "x=2", "--devices", "cpu:1", "--run-dir", "r")
    done = muster_main("sweep", "sub/t.py:f", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "results.csv").read_text().splitlines()[1].startswith("2,6,")
