"""Tasks that are added to a sweep: what they are, and that all are in or none: of a run that is at
work, paused, finished, interrupted or killed; asked again, by two at once, from Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from muster import MusterError, Run, UsageError
from muster.api.sweeps.workload import plan_id_of
from muster.farm.task import TaskState

Main = Callable[..., subprocess.CompletedProcess[str]]

SOURCE = """
import pathlib, time

def held(x: int, seed: int = 0, note: str = ""):
    here = pathlib.Path(__file__).parent
    with (here / "began.txt").open("a") as file:
        print(x, file=file)
    while x == 2 and not (here / "go").exists():
        time.sleep(0.01)
    if x == 13:
        raise ValueError("no 13")
    return {"y": x}
"""
SCHEMA = json.loads(Path(__file__).parents[2].joinpath("docs/reference/json/add.json").read_bytes())
FLAGS = ("--quiet", "--devices", "cpu:1", "--monitor-interval", "0", "--run-dir", "r")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "t.py").write_text(SOURCE)
    (tmp_path / "more.csv").write_text("x,note\n1,a\n5,b\n")
    started.clear()
    yield tmp_path
    for process in started:
        process.kill()
        process.wait()


started: list[subprocess.Popen[bytes]] = []


def begin(place: Path, *words: str) -> subprocess.Popen[bytes]:
    with (place / "said.txt").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", *words],
            cwd=place, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
    started.append(process)
    return process


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def has_heard(place: Path) -> bool:
    """Whether the run has been asked to end, and knows it."""
    return '"event": "wish"' in (place / "r" / "events.jsonl").read_text()


def rows(place: Path) -> list[dict[str, Any]]:
    return list(Run(place / "r").results().to_pylist())


def settings(place: Path) -> set[tuple[int, int]]:
    return {(row["x"], row["seed"]) for row in rows(place)}


def inline(main: Main, *words: str) -> None:
    done = main("sweep", *FLAGS, "--on", "inline", "t.py:held", *words)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- what is meant


def _all(xs: tuple[int, ...], seeds: range) -> set[tuple[int, int]]:
    return {(x, seed) for x in xs for seed in seeds}


BEGUN = ("--grid", "x=1,3", "--seeds", "2")
FIRST = _all((1, 3), range(2))
#: Additions one after another, and what there is after them.
ADDITIONS: dict[str, tuple[list[tuple[str, ...]], set[tuple[int, int]]]] = {
    "seeds, as many as then": ([("--seeds", "4")], _all((1, 3), range(4))),
    "seeds from there on": ([("--seeds", "2:4")], _all((1, 3), range(4))),
    "a value": ([("--grid", "x=5")], _all((1, 3, 5), range(2))),
    "the grid and a value": ([("--grid", "x=1,3,5")], _all((1, 3, 5), range(2))),
    "both": ([("--grid", "x=5", "--seeds", "9,")], FIRST | {(5, 9)}),
    "seeds, then a value": (
        [("--seeds", "4"), ("--grid", "x=5")], _all((1, 3, 5), range(4)),
    ),
    "a value, then seeds": (
        [("--grid", "x=5"), ("--seeds", "2:4")], _all((1, 3, 5), range(4)),
    ),
    "seeds that are there": ([("--seeds", "1")], FIRST),
    "all that is there": ([BEGUN], FIRST),
}  # fmt: skip


#: Between them these go every way, and `make test-all` has the others.
QUICK = ("both", "seeds, then a value", "seeds that are there")


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=pytest.mark.quick) if name in QUICK else name for name in ADDITIONS],
)
def test_what_is_added(what: str, place: Path, muster_main: Main) -> None:
    inline(muster_main, *BEGUN)
    additions, after = ADDITIONS[what]
    for words in additions:
        before = len(rows(place))
        planned = json.loads(muster_main("add", "r", *words, "--dry-run", "--json").stdout)
        done = muster_main("add", "r", *words, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        jsonschema.validate(planned, SCHEMA)
        jsonschema.validate(said, SCHEMA)
        assert said["added"] == planned["added"] == len(rows(place)) - before
        again = muster_main("add", "r", *words)
        assert again.returncode == 0
        assert "nothing to add" in again.stdout
    assert settings(place) == after
    assert {row["state"] for row in rows(place)} == {"done"}
    assert len((place / "began.txt").read_text().split()) == len(after), "each once"
    if what != "both":
        return
    same = muster_main("sweep", *FLAGS, "--on", "inline", "t.py:held", *BEGUN)
    assert same.returncode == 0, same.stderr
    grown = ("--grid", "x=1,3,7", "--seeds", "2")
    assert muster_main("sweep", *FLAGS, "--on", "inline", "t.py:held", *grown).returncode == 0
    assert settings(place) == after | _all((7,), range(2))


@pytest.mark.quick
def test_a_list_of_the_folder_where_one_is(place: Path, muster_main: Main) -> None:
    """The sweep's own list is named from where the sweep was begun."""
    (place / "l.csv").write_text("x,note\n1,a\n3,b\n")
    inline(muster_main, "--list", "l.csv")
    other = place / "other"
    other.mkdir()
    (other / "l.csv").write_text("x,note\n1,a\n5,'b\\{x}\n6,\u202e\n")
    done = muster_main("add", "../r", "--list", "l.csv", folder=other)
    assert done.returncode == 0, done.stderr
    assert "2 tasks added; 1 it has already" in done.stdout
    assert [row["x"] for row in rows(place)] == [1, 3, 5, 6]
    assert muster_main("add", "r", "--seeds", "2").returncode == 0
    assert len(rows(place)) == 4 * 3, "of both lists"


@pytest.mark.quick
def test_a_program_and_a_priority(place: Path, muster_main: Main) -> None:
    line = ("--", sys.executable, "-c", "open('order', 'a').write('{x} ')")
    begun = muster_main("sweep", *FLAGS, "--grid", "x=1", *line)
    assert begun.returncode == 0, begun.stderr
    run = Run(place / "r")
    assert run.add(rows=[{"x": "2"}]) == 1
    assert run.add(rows=[{"x": "3"}], priority=-1) == 1
    assert muster_main("add", "r", "--grid", "x=4", "--priority", "5").returncode == 0
    assert (place / "order").read_text().split() == ["1", "4", "2", "3"]


@pytest.mark.quick
def test_from_python(place: Path, muster_main: Main) -> None:
    inline(muster_main, *BEGUN)
    run = Run(place / "r")
    assert run.add(grid={"x": [1, 5]}, seeds=2) == 2
    assert run.add(grid={"x": [1, 5]}, seeds=2) == 0
    assert run.counts()[TaskState.READY] == 2
    with pytest.raises(UsageError, match="z"):
        run.add(grid={"z": [1]})
    assert muster_main("resume", "r").returncode == 0
    assert settings(place) == _all((1, 3, 5), range(2))


@pytest.mark.quick
def test_a_recipe_is_given_its_own_command_again(place: Path, muster_main: Main) -> None:
    """Its table and figures show what its command asks for, and would leave additions out."""
    shutil.copy(Path(__file__).parents[1] / "programs" / "own_recipes.py", place)
    words = ("sweep", *FLAGS, "--on", "inline", "own_recipes.py:SQUARES")
    assert muster_main(*words).returncode == 0
    refused = muster_main("add", "r", "--num-seeds", "3")
    assert (refused.returncode, "give its command again" in refused.stderr) == (2, True)
    with pytest.raises(UsageError, match="is of a recipe"):
        Run(place / "r").add(seeds=3)
    assert muster_main(*words, "--num-seeds", "3").returncode == 0
    assert len(rows(place)) == 6


@pytest.mark.quick
def test_a_list_that_was_edited_since_is_refused(place: Path, muster_main: Main) -> None:
    inline(muster_main, "--list", "more.csv")
    (place / "more.csv").write_text("x,note\n1,a\n6,b\n")
    refused = muster_main("add", "r", "--seeds", "2")
    assert (refused.returncode, "another plan" in refused.stderr) == (2, True)
    assert {row["x"] for row in rows(place)} == {1, 5}


def test_a_list_that_was_added_and_edited_since(place: Path, muster_main: Main) -> None:
    def there() -> set[tuple[int, int | None]]:
        return {(row["x"], row.get("seed")) for row in rows(place)}

    inline(muster_main, "--list", "more.csv")
    (place / "further.csv").write_text("x,note\n7,a\n")
    assert muster_main("add", "r", "--list", "further.csv").returncode == 0
    (place / "further.csv").write_text("x,note\n7,a\n8,a\n")
    before = there()
    refused = muster_main("add", "r", "--seeds", "2")
    assert (refused.returncode, "has changed since its rows" in refused.stderr) == (2, True)
    assert there() == before
    assert muster_main("add", "r", "--list", "further.csv").returncode == 0
    assert {x for x, _ in there()} == {1, 5, 7, 8}
    assert muster_main("add", "r", "--seeds", "2").returncode == 0
    assert {x for x, seed in there() if seed == 1} == {1, 5, 7, 8}


def test_a_report_says_what_was_added(place: Path, muster_main: Main) -> None:
    inline(muster_main, "--grid", "x=1", "--seeds", "2")
    assert muster_main("add", "r", "--grid", "x=5,6").returncode == 0
    assert Run(place / "r").add(rows=[{"x": 9, "seed": 9}]) == 1
    assert muster_main("resume", "r").returncode == 0
    assert muster_main("report", "r").returncode == 0
    [page] = [path.read_text() for path in (place / "r").rglob("*.html")]
    for words in ("added as 3 to 6", "--grid x=5,6", "added as 7 to 7", "by a call of Run.add"):
        assert words in page, words
    assert "7 tasks, seeds" not in page


PRIORITIES = [str(2**63), str(-(2**63) - 1), str(10**9 + 1), "9" * 400]


@pytest.mark.quick
@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_priority_that_no_ledger_holds_is_refused(
    priority: str, place: Path, muster_main: Main
) -> None:
    inline(muster_main, *BEGUN)
    words = ("add", "r", "--seeds", "3", f"--priority={priority}")
    for more in ((), ("--dry-run",)):
        refused = muster_main(*words, *more)
        assert (refused.returncode, "is not a priority" in refused.stderr) == (2, True), refused
    with pytest.raises(UsageError, match="is not a priority"):
        Run(place / "r").add(rows=[{"x": 9}], priority=int(priority))
    assert settings(place) == FIRST


# ---------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "nothing": (BEGUN, (), "muster add needs to know which tasks to add"),
    "an unknown parameter": (BEGUN, ("--grid", "z=1"), "z"),
    "no number": (BEGUN, ("--grid", "x=two"), "two"),
    "to begin anew": (BEGUN, ("--seeds", "3", "--restart"), "no flag --restart"),
    "a search's flags": (BEGUN, ("--trials", "3"), "no flag --trials"),
    "a part": ((*BEGUN, "--part", "0/2"), ("--seeds", "3"), "a part of a plan"),
    "a search": (
        ("--space", "x=int(3,9)", "--maximize", "y", "--trials", "1"), ("--seeds", "3"), "trials N",
    ),
    "a file that is not there": (BEGUN, ("--list", "none.csv"), "none.csv"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_change_nothing(what: str, place: Path, muster_main: Main) -> None:
    begun, words, said = REFUSED[what]
    inline(muster_main, *begun)
    before = (place / "r" / "run.json").read_bytes(), len(rows(place))
    done = muster_main("add", "r", *words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert ((place / "r" / "run.json").read_bytes(), len(rows(place))) == before


@pytest.mark.quick
def test_other_code_is_refused_until_it_is_allowed(place: Path, muster_main: Main) -> None:
    inline(muster_main, *BEGUN)
    (place / "t.py").write_text(SOURCE + "\n# changed\n")
    refused = muster_main("add", "r", "--seeds", "3")
    assert (refused.returncode, "The code has changed" in refused.stderr) == (2, True)
    with pytest.raises(MusterError, match="code has changed"):
        Run(place / "r").add(grid={"x": [5]}, seeds=1)
    assert settings(place) == FIRST
    assert muster_main("add", "r", "--seeds", "3", "--allow-changed-code").returncode == 0
    assert settings(place) == _all((1, 3), range(3))


# ---------------------------------------------------------------------- while it goes on


def test_tasks_for_a_run_at_work(place: Path, muster_main: Main) -> None:
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    no_effect = muster_main("add", "r", "--grid", "x=4", "--devices", "cpu:2")
    assert (no_effect.returncode, "--devices has no effect" in no_effect.stderr) == (2, True)
    done = muster_main("add", "r", "--grid", "x=4,3", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["added"], said["known"], said["is_at_work"]) == (1, 1, True)
    assert Run(place / "r").add(rows=[{"x": 5}]) == 1
    assert "nothing to add" in muster_main("add", "r", "--grid", "x=4,5").stdout
    assert "5" not in (place / "began.txt").read_text()
    (place / "go").touch()
    assert process.wait(120) == 0, (place / "said.txt").read_text()
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 4, 5]
    assert (place / "began.txt").read_text().split() == ["1", "2", "3", "4", "5"]
    assert "tasks added" not in (place / "said.txt").read_text(), "it is quiet"
    assert '"added"' in (place / "r" / "events.jsonl").read_text()


def test_urgent_tasks_begin_before_what_was_claimed_ahead(place: Path, muster_main: Main) -> None:
    xs = ",".join(map(str, range(20, 60)))
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", f"x=2,{xs}")
    until(lambda: (place / "began.txt").exists())
    assert "1 task added" in muster_main("add", "r", "--grid", "x=7", "--priority", "1").stdout
    (place / "go").touch()
    assert process.wait(120) == 0, (place / "said.txt").read_text()
    order = (place / "began.txt").read_text().split()
    assert sorted(map(int, order)) == [2, 7, *range(20, 60)], "each once"
    assert order.index("7") < 10, order


def test_a_run_that_is_about_to_end_takes_nothing(place: Path, muster_main: Main) -> None:
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    process.send_signal(signal.SIGINT)  # it waits for the task in hand
    until(lambda: has_heard(place))
    refused = muster_main("add", "r", "--grid", "x=4")
    assert (refused.returncode, "about to end" in refused.stderr) == (3, True), refused
    (place / "go").touch()
    assert process.wait(120) == 130
    assert muster_main("add", "r", "--grid", "x=4").returncode == 0
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 4]


def test_a_run_that_was_begun_with_detach(place: Path, muster_main: Main) -> None:
    flags = [word for word in FLAGS if word != "--quiet"]
    begun = muster_main("sweep", *flags, "--detach", "t.py:held", "--grid", "x=1,2,3")
    assert begun.returncode == 0, begun.stderr
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    try:
        said = json.loads(muster_main("add", "r", "--grid", "x=4", "--json").stdout)
        assert (said["added"], said["is_at_work"]) == (1, True)
    finally:
        (place / "go").touch()
    assert muster_main("wait", "r").returncode == 0
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 4]
    assert {row["state"] for row in rows(place)} == {"done"}


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="makes another's file")
def test_what_another_user_asks_to_add_is_not_done(place: Path) -> None:
    """He may stop a run in a shared folder, and not choose what its owner runs."""
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    requests = place / "r" / "requests"
    token = (requests / "session").read_text()
    run = Run(place / "r")
    line = [run.stored.targets[0]["name"], '{"x":77}', 0, 0]
    note = {"plan": plan_id_of(run.stored.spec), "tasks": [line], "said": []}
    for name, owner in (("theirs", 65534), ("ours", 0)):
        line[1] = line[1].replace("77", "78") if name == "ours" else line[1]
        hidden = requests / f".{name}"
        hidden.write_text(json.dumps({"add": note}))
        os.chown(hidden, owner, -1)
        hidden.rename(requests / f"ask-{token}-{name}")
    until(lambda: list(requests.glob("*ours*answer*")) or sum(run.counts().values()) > 3)
    (place / "go").touch()
    assert process.wait(120) == 0, (place / "said.txt").read_text()
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 78]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_in_the_mailbox_stops_nothing(place: Path) -> None:
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    requests = place / "r" / "requests"
    token = (requests / "session").read_text()
    os.mkfifo(requests / f"ask-{token}-a")
    (requests / f"ask-{token}-b").symlink_to("/dev/zero")
    assert Run(place / "r").add(rows=[{"x": 4}]) == 1
    (place / "go").touch()
    assert process.wait(120) == 0, (place / "said.txt").read_text()
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["interrupted", "killed", "paused"])
def test_tasks_for_a_run_that_was_stopped(how: str, place: Path, muster_main: Main) -> None:
    """It goes on with all that was left, too."""
    words = ("x=13", "--seeds", "9") if how == "paused" else ("x=1,2,3",)
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", *words)
    if how != "paused":
        until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        if how == "interrupted":
            until(lambda: has_heard(place))  # two that come together are one
            process.send_signal(signal.SIGINT)  # without the task in hand
    code = process.wait(120)
    assert code == {"killed": -9, "interrupted": 130, "paused": 1}[how]
    (place / "go").touch()
    done = muster_main("add", "r", "--grid", "x=4", "--keep-going")
    assert "added" in done.stdout, done.stderr
    assert {row["state"] for row in rows(place) if row["x"] == 4} == {"done"}
    assert Run(place / "r").counts()[TaskState.READY] == 0
    assert done.returncode == (1 if how == "paused" else 0)


def test_a_ledger_elsewhere_comes_home_with_them(
    place: Path, muster_main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered holds, also where the host is lost with its disk."""
    monkeypatch.setenv("MUSTER_LEDGER_DIR", str(place / "local"))
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    done = muster_main("add", "r", "--grid", "x=4,5")
    assert "2 tasks added" in done.stdout, done.stderr
    process.kill()
    process.wait()
    shutil.rmtree(place / "local")
    (place / "go").touch()
    assert muster_main("resume", "r", "--quiet").returncode == 0
    assert [row["x"] for row in rows(place)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seconds", [0.0, 0.25, 0.5])
def test_a_coordinator_that_is_killed_has_all_of_them_or_none(
    seconds: float, place: Path, muster_main: Main
) -> None:
    process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2,3")
    until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    adds = begin(place, "add", "r", "--seeds", "5:205", "--quiet")
    until(lambda: list((place / "r" / "requests").glob("ask-*")) or adds.poll() is not None)
    time.sleep(seconds)
    process.kill()
    process.wait()
    known = sum(Run(place / "r").counts().values())
    assert known in (3, 3 + 600)
    (place / "go").touch()
    assert adds.wait(120) == 0, (place / "said.txt").read_text()
    again = muster_main("add", "r", "--seeds", "5:205")
    assert again.returncode == 0 and "nothing to add" in again.stdout
    assert muster_main("resume", "r", "--quiet").returncode == 0
    assert Run(place / "r").counts()[TaskState.DONE] == 603


@pytest.mark.parametrize("is_at_work", [True, False])
def test_two_at_once(is_at_work: bool, place: Path, muster_main: Main) -> None:
    if is_at_work:
        process = begin(place, "sweep", *FLAGS, "t.py:held", "--grid", "x=1,2")
        until(lambda: (place / "began.txt").exists() and "2" in (place / "began.txt").read_text())
    else:
        (place / "go").touch()
        inline(muster_main, "--grid", "x=1,2")
    both = [begin(place, "add", "r", "--grid", x, "--quiet") for x in ("x=3,4", "x=4,5")]
    codes = [one.wait(120) for one in both]
    assert codes == [0, 0], (place / "said.txt").read_text()
    if is_at_work:
        (place / "go").touch()
        assert process.wait(120) == 0
    until(lambda: Run(place / "r").counts()[TaskState.DONE] == 5)
    assert sorted((place / "began.txt").read_text().split()) == ["1", "2", "3", "4", "5"]
