"""One rule about changed code for runs of every kind: refused where there is work of other code."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.conftest import MusterCli

from muster.api.gangs.program import check_script, code_of_script
from muster.api.gangs.work import GangWork, Script
from muster.api.start.code_watch import CodeWatch
from muster.api.start.earlier_work import check_code
from muster.api.start.options import GangOptions, SweepOptions
from muster.base.errors import EXIT_USAGE, PlanMismatchError
from muster.farm.ledger.store import Ledger
from muster.farm.task import NewTask, TaskState
from muster.run.folder import RunFolder
from muster.run.record import Kind, new_record, write_run
from muster.run.session import open_run

OLD, NEW = MappingProxyType({"a.py": "1"}), {"a.py": "2"}


def _task_stopped(folder: RunFolder) -> None:
    _task_done(folder)
    with closing(sqlite3.connect(folder.ledger)) as database:
        database.execute("UPDATE tasks SET state = ?", (TaskState.STOPPED.value,))
        database.commit()


def _task_done(folder: RunFolder) -> None:
    ledger = Ledger(folder.ledger)
    ledger.begin()
    number = ledger.target_id("a.py:f")
    ledger.add_tasks([NewTask(b"k" * 16, number, b"{}")])
    ledger.commit()
    ledger.close()
    with closing(sqlite3.connect(folder.ledger)) as database:
        database.execute("UPDATE tasks SET state = ?", (TaskState.DONE.value,))
        database.execute("INSERT INTO results (task_id, token) VALUES (1, 0)")
        database.commit()


def _rows_written(folder: RunFolder) -> None:
    folder.parts.mkdir()


def _checkpoint(folder: RunFolder) -> None:
    (folder.checkpoints / "step-000000001").mkdir(parents=True)


def _rank_printed(folder: RunFolder) -> None:
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "rank-0.log").touch()


def _begun(path: Path, kind: Kind) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    options = SweepOptions() if kind in ("sweep", "map") else GangOptions()
    write_run(folder, new_record(folder, kind, options, spec={}, code=dict(OLD), argv=()))
    return folder


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("sweep", _task_done),
        ("sweep", _task_stopped),
        ("map", _rows_written),
        ("train", _checkpoint),
        ("agent", _checkpoint),
        ("run", _rank_printed),
    ],
)
def test_work_of_another_code_is_refused(
    tmp_path: Path, kind: Kind, work: Callable[[RunFolder], None]
) -> None:
    folder = _begun(tmp_path / "r", kind)
    check_code(folder, NEW, may_change=False)  # nothing is done yet, so nothing is mixed
    work(folder)
    with pytest.raises(PlanMismatchError) as refused:
        check_code(folder, NEW, may_change=False)
    assert f"The code has changed since the work in {folder.path} was done: a.py." in str(
        refused.value
    )
    assert refused.value.exit_code == EXIT_USAGE
    check_code(folder, OLD, may_change=False)
    check_code(folder, NEW, may_change=True)


def test_a_training_goes_by_its_newest_checkpoint(tmp_path: Path) -> None:
    """Its record is of the last start, which may have gone on with changed code and saved."""
    folder = _begun(tmp_path / "r", "train")
    for step, code in ((1, dict(OLD)), (2, NEW)):
        place = folder.checkpoints / f"step-{step:09}"
        place.mkdir(parents=True)
        (place / "extra.json").write_text(json.dumps({"code": code}))
    check_code(folder, NEW, may_change=False)
    with pytest.raises(PlanMismatchError):
        check_code(folder, OLD, may_change=False)


def test_an_element_has_the_code_of_its_array_from_the_first_start(tmp_path: Path) -> None:
    main = _begun(tmp_path / "r", "sweep")
    main.elements.mkdir()
    main.elements_json.write_text("{}")
    element = main.element(0)
    with pytest.raises(PlanMismatchError, match=f"the work in {main.path} was done"):
        check_code(element, NEW, may_change=False)
    check_code(element, OLD, may_change=False)
    check_code(element, NEW, may_change=True)


def test_a_file_that_changes_while_the_run_is_at_work_is_told_once(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    digest = sha256(b"x = 1\n").hexdigest()
    watch = CodeWatch({"a.py": digest, "b.py": digest, "gone.py": digest}, tmp_path)
    assert watch.news() == ""
    (tmp_path / "a.py").write_text("x = 2\n")
    (tmp_path / "b.py").touch()
    assert watch.news().startswith("a.py changed while the run was at work")
    assert watch.news() == ""
    (tmp_path / "b.py").unlink()  # an editor that puts it back
    assert watch.news() == ""
    (tmp_path / "b.py").write_text("x = 3\n")
    assert watch.news().startswith("b.py changed")


@pytest.mark.thorough
def test_a_sweep_whose_code_changes_says_that_both_may_be_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, muster_main: MusterCli
) -> None:
    """A script is read anew by every task: the table held results of both without a word."""
    monkeypatch.chdir(tmp_path)
    script = (
        "import pathlib\nprint('loss=1')\npathlib.Path(__file__).write_text('print(\"loss=2\")')\n"
    )
    Path("t.py").write_text(script)
    words = ("--grid", "x=1,2,3", "--metrics-from", r"stdout:loss=(?P<loss>\S+)")
    program = ("--devices", "cpu:1", "--run-dir", "r", "--", sys.executable, "t.py", "{x}")
    done = muster_main("sweep", *words, *program)
    assert done.returncode == 0
    assert "t.py changed while the run was at work." in done.stderr
    assert "for results of one code alone, begin anew with --restart" in done.stderr
    assert "put it back" not in done.stderr, "it has ended"
    assert "t.py changed while the run was at work." in muster_main("why", "r").stdout


#: What a folder ran before, what it is to run now, and what is told of it.
WORDS: dict[str, tuple[Script, Script, str]] = {
    "the same": (Script(path="a.py"), Script(path="a.py"), ""),
    "arguments": (
        Script(path="a.py", args=("one",)),
        Script(path="a.py", args=("--token", "abc", "a b")),
        "r has run `a.py one` before and runs `a.py --token … 'a b'` now: its logs hold both; "
        "another --run-dir, or --restart, keeps them apart.",
    ),
    "another program without code": (
        Script(path="echo", is_python=False),
        Script(path="true", is_python=False),
        "r has run `echo` before and runs `true` now: its logs hold both; "
        "another --run-dir, or --restart, keeps them apart.",
    ),
    "another script": (
        Script(path="a.py", args=("one",)),
        Script(path="b.py"),
        "r was made for another program: a.py one -> b.py.\nThe code has changed",
    ),
    "another module": (
        Script(path="a.py"),
        Script(path="b", is_module=True),
        "r was made for another program: a.py -> -m b.\nThe code has changed",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_other_words_in_the_folder_of_a_program_are_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arguments may be how a program goes on from what it has saved; of another one the
    output would be mixed with that of the first."""
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("1")
    Path("b.py").write_text("2")
    before, now, told = WORDS[case]
    folder = RunFolder(Path("r"))
    work = GangWork(folder=folder, program=before, code=code_of_script(before))
    with open_run(folder, work.renewal(GangOptions(), ())):
        assert check_script(folder, now, GangOptions()) == ""  # nothing has printed anything yet
        _rank_printed(folder)
    assert check_script(folder, now, GangOptions(restart=True)) == ""
    if "\n" in told:
        with pytest.raises(PlanMismatchError) as refused:
            check_script(folder, now, GangOptions())
        assert str(refused.value).startswith(told)
        told = check_script(folder, now, GangOptions(allow_changed_code=True))
        assert told.startswith("r has run `a.py")
    else:
        assert check_script(folder, now, GangOptions()) == told
