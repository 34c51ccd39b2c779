"""An executor of the user's that cannot be one is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

import muster
from muster.cli.main import main

METHODS = """
    def start(self, worker_id, slot): ...
    def send(self, worker_id, tasks, *, together): ...
    def share(self, worker_id, task_id, others): ...
    def stop_task(self, worker_id, task_id, *, pauses): ...
    def revoke(self, worker_id): ...
    def confirm(self, worker_id, serial): ...
    def end(self, worker_id, *, kill): ...
    def poll(self, timeout_s): ...
    def close(self): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work.py").write_text("def square(x: int) -> float:\n    return float(x * x)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "class Mine: pass",
            "has no method start, send, share, stop_task, revoke, confirm, end, poll, close.",
        ),
        ("def Mine(assignment): pass", "is not a class"),
        ("Mine = 3", "is not a class"),
        ("class Other: pass", "has no class 'Mine'"),
        (f"class Mine:\n    def __init__(self): pass\n{METHODS}", "cannot be made with an Assign"),
        (f"class Mine:{METHODS}".replace("def poll", "def pull"), "has no method poll."),
        ("import nowhere_to_be_found", "Importing loud.py failed"),
    ],
)
def test_it_is_refused(
    text: str, told: str, flags: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "loud.py").write_text(text)
    line = ["sweep", "work.py:square", "--grid", "x=1", "--on", "loud.py:Mine", "--run-dir", "out"]
    assert main([*line, *flags]) == 2
    said = capsys.readouterr().err
    assert told in said and "loud.py" in said
    assert not (here / "out").exists()


def test_one_that_fails_when_it_is_made_is_named(here: Path) -> None:
    init = "    def __init__(self, assignment):\n        raise KeyError('HOST')\n"
    (here / "loud.py").write_text(f"class Mine:\n{init}{METHODS}")
    with pytest.raises(muster.TargetError, match=r"loud.py:Mine.*KeyError: 'HOST' .*loud.py:3"):
        muster.sweep("work.py:square", grid={"x": [1]}, executor="loud.py:Mine", run_dir="out")


def test_one_that_hands_on_what_it_does_not_do_itself_is_taken(here: Path) -> None:
    (here / "counted.py").write_text(
        "from muster.executors import make_executor\n\n"
        "class Counted:\n"
        "    def __init__(self, assignment):\n"
        "        self._local = make_executor('local', assignment)\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self._local, name)\n"
    )
    line = ["sweep", "work.py:square", "--grid", "x=1", "--on", "counted.py:Counted", "--dry-run"]
    assert main([*line, "--devices", "cpu:1", "--run-dir", "out"]) == 0


def test_one_of_a_package_that_cannot_be_imported_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = here / "torn-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[muster.executors]\ntorn = torn_away:Mine\n")
    assert main(["sweep", "work.py:square", "--grid", "x=1", "--on", "torn", "--dry-run"]) == 2
    assert (
        "The executor torn of torn cannot be loaded from torn_away:Mine" in capsys.readouterr().err
    )
