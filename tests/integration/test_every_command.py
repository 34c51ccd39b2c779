"""Every command on every kind of run folder in every state: it does the right thing, or refuses
with a sentence and changes nothing. The commands come from the table of commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest
from tests.json_schemas import check_printed, schemas
from tests.programs import slow_task

import muster
from muster.api.gangs.work import GangWork, Script
from muster.api.start.options import GangOptions
from muster.cli import help_page
from muster.cli.main import COMMANDS, main
from muster.cli.options import Option
from muster.run.folder import RunFolder
from muster.run.requests import Mailbox
from muster.run.session import hold, open_run

Main = Callable[..., CompletedProcess[str]]

#: Commands that do not take a run, or only start one: other tests are about them.
STARTERS = {
    "sweep", "run", "map", "train", "verify", "launch", "slurm-script", "doctor", "devices",
    "queue", "track", "web", "completion", "start", "init", "mcp", "hosts",
}  # fmt: skip
#: Commands that only look; they leave the folder as it is. What they are given besides the run.
LOOKERS: dict[str, tuple[str, ...]] = {
    "status": (),
    "attach": (),
    "wait": ("--timeout", "1s"),
    "why": (),
    "list": (),
    "best": (),
    "logs": ("1",),
    "errors": (),
    "export": ("--to", "table.csv"),
    "metrics": (),
    "report": ("--out", "page"),
    "plan": (),
    "monitor": (),
    "collect": (),
}
#: Commands that change a run, where there is something to change.
CHANGERS = {"cancel", "retry", "resume", "add"}

KINDS = ("sweep", "element", "map", "train", "fit", "agent", "run")
FARMS = ("sweep", "element", "map")


def test_no_command_is_missing_here() -> None:
    assert set(COMMANDS) == STARTERS | LOOKERS.keys() | CHANGERS


# ---------------------------------------------------------------------- the folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of every kind: what costs little is run, the others are written as if."""
    place = tmp_path_factory.mktemp("kinds")
    (place / "f.py").write_text(
        "def f(x: int) -> dict:\n    print('hello', x)\n"
        "    if x == 3:\n        raise ValueError('no 3')\n    return {'y': 2 * x}\n"
    )
    (place / "s.py").write_text(
        "def stage(r):\n    print('record', r['a'])\n    return {**r, 'b': r['a'] + 1}\n"
    )
    (place / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (place / "t.py").write_text(slow_task(0.0))
    before = Path.cwd()
    os.chdir(place)
    try:
        flags = ("--devices", "cpu:1", "--quiet", "--monitor-interval", "0", "--run-dir")
        main(["sweep", *flags, "runs/sweep", "f.py:f", "--grid", "x=1,2,3"])
        main(["sweep", *flags, "runs/element", "f.py:f", "--grid", "x=1,2,3", "--part", "0/1"])
        main(
            ["map", *flags, "runs/map", "s.py:stage", "--input", "in.jsonl", "--output", "o.jsonl"]
        )
        muster.fit("t.py:Slow", devices="cpu", run_dir="runs/fit", epochs=2, say=lambda _: None)
        for name, kind in (("train", "train"), ("agent", "agent")):
            shutil.copytree("runs/fit", f"runs/{name}")
            record = json.loads(Path(f"runs/{name}/run.json").read_bytes())
            record |= {"name": name, "kind": kind, "argv": ["muster", "train", "t.py:Slow"]}
            Path(f"runs/{name}/run.json").write_text(json.dumps(record))
        _write_program_run(RunFolder(Path("runs/run")))
    finally:
        os.chdir(before)
    return place


def _write_program_run(folder: RunFolder) -> None:
    argv = ("muster", "run", "p.py")
    renew = GangWork(folder=folder, program=Script(path="p.py")).renewal(GangOptions(), argv)
    with open_run(folder, renew, node=0) as session:
        session.begin(ranks=["cpu:0", "cpu:1"])
        session.end(exit_code=0)
    for rank in (0, 1):
        folder.rank_log(rank).write_text(f"hello from {rank}\n")


def not_begun(path: Path) -> None:
    """Written down and nothing else: refused at its start, or killed right after."""
    for entry in path.iterdir():
        if entry.name != "run.json":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def handed_in(path: Path) -> None:
    """Written down for SLURM, a gang as a job and a sweep as an array, and nothing has begun."""
    if json.loads((path / "run.json").read_bytes())["kind"] == "sweep":
        stopped(path)
        (path / "elements").mkdir()
        (path / "elements" / "array.json").write_text('{"elements": 2, "share": "s", "job_id": 7}')
        return
    not_begun(path)
    (path / "slurm").mkdir()
    (path / "slurm" / "job.json").write_text('{"job_id": "7", "script": ""}')


def stopped(path: Path) -> None:
    """Killed in the middle."""
    for name in ("training_results.json", "published.json"):
        (path / name).unlink(missing_ok=True)
    if (path / "ledger.sqlite").exists():
        _sql(path, "DELETE FROM results", "UPDATE tasks SET state = 0 WHERE state <> 0")
    else:
        lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
        (path / "events.jsonl").write_text("".join(line for line in lines if "start" in line))


def half_listed(path: Path) -> None:
    """Killed before all tasks were listed; of ranks: before the first step."""
    stopped(path)
    if (path / "ledger.sqlite").exists():
        _sql(
            path, "DELETE FROM meta WHERE name = 'enqueued'", "DELETE FROM tasks WHERE task_id > 1"
        )
    (path / "metrics.jsonl").unlink(missing_ok=True)


def _sql(path: Path, *commands: str) -> None:
    database = sqlite3.connect(path / "ledger.sqlite")
    for command in commands:
        database.execute(command)
    database.commit()
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()


def copied_while_running(path: Path) -> None:
    """A copy brings along who worked on the original, what it was asked and its last picture."""
    stopped(path)
    (path / "run.lock").touch()
    (path / "run.pid").write_text(f"{os.getpid()} {socket.gethostname()}")
    (path / "requests").mkdir(exist_ok=True)
    (path / "requests" / "session").write_text("0123abc")
    (path / "requests" / "cancel-0123abc").write_text("cancel")
    (path / "status.json").write_text(json.dumps({"num_running": 1, "workers": [], "step": 1}))
    (path / "identity.json").write_text(json.dumps({"id": "ab12", "inodes": [1, 2]}))


STATES: dict[str, Callable[[Path], None]] = {
    "finished": lambda path: None,
    "copied while running": copied_while_running,
    "not begun": not_begun,
    "handed in": handed_in,
    "stopped": stopped,
    "half listed": half_listed,
    "empty run.json": lambda path: (path / "run.json").write_text("") and None,
    "odd run.json": lambda path: (path / "run.json").write_text('{"run_id": []}') and None,
    "null run.json": lambda path: (path / "run.json").write_text("null") and None,
    "no run.json": lambda path: (path / "run.json").unlink(),
    "odd journal": lambda path: (path / "events.jsonl").write_text("[]\n3\n{") and None,
    "odd results": lambda path: (path / "training_results.json").write_text("[1]") and None,
    "odd picture": lambda path: (path / "status.json").write_text('["x"]') and None,
    "empty ledger": lambda path: _damage(path, 0),
    "cut ledger": lambda path: _damage(path, 9000),
}


def _damage(path: Path, size: int) -> None:
    if (path / "ledger.sqlite").exists():
        for beside in path.glob("ledger.sqlite-*"):
            beside.unlink()
        os.truncate(path / "ledger.sqlite", size)


def copy_of(finished: Path, kind: str, state: str, place: Path) -> Path:
    """The folder ``runs/it``; of an element its own below that of its array."""
    for name in ("f.py", "s.py", "t.py", "in.jsonl"):
        shutil.copy(finished / name, place / name)
    run = place / "runs" / "it"
    if kind == "element":
        shutil.copytree(finished / "runs" / "sweep", run)
        record = {"elements": 1, "share": '--part "$SLURM_ARRAY_TASK_ID/1"', "job_id": None}
        (run / "elements").mkdir()
        (run / "elements" / "array.json").write_text(json.dumps(record))
        run = run / "elements" / "0"
    shutil.copytree(finished / "runs" / kind, run)
    STATES[state](run)
    return run


def tree(path: Path) -> dict[str, str]:
    """Names and contents; SQLite's side files of a reader hold nothing of the run's."""
    return {
        str(entry.relative_to(path)): hashlib.sha256(entry.read_bytes()).hexdigest()
        for entry in sorted(path.rglob("*"))
        if entry.is_file() and not entry.name.endswith(("-shm", "-wal"))
    }


def check_answer(done: CompletedProcess[str]) -> None:
    """Good, or a sentence or two with what to do next."""
    assert done.returncode in (0, 1, 2, 3), done
    if done.returncode >= 2:
        assert done.stderr.startswith("muster: "), done.stderr
        assert done.stderr.count("\n") <= 6, done.stderr
    assert "Traceback (most recent" not in done.stderr


# ---------------------------------------------------------------------- looking

#: Those that differ for every kind; the others are damage, which the same readers meet.
_QUICK = (
    "finished",
    "not begun",
    "handed in",
    "half listed",
    "copied while running",
    "odd run.json",
)


@pytest.mark.parametrize(
    "state",
    [pytest.param(s, marks=[] if s in _QUICK else [pytest.mark.thorough]) for s in STATES],
)
@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_answers_and_changes_nothing(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    before = tree(run)
    for command, words in LOOKERS.items():
        if command == "report" and state not in ("not begun", "odd journal", "empty run.json"):
            continue  # it draws, which takes seconds; it has tests of its own
        if command == "collect" and state == "handed in":
            continue  # of an array it renews the table
        done = muster_main(command, *(() if command == "list" else (str(run),)), *words)
        if command == "wait" and done.returncode == 124:
            assert "SLURM does not answer: " in done.stderr, "else it knows that it is over"
        else:
            check_answer(done)
        assert tree(run) == before, command


#: What `status` and `list` call it; None: damaged, in which case `status` refuses.
WORDS = {
    "finished": {**dict.fromkeys(KINDS, "done"), "sweep": "failed", "element": "failed"},
    "copied while running": dict.fromkeys(KINDS, "stopped"),
    "not begun": dict.fromkeys(KINDS, "not begun"),
    "handed in": {
        **dict.fromkeys(KINDS, "not begun"),
        "sweep": "not collected",
        "element": "not collected",
    },
    "stopped": dict.fromkeys(KINDS, "stopped"),
    "half listed": dict.fromkeys(KINDS, "stopped"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", WORDS)
def test_one_word_for_how_it_stands(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    status = json.loads(muster_main("status", str(run), "--json").stdout)
    (listed,) = json.loads(muster_main("list", "--json", "--root", str(run.parent)).stdout)
    assert status["state"] == listed["state"] == WORDS[state][kind]
    assert muster_main("status", str(run)).stdout.startswith(f"{run.name}: {WORDS[state][kind]}\n")
    if state == "finished":
        done = {"sweep": (2, 3), "element": (2, 3), "map": (1, 1), "run": (None, None)}.get(
            kind, (4, 4)
        )
        assert (status["num_done"], status["num_total"]) == done
    elif state == "half listed" and kind in FARMS:
        assert status["num_total"] == {"map": 1}.get(kind, 3)  # as planned, not as listed


def test_a_damaged_run_does_not_hide_the_others(
    finished: Path, muster_main: Main, tmp_path: Path
) -> None:
    for number, state in enumerate(STATES):
        shutil.copytree(finished / "runs" / "sweep", tmp_path / "runs" / f"r{number}")
        STATES[state](tmp_path / "runs" / f"r{number}")
    done = muster_main("list")
    assert done.returncode == 0
    assert done.stdout.count("damaged") == 5
    assert len(done.stdout.splitlines()) == len(STATES)  # a line of names, and one has no run.json


def test_what_ranks_printed_and_measured(finished: Path, muster_main: Main, tmp_path: Path) -> None:
    copy_of(finished, "train", "finished", tmp_path)
    assert "rows in m.csv" in muster_main("export", "runs/it", "--to", "m.csv").stdout
    assert (tmp_path / "m.csv").read_text().startswith('"kind","step"')
    other = tmp_path / "b"
    other.mkdir()
    run = copy_of(finished, "run", "finished", other)
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "start", "node": 0}) + "\n")
        report = ["rank 1 of 2 was killed by SIGKILL (9)"]
        end = {"event": "end", "node": 0, "exit_code": 1, "report": report}
        events.write(json.dumps(end) + "\n")
    assert "hello from 1" in muster_main("logs", str(run)).stdout  # the one that failed
    assert "hello from 0" in muster_main("logs", str(run), "0").stdout
    assert "no rank '7'" in muster_main("logs", str(run), "7").stderr
    assert report[0] in muster_main("errors", str(run)).stdout
    assert "has no table" in muster_main("export", str(run), "--to", "m.csv").stderr


def test_failed_tasks_are_named_by_their_parameters(
    finished: Path, muster_main: Main, tmp_path: Path
) -> None:
    copy_of(finished, "sweep", "finished", tmp_path)
    errors = muster_main("errors", "runs/it").stdout
    assert "3 (x=3)" in errors and "muster logs runs/it 3" in errors
    assert "hello 3" in muster_main("logs", "runs/it", "3").stdout
    assert "Failed: 3 (x=3)" in muster_main("logs", "runs/it").stderr


@pytest.mark.parametrize("target", ["nowhere/t.csv", "t.xlsx", "runs"])
def test_an_export_that_cannot_be_written(
    finished: Path, muster_main: Main, tmp_path: Path, target: str
) -> None:
    copy_of(finished, "sweep", "finished", tmp_path)
    done = muster_main("export", "runs/it", "--to", target)
    assert done.returncode in (2, 3) and target in done.stderr


# ---------------------------------------------------------------------- changing


@contextmanager
def at_work(run: Path, heard: list[bool]) -> Iterator[None]:
    """As if a process worked on the run; it notes in ``heard`` that it was asked to end."""
    over = threading.Event()

    def listen(mailbox: Mailbox) -> None:
        while not over.wait(0.02):
            if mailbox.is_cancelled():
                heard.append(True)

    with ExitStack() as stack:
        stack.enter_context(hold(RunFolder(run)))
        mailbox = stack.enter_context(Mailbox(RunFolder(run)))
        thread = threading.Thread(target=listen, args=(mailbox,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancel_reaches_who_works_on_it_and_nobody_later(
    finished: Path, kind: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, "stopped", tmp_path)
    heard: list[bool] = []
    with at_work(run, heard):
        assert muster_main("status", str(run)).stdout.startswith(f"{run.name}: running\n")
        done = muster_main("cancel", str(run))
        assert done.returncode == 0 and "asked its" in done.stdout
    assert heard == [True]
    (run / "requests" / "cancel-0123").write_text("cancel")  # for a session that has ended
    with at_work(run, heard):
        pass
    assert heard == [True]
    assert not list((run / "requests").iterdir())
    assert (run / "ledger.sqlite").exists() == (kind in FARMS)


@pytest.mark.parametrize(
    "state", ["finished", "not begun", "handed in", "odd run.json", "empty run.json"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_left_to_cancel_nothing_changes(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    before = tree(run)
    done = muster_main("cancel", str(run))
    check_answer(done)
    assert "nothing to cancel" in done.stdout or done.returncode == 3
    assert tree(run) == before


def test_cancel_of_an_array_asks_its_elements(
    finished: Path, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, "sweep", "stopped", tmp_path)
    for number in ("0", "1"):
        shutil.copytree(finished / "runs" / "sweep", run / "elements" / number)
    record = {"elements": 2, "share": "", "job_id": None}
    (run / "elements" / "array.json").write_text(json.dumps(record))
    heard: list[bool] = []
    with at_work(run / "elements" / "1", heard):
        assert "asked the elements at work" in muster_main("cancel", "runs/it").stdout
    assert heard == [True]
    before = tree(run)
    assert "it is not collected" in muster_main("cancel", "runs/it").stdout
    assert tree(run) == before


@pytest.mark.parametrize("state", ["stopped", "copied while running"])
@pytest.mark.parametrize("kind", FARMS)
def test_open_tasks_of_a_stopped_run_are_cancelled(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    """Of a copy its own: the process that works on the original is not asked."""
    run = copy_of(finished, kind, state, tmp_path)
    assert "cancelled what had not ended" in muster_main("cancel", str(run)).stdout
    assert json.loads(muster_main("status", str(run), "--json").stdout)["state"] == "cancelled"


def test_a_cancelled_map_goes_on(finished: Path, muster_main: Main, tmp_path: Path) -> None:
    run = copy_of(finished, "map", "stopped", tmp_path)
    assert "cancelled what had not ended" in muster_main("cancel", "runs/it").stdout
    done = muster_main("resume", str(run), "--overwrite")  # where the run was begun
    assert done.returncode == 0, done.stderr
    assert muster_main("status", str(run)).stdout.startswith("it: done\n")
    assert (run / "published.json").exists()
    assert len((finished / "o.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("kind", ["train", "agent"])
def test_what_was_ended_before_its_first_save_is_not_called_saved(
    finished: Path, kind: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, "stopped", tmp_path)
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "end", "node": 0, "exit_code": 75}) + "\n")
    assert list((run / "checkpoints").glob("step-*"))
    said = muster_main("status", "runs/it").stdout
    assert said.startswith("it: saved\n") and "go on: muster resume runs/it" in said
    shutil.rmtree(run / "checkpoints")
    (run / "ending.json").unlink(missing_ok=True)
    said = muster_main("status", "runs/it").stdout
    assert said.startswith("it: stopped\n")
    assert "nothing is saved; begin again: muster resume runs/it" in said


@pytest.mark.parametrize("state", ["finished", "stopped", "odd run.json"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("sweep", "element")])
def test_retry_is_for_sweeps(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    before = tree(run)
    done = muster_main("retry", "runs/it")
    assert done.returncode in (2, 3)
    check_answer(done)
    assert tree(run) == before


def test_a_retry_that_cannot_start_or_has_nothing_to_do_changes_nothing(
    finished: Path, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, "sweep", "finished", tmp_path)
    before = tree(run)
    refused = muster_main("retry", "--devices", "cpu:x", "runs/it")
    assert refused.returncode in (2, 3) and "cpu:x" in refused.stderr
    assert tree(run) == before
    stopped(run)
    before = tree(run)
    assert "nothing to run again" in muster_main("retry", "runs/it").stdout
    assert tree(run) == before


@pytest.mark.parametrize("state", ["finished", "stopped", "handed in", "odd run.json"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sweep"])
def test_tasks_are_added_to_sweeps(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    before = tree(run)
    done = muster_main("add", str(run), "--seeds", "3")
    assert done.returncode in (2, 3) and "Hint: " in done.stderr
    check_answer(done)
    assert tree(run) == before


@pytest.mark.parametrize("kind", ["fit", "run"])
@pytest.mark.parametrize("state", ["finished", "stopped", "not begun", "handed in"])
def test_what_cannot_be_resumed_says_what_to_do(
    finished: Path, kind: str, state: str, muster_main: Main, tmp_path: Path
) -> None:
    run = copy_of(finished, kind, state, tmp_path)
    before = tree(run)
    done = muster_main("resume", "runs/it")
    assert done.returncode == 2 and "Hint: " in done.stderr
    assert {"fit": "run_dir=", "run": "muster run p.py"}[kind] in done.stderr
    assert tree(run) == before


@pytest.mark.parametrize("kind", ["sweep", "element"])
def test_flags_may_stand_before_the_target_and_before_the_run(
    finished: Path, kind: str, muster_main: Main, tmp_path: Path
) -> None:
    """The command line of this fixture has its flags first, as many people write it."""
    run = copy_of(finished, kind, "finished", tmp_path)
    done = muster_main("resume", "--dry-run", "--retries", "2", str(run))
    assert done.returncode == 0, done.stderr
    assert "f.py:f" in done.stdout and "(continued)" in done.stdout


@pytest.fixture
def others_see() -> Iterator[Path]:
    """A working folder that every user may look into; those of pytest are the owner's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        os.chdir("/")  # the folder goes


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_one_may_only_read(
    finished: Path, kind: str, muster_main: Main, others_see: Path
) -> None:
    run = copy_of(finished, kind, "finished", others_see)
    before = tree(run)
    os.seteuid(65534)
    try:
        words: Any
        for command, words in LOOKERS.items():
            if command not in ("report", "export"):
                run_word = () if command == "list" else (str(run),)
                done = muster_main(command, *run_word, *words, folder=others_see)
                check_answer(done)
        for command in ("cancel", "retry"):
            check_answer(muster_main(command, str(run), folder=others_see))
        state = muster_main("status", str(run), folder=others_see).stdout.splitlines()[0]
    finally:
        os.seteuid(0)
    assert state == f"{run.name}: {WORDS['finished'][kind]}"
    assert tree(run) == before


#: What would change a run, or write beside it.
FOREIGN = (
    ("resume",), ("retry",), ("cancel",), ("cancel", "--task", "1"), ("add", "--seeds", "3"),
    ("devices",), ("devices", "--release", "1"), ("devices", "--add", "1"),
    ("devices", "--only", "cpu:1"), ("collect",), ("report",), ("track", "--log-to", "tensorboard"),
)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs another user")
@pytest.mark.thorough
@pytest.mark.parametrize("is_private", [False, True], ids=["readable", "private"])
@pytest.mark.parametrize("state", ["finished", "stopped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_another_user_is_left_as_it_is(
    finished: Path, kind: str, state: str, is_private: bool, muster_main: Main, others_see: Path
) -> None:
    """Whatever is asked of it: a sentence with the reason, and nothing is lost or left behind."""
    spoiled = others_see / "spoiled"
    spoiled.mkdir()
    # Once by its owner, on a copy, so that all that these commands import is there: the Python of
    # root may be closed to others.
    copied = copy_of(finished, kind, state, spoiled)
    for command, *more in FOREIGN:
        muster_main(command, str(copied), *more, folder=spoiled)
    run = copy_of(finished, kind, state, others_see)
    before = tree(others_see)
    if is_private:
        run.chmod(0o700)
    start = ("sweep", "f.py:f", "--grid", "x=1", "--devices", "cpu:1", "--run-dir", str(run))
    looks = ((name, *words) for name, words in LOOKERS.items())
    for command, *more in (*FOREIGN, *looks, *[start] * is_private):
        if command in ("list", "export") or (is_private and "--out" in more):
            continue
        words = more if str(run) in more else [str(run), *more]
        os.seteuid(65534)
        try:
            done = muster_main(command, *words, folder=others_see)
        finally:
            os.seteuid(0)
        check_answer(done)
        if is_private:
            assert done.returncode in (2, 3), (command, more, done)
            assert "ermission" in done.stderr, (command, more, done.stderr)
        assert tree(others_see) == before, (command, more, done)


@pytest.mark.thorough
def test_cancel_ends_a_program_on_many_ranks(muster_main: Main, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    words = [sys.executable, "-m", "muster", "run", "--devices", "cpu:2", "--run-dir", "r", "p.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "here" in process.stdout.readline()
        assert "asked its ranks" in muster_main("cancel", "r").stdout
        assert process.wait(timeout=120) == 130
    assert muster_main("status", "r").stdout.startswith("r: stopped\n")
    assert not (tmp_path / "r" / "ledger.sqlite").exists()


# ---------------------------------------------------------------------- JSON

_ONE = "f.py:f --grid x=1 --on inline"
_SEARCH = "f.py:f --space x=int(1,4) --maximize y --trials 2"
_MAP = "map s.py:stage --input in.jsonl --output"
_PLAN = "plan params=7e9 --devices H100"
#: Command lines that print JSON: real ones, as cheap as they can be. The schema has the name of
#: the command.
PRINTED = [
    f"sweep {_ONE} --run-dir runs/one", f"sweep {_SEARCH} --on inline --run-dir runs/search",
    f"sweep {_ONE} --dry-run", f"sweep {_SEARCH} --dry-run",
    "sweep f.py:f --grid x=1,2 --on slurm --array 2 --time 1:00:00 --dry-run",
    f"{_MAP} j.jsonl --on inline --run-dir runs/j", f"{_MAP} p.jsonl --dry-run",
    "map reasoning --list-datasets",
    "run --devices cpu:1 --run-dir runs/bad p.py", "run --devices cpu:1 --dry-run p.py",
    "run --on slurm --devices cpu:1 --dry-run p.py",
    "train t.py:Slow --devices cpu:1 --max-steps 1 --run-dir runs/t",
    "train t.py:Slow --devices cpu:1 --dry-run",
    "train t.py:Slow --on slurm --devices cpu:1 --dry-run",
    "train t.py:Slow --hosts localhost:cpu:1 --setup true --dry-run",
    "sweep f.py:f --grid x=1 --hosts localhost:cpu:1 --setup true --memory 1G --dry-run",
    "verify t.py:Slow --devices cpu:1",
    "hosts check localhost",
    "start phases.toml", "start phases.toml --dry-run", "start one.toml",
    "resume phases", "resume runs/sweep", "resume runs/map", "resume runs/sweep --dry-run",
    "retry runs/sweep", "retry runs/sweep --dry-run", "retry runs/search",
    "add runs/one --grid x=2", "add runs/one --grid x=1", "add runs/sweep --grid x=5 --dry-run",
    "plan runs/sweep", f"{_PLAN} --memory", "plan --write-prices",
    f"{_PLAN} --flops-per-sample 8.6e13 --global-batch 512 --samples 1e6",
    "collect runs/array", "list", "list --root nowhere",
    *(f"status runs/{name}" for name in (*KINDS, "search", "array", "phases")),
    "wait runs/sweep runs/map", "wait runs/phases", "best runs/search -n 2",
    *(f"{command} runs/{name}" for command in ("why", "errors") for name in (*KINDS, "phases")),
    *(f"metrics runs/{name}" for name in KINDS), "metrics runs/fit --to m.csv",
    "report runs/sweep --out page",
    *(f"cancel runs/{name}" for name in KINDS), "cancel runs/sweep --task 1 2",
    "monitor --duration 0.1 --interval 0.1", "monitor --output g.csv --interval 0.1 -- true",
    "monitor g.csv",
    "doctor --quick", "devices", *(f"devices runs/{name}" for name in KINDS),
    "devices runs/sweep --only cpu:1", "queue",
]  # fmt: skip


@pytest.fixture(scope="module")
def printing(finished: Path) -> Path:
    """The same folder with what only these rows need."""
    (finished / "p.py").write_text("import sys\nsys.exit(3)\n")
    one = 'command = "sweep"\ntarget = "f.py:f"\ngrid.x = [1]\n'
    (finished / "one.toml").write_text(f'on = "inline"\nname = "single"\n{one}')
    (finished / "phases.toml").write_text(
        f'on = "inline"\n[phase.a]\n{one}[phase.b]\ncommand = "map"\ntarget = "s.py:stage"\n'
        'after = ["a"]\ninput = "in.jsonl"\noutput = "e.jsonl"\n'
    )
    array = finished / "runs" / "array"
    shutil.copytree(finished / "runs" / "sweep", array)
    stopped(array)
    shutil.copytree(finished / "runs" / "element", array / "elements" / "0")
    record = {"elements": 2, "share": '--part "$SLURM_ARRAY_TASK_ID/2"', "job_id": None}
    (array / "elements" / "array.json").write_text(json.dumps(record))
    return finished


def _schema_of(words: list[str]) -> str:
    return f"{words[0]}.dry-run" if "--dry-run" in words else words[0]


@pytest.mark.parametrize("line", PRINTED)
def test_json_is_as_its_schema_says(printing: Path, line: str, muster_main: Main) -> None:
    """docs/reference/json holds what scripts may rely on: a key that goes away breaks them, and
    one that comes is described. Beside the document nothing is printed."""
    words = [word.replace("H100", "H100 SXM x8") for word in line.split()]
    at = next((n for n, word in enumerate(words) if word in ("--", "p.py")), len(words))
    done = muster_main(*words[:at], "--json", *words[at:], folder=printing)
    assert done.returncode in (0, 1), done.stderr
    check_printed(_schema_of(words), done.stdout)


def test_every_json_has_a_schema_and_is_held_to_it() -> None:
    """By what the commands themselves say that they take."""
    wanted = set()
    for command in COMMANDS:
        options: list[Option] = []
        token = help_page.HEARS.set(options.extend)
        with suppress(SystemExit):
            main([command, "--help-all"])
        help_page.HEARS.reset(token)
        names = {option.name for option in options}
        if "json" in names:
            wanted |= {command, *([f"{command}.dry-run"] if "dry-run" in names else [])}
    assert wanted == {_schema_of(line.split()) for line in PRINTED}
    assert schemas().keys() == wanted | {"detach"}  # which test_detach.py holds
    for schema in schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)


# ---------------------------------------------------------------------- logs

#: What is asked of `muster logs`, the exit code, and what is shown, in this order.
LOGS: tuple[tuple[str, tuple[str, ...], int, tuple[str, ...]], ...] = (
    ("sweep", ("1",), 0, ("--- attempt 1 (ok)", "hello 1")),
    ("sweep", ("3", "-n", "1"), 0, ("hello 3", "--- error", "ValueError: no 3")),
    ("sweep", ("zz",), 2, ("There is no task 'zz'",)),
    ("sweep", (), 2, ("Failed: 3", "muster logs runs/sweep -f")),
    ("sweep", ("-n", "1"), 0, ("worker-0: hello 3",)),
    ("element", ("1",), 0, ("hello 1",)),
    ("map", ("1",), 0, ("--- attempt 1 (ok)", "record 1", "record 2")),
    ("map", ("2",), 2, ("There is no task '2'",)),
    ("stages", ("1",), 0, ("--- stage 1, attempt 1", "record 1", "--- stage 2, attempt", "record")),
    ("stages", ("-n", "1"), 0, ("worker-0: record 2", "worker-0: record 2")),
    ("stages", (), 2, ("runs/stages has many tasks",)),
    ("stages/stages/0", ("1",), 0, ("--- attempt 1", "record 2")),
    ("begun", ("1",), 0, ("--- attempt 1", "record 2")),
    ("begun", (), 2, ("runs/begun has many tasks", "muster logs runs/begun N")),
    ("run", (), 0, ("--- rank 0", "hello from 0")),
    ("run", ("1",), 0, ("--- rank 1", "hello from 1")),
    ("run", ("7",), 2, ("There is no rank",)),
    ("fit", ("0",), 2, ("No rank of runs/fit has printed anything", "muster.fit prints in")),
    ("agent", (), 2, ("No rank of runs/agent has printed anything",)),
)  # fmt: skip


@pytest.fixture(scope="module")
def staged(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a map that ran stage by stage, and one whose second stage has not begun."""
    place = tmp_path_factory.mktemp("staged")
    shutil.copytree(finished / "runs", place / "runs")
    shutil.copytree(place / "runs/map", place / "runs/stages")
    for name in ("stages", "begun"):
        shutil.copytree(place / "runs/map", place / f"runs/{name}/stages/0")
    return place


@pytest.mark.parametrize(("kind", "words", "code", "shown"), LOGS)
def test_logs_show_the_task_that_is_named(
    kind: str, words: tuple[str, ...], code: int, shown: tuple[str, ...], staged: Path,
    muster_main: Main,
) -> None:  # fmt: skip
    done = muster_main("logs", f"runs/{kind}", *words, folder=staged)
    said, at = done.stdout + done.stderr, 0
    assert done.returncode == code, said
    for text in shown:
        at = said.find(text, at) + 1
        assert at > 0, (text, said)
    assert ("stage 2" in said) == (kind == "stages" and words == ("1",)), said
