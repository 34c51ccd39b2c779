"""What the command line promises about faults, as a user meets it: real processes, real kills."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.conftest import MusterCli
from tests.processes import command_line, is_gone
from tests.programs import read_program

from muster import Run

SOURCE = read_program("faulty_tasks.py")


class Place:
    """A folder to work in, with a target in it and a file in which tasks leave notes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes_file = path / "notes.txt"
        (path / "t.py").write_text(SOURCE)
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        source = str(Path(__file__).parents[2] / "src")
        return {**os.environ, "PYTHONPATH": source, "NOTES": str(self.notes_file)}

    def muster(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "muster", *words],
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def sweep(self, target: str, *words: str, code: int = 0) -> str:
        return self.muster(
            "sweep", f"t.py:{target}", "--devices", "cpu:2", "--run-dir", "r", *words, code=code
        )

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        cut = words.index("--") if "--" in words else len(words)
        words = (*words[:cut], "--run-dir", "r", *words[cut:])
        process = subprocess.Popen(
            [sys.executable, "-m", "muster", "sweep", *words],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process

    def has_heard(self) -> bool:
        """Whether the run has been asked to end, and knows it."""
        return '"event": "wish"' in (self.path / "r" / "events.jsonl").read_text()

    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines() if self.notes_file.exists() else []

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.notes() if line.startswith("pid ")]

    def rows(self) -> dict[str, dict[str, str]]:
        with (self.path / "r" / "results.csv").open() as file:
            return {row["x"]: row for row in csv.DictReader(file)}

    def states(self) -> dict[str, str]:
        return {x: row["state"] for x, row in self.rows().items()}

    def counts(self) -> dict[str, int]:
        counts = Run(self.path / "r").status().counts
        return {name: count for name, count in counts.items() if count}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.started:
        if process.poll() is None:
            process.kill()
        process.wait()


def until(ready: Callable[[], object], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def tree(process: subprocess.Popen[bytes]) -> list[int]:
    return [p.pid for p in psutil.Process(process.pid).children(recursive=True)]


# ------------------------------------------------------------------ exit codes


@pytest.mark.quick
def test_exit_code_0_and_the_same_command_again_runs_nothing(place: Place) -> None:
    place.sweep("double", "--grid", "x=1,2,3")
    place.sweep("double", "--grid", "x=1,2,3")
    assert sorted(place.notes()) == ["ran 1", "ran 2", "ran 3"]
    assert place.states() == {"1": "done", "2": "done", "3": "done"}
    assert [place.rows()[x]["y"] for x in "123"] == ["2", "4", "6"]


@pytest.mark.quick
def test_exit_code_1_then_retry_runs_the_failed_ones_only(place: Place) -> None:
    place.sweep("some_fail", "--grid", "x=1,2,3,4", code=1)
    assert place.states() == {"1": "failed", "2": "done", "3": "failed", "4": "done"}
    place.sweep("some_fail", "--grid", "x=1,2,3,4", code=1)
    assert len(place.notes()) == 4, "continuing does not run failed tasks again"
    errors = place.muster("errors", "r")
    assert "ValueError: odd" in errors
    (place.path / "mended").touch()
    place.muster("retry", "r")
    assert sorted(place.notes()[4:]) == ["ran 1", "ran 3"]
    assert set(place.states().values()) == {"done"}
    place.muster("resume", "r")
    assert len(place.notes()) == 6


@pytest.mark.quick
@pytest.mark.parametrize(
    "words",
    [
        ["sweep"],
        ["sweep", "t.py:no_such_function", "--grid", "x=1"],
        ["sweep", "t.py:double", "--grid", "z=1"],
        ["sweep", "t.py:double", "--grid", "x=one"],
        ["sweep", "t.py:double", "--no-such-flag"],
        ["sweep", "--grid", "x=1", "--", "echo", "{y}"],
        ["status", "nowhere"],
        ["frobnicate"],
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else words,
)
def test_exit_code_2_for_wrong_usage(
    place: Place, muster_main: MusterCli, words: list[str]
) -> None:
    done = muster_main(*words)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert not (place.path / "runs").exists()


def test_exit_code_3_for_a_folder_that_cannot_be_used(place: Place) -> None:
    (place.path / "file").write_text("in the way")
    words = ["sweep", "t.py:double", "--grid", "x=1", "--devices", "cpu:1"]
    text = place.muster(*words, "--run-dir", "file/r", code=3)
    assert "Traceback" not in text
    assert "--run-dir" in text


def test_exit_code_3_for_a_damaged_ledger_which_is_left_alone(place: Place) -> None:
    place.sweep("double", "--grid", "x=1,2")
    ledger = place.path / "r" / "ledger.sqlite"
    for side in ("-wal", "-shm"):
        ledger.with_name(ledger.name + side).unlink(missing_ok=True)
    ledger.write_bytes(b"not a database at all" * 1000)
    text = place.sweep("double", "--grid", "x=1,2", code=3)
    assert "damaged" in text
    assert "Traceback" not in text
    assert ledger.read_bytes() == b"not a database at all" * 1000


def test_a_worker_that_cannot_start_ends_the_run_with_code_3(place: Place) -> None:
    place.sweep("double", "--grid", "x=1")
    (place.path / "dead.py").write_text("import os\nos._exit(9)\ndef f(x: int): return {}\n")
    words = ["sweep", "dead.py:f", "--grid", "x=1", "--devices", "cpu:1", "--run-dir", "d"]
    text = place.muster(*words, code=3)
    assert "exit code 9" in text


@pytest.fixture
def small_disk(place: Place) -> Iterator[Path]:
    folder = place.path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_in_words_and_with_room_it_goes_on(
    place: Place, small_disk: Path
) -> None:
    (place.path / "big.py").write_text(
        "import time\n"
        "def f(x: int):\n    time.sleep(0.002)\n    return {'y': x, 'text': 'z' * 3000}\n"
    )
    words = ["sweep", "big.py:f", "--grid", "x=" + ",".join(map(str, range(400)))]
    words += ["--devices", "cpu:2", "--run-dir", "disk/r"]
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 1_200_000)
    text = place.muster(*words, code=3)
    assert "Traceback" not in text
    assert "space" in text
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    before = json.loads(place.muster("status", "disk/r", "--json"))["counts"]["done"]
    place.muster(*words)
    assert before < 400
    place.muster("export", "disk/r", "--to", "out.jsonl")
    records = [json.loads(line) for line in (place.path / "out.jsonl").read_text().splitlines()]
    assert sorted(r["y"] for r in records) == list(range(400))


def test_a_read_only_folder_is_refused_in_words(place: Place, small_disk: Path) -> None:
    words = ["sweep", "t.py:double", "--grid", "x=1,2", "--devices", "cpu:1"]
    place.muster(*words, "--run-dir", "disk/r")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for run_dir in ("disk/r", "disk/new"):
        text = place.muster(*words, "--run-dir", run_dir, code=3)
        assert "Traceback" not in text
        assert "--run-dir" in text
    assert "2 done" in place.muster("status", "disk/r")


# ------------------------------------------------------------------ Ctrl-C


def test_the_first_interrupt_drains_and_the_same_command_continues(place: Place) -> None:
    words = ["t.py:waits", "--grid", "x=1,2,3,4,5,6,7,8", "--devices", "cpu:2"]
    process = place.begin(*words)
    until(lambda: len(place.notes()) >= 2)
    process.send_signal(signal.SIGINT)
    until(place.has_heard)
    (place.path / "go").touch()
    assert process.wait(300) == 130
    notes = place.notes()
    begun = {n.split()[1] for n in notes if n.startswith("began")}
    ended = {n.split()[1] for n in notes if n.startswith("ended")}
    assert begun == ended, "what ran was let finish"
    assert len(ended) < 8
    assert {x for x, state in place.states().items() if state == "done"} == ended
    place.muster("sweep", *words, "--run-dir", "r")
    assert sorted(n for n in place.notes() if n.startswith("ended")) == [
        f"ended {x}" for x in range(1, 9)
    ]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_second_interrupt_stops_at_once_and_leaves_nothing(place: Place, first: int) -> None:
    process = place.begin("t.py:family", "--grid", "x=1,2", "--devices", "cpu:2")
    until(lambda: place.notes().count("family complete") == 2)
    pids = [*tree(process), *place.pids()]
    process.send_signal(first)
    # Not by the clock: two signals that a busy machine delivers together are one.
    until(place.has_heard)
    assert process.poll() is None, "drains: its tasks still run"
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    assert [pid for pid in pids if not is_gone(pid)] == []
    assert place.counts() == {"waiting": 2}


# ------------------------------------------------------------------ kill -9


@pytest.mark.parametrize("kind", ["function", "command"])
def test_nothing_survives_a_killed_coordinator_for_two_seconds(place: Place, kind: str) -> None:
    if kind == "function":
        process = place.begin("t.py:family", "--grid", "x=1,2", "--devices", "cpu:2")
    else:
        script = (
            "setsid sh -c 'echo pid $$ >> notes.txt; sleep 600' & "
            "echo pid $$ >> notes.txt; echo family complete >> notes.txt; sleep 600"
        )
        (place.path / "job.sh").write_text(script)
        process = place.begin(
            "--grid", "x=1,2", "--devices", "cpu:2", "--", "sh", "job.sh", "{x}"
        )  # fmt: skip
    until(lambda: place.notes().count("family complete") == 2)
    until(lambda: len(place.pids()) >= 4)
    pids = [*tree(process), *place.pids()]
    assert len(set(pids)) >= 6
    process.kill()
    process.wait()
    until(lambda: all(map(is_gone, pids)), limit_s=120.0)
    assert place.counts() == {"waiting": 2}


@pytest.mark.quick
def test_after_a_killed_coordinator_the_same_command_finishes_the_rest(place: Place) -> None:
    words = ["t.py:slow", "--grid", "x=1,2,3,4,5,6", "--devices", "cpu:2"]
    process = place.begin(*words)
    until(lambda: sum(n.startswith("ended") for n in place.notes()) >= 2)
    time.sleep(0.15)
    process.kill()
    process.wait()
    place.muster("sweep", *words, "--run-dir", "r")
    assert place.states() == dict.fromkeys("123456", "done")
    ended = [n for n in place.notes() if n.startswith("ended")]
    assert len(ended) <= 8, "only what was running is repeated"


def test_a_killed_worker_costs_its_attempt_only(place: Place) -> None:
    process = place.begin("t.py:waits", "--grid", "x=1,2,3,4", "--devices", "cpu:2")
    until(lambda: len(place.notes()) >= 2)
    workers = [p for p in psutil.Process(process.pid).children() if "worker" in command_line(p)]
    workers[0].kill()
    (place.path / "go").touch()
    assert process.wait(300) == 0
    assert place.states() == dict.fromkeys("1234", "done")
    assert sorted(row["attempts"] for row in place.rows().values()) == ["1", "1", "1", "2"]


def test_a_segmentation_fault_is_retried_then_marked_with_its_signal(place: Place) -> None:
    place.sweep("crash", "--grid", "x=0,1,2", code=1)
    assert place.states() == {"0": "done", "1": "failed", "2": "done"}
    row = place.rows()["1"]
    assert row["attempts"] == "2"
    assert "SIGSEGV" in row["error"]
    assert place.notes().count("began 1") == 2
    assert place.notes().count("began 0") == 1


def test_a_lone_task_that_crashes_does_not_hang_the_run(place: Place) -> None:
    place.sweep("crash", "--grid", "x=1", code=1)
    assert place.notes() == ["began 1", "began 1"]


def test_a_timeout_ends_the_whole_group_and_the_rest_goes_on(place: Place) -> None:
    # Long enough for the two that do nothing, on any machine; the first would take ten minutes.
    place.sweep("hang_then_ok", "--grid", "x=1,2,3", "--timeout", "5", code=1)
    assert place.states() == {"1": "failed", "2": "done", "3": "done"}
    assert "--timeout" in place.rows()["1"]["error"]
    assert all(map(is_gone, place.pids()))


# ------------------------------------------------------------------ plans and folders


def test_another_plan_is_refused_with_the_difference(place: Place) -> None:
    place.sweep("double", "--grid", "x=1,2")
    text = place.sweep("double", "--grid", "x=1,3", code=2)
    assert "1, 2" in text
    assert "1, 3" in text
    assert place.states() == {"1": "done", "2": "done"}


def test_more_seeds_are_the_same_plan(place: Place) -> None:
    (place.path / "s.py").write_text("def f(seed: int): return {'y': seed}\n")
    words = ["sweep", "s.py:f", "--devices", "cpu:1", "--run-dir", "r"]
    place.muster(*words, "--seeds", "2")
    place.muster(*words, "--seeds", "4")
    assert place.counts() == {"done": 4}


@pytest.mark.quick
def test_changed_code_is_refused_unless_allowed(place: Place) -> None:
    place.sweep("some_fail", "--grid", "x=1,2", code=1)
    file = place.path / "t.py"
    file.write_text(SOURCE.replace('return {"y": x}', 'return {"y": x + 100}'))
    text = place.sweep("some_fail", "--grid", "x=1,2", code=2)
    assert "--allow-changed-code" in text
    place.sweep("some_fail", "--grid", "x=1,2", "--allow-changed-code", code=1)


def test_two_coordinators_on_one_folder_are_refused(place: Place) -> None:
    words = ["t.py:waits", "--grid", "x=1,2,3,4", "--devices", "cpu:2"]
    process = place.begin(*words)
    until(lambda: len(place.notes()) >= 2)
    text = place.muster("sweep", *words, "--run-dir", "r", code=3)
    (place.path / "go").touch()
    assert str(process.pid) in text
    assert process.wait(300) == 0
    assert place.counts() == {"done": 4}
    assert sum(n.startswith("began") for n in place.notes()) == 4


def test_cancel_ends_a_running_sweep_and_keeps_what_is_done(place: Place) -> None:
    process = place.begin("t.py:held", "--grid", "x=1,2,3,4,5,6", "--devices", "cpu:1")
    until(lambda: sum(n.startswith("began") for n in place.notes()) >= 2)
    place.muster("cancel", "r")
    assert process.wait(300) == 130
    assert place.counts() == {"done": 1, "cancelled": 5}
    assert tree_is_gone(process)


def tree_is_gone(process: subprocess.Popen[bytes]) -> bool:
    return not [
        p
        for p in psutil.process_iter(["ppid"])
        if p.info["ppid"] == process.pid and not is_gone(p.pid)
    ]


# ------------------------------------------------------------------ commands

NASTY = ["plain", "two words", "a;touch hacked", "$(touch hacked)", 'quo"te', "it's", "*", "`id`"]


def test_values_reach_a_command_as_one_argument_and_never_a_shell(place: Place) -> None:
    (place.path / "show.py").write_text(
        "import json, sys, pathlib\n"
        "pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({'got': sys.argv[2:]}))\n"
    )
    rows = [json.dumps({"v": value, "x": number}) + "\n" for number, value in enumerate(NASTY)]
    (place.path / "rows.jsonl").write_text("".join(rows))
    place.muster(
        "sweep", "--list", "rows.jsonl", "--devices", "cpu:2", "--run-dir", "r",
        "--", sys.executable, "show.py", "{dir}", "--v={v}", "{v}", "{x}",
    )  # fmt: skip
    place.muster("export", "r", "--to", "out.jsonl")
    records = [json.loads(line) for line in (place.path / "out.jsonl").read_text().splitlines()]
    for record in records:
        value = NASTY[int(record["x"])]
        assert record["got"] == [f"--v={value}", value, str(record["x"])]
    assert len(records) == len(NASTY)
    assert not (place.path / "hacked").exists()


def test_shell_gives_pipes_and_writers_without_reader_end(place: Place) -> None:
    place.muster(
        "sweep", "--grid", "x=3,5", "--devices", "cpu:2", "--run-dir", "r", "--shell",
        "--", "yes 2>err-{x}.txt | head -n {x} > out-{x}.txt",
    )  # fmt: skip
    for x in (3, 5):
        assert (place.path / f"out-{x}.txt").read_text() == "y\n" * x
        assert (place.path / f"err-{x}.txt").read_text() == "", "no complaint of a broken pipe"


def test_a_command_that_fails_says_how(place: Place) -> None:
    place.muster(
        "sweep", "--grid", "x=0,3", "--devices", "cpu:2", "--run-dir", "r",
        "--", "sh", "-c", "echo noise; exit {x}", code=1,
    )  # fmt: skip
    assert place.states() == {"0": "done", "3": "failed"}
    assert "exit code 3" in place.rows()["3"]["error"]
    assert "noise" in place.muster("errors", "r")


def test_a_command_that_does_not_exist_is_wrong_usage(place: Place) -> None:
    text = place.muster("sweep", "--grid", "x=1", "--", "no-such-program", "{x}", code=2)
    assert "no-such-program" in text


# ------------------------------------------------------------------ what a task may ask


def test_a_checkpoint_survives_a_kill_and_goes_with_the_result(place: Place) -> None:
    place.sweep("steps", "--grid", "x=1")
    assert place.notes() == ["attempt at 0", "attempt at 3"]
    assert place.rows()["1"]["steps"] == "6"
    assert list((place.path / "r" / "checkpoints").iterdir()) == []


def test_a_folder_is_published_only_when_its_task_succeeds(place: Place) -> None:
    place.sweep("files", "--grid", "x=1,2", code=1)
    run = place.path / "r"
    published = list((run / "artifacts").rglob("out.txt"))
    assert [path.read_text() for path in published] == ["1"]
    kept = list((run / "attempts").rglob("out.txt"))
    assert [path.read_text() for path in kept] == ["2"], "a failed task's files can be looked at"


def test_in_a_batch_only_the_task_that_raises_fails(place: Place) -> None:
    place.sweep("together", "--grid", "x=1,2,3,4,5,6,7,8", code=1)
    states = place.states()
    assert states.pop("3") == "failed"
    assert set(states.values()) == {"done"}
    assert {x: place.rows()[x]["y"] for x in states} == {x: x for x in states}


def test_the_breaker_stops_a_sweep_in_which_everything_fails_alike(place: Place) -> None:
    (place.path / "b.py").write_text("def f(x: int): raise RuntimeError('always')\n")
    words = ["sweep", "b.py:f", "--grid", "x=1:40", "--devices", "cpu:2", "--run-dir", "r"]
    words[3] = "x=" + ",".join(map(str, range(40)))
    text = place.muster(*words, code=1)
    assert "always" in text
    assert "--keep-going" in text
    counts = place.counts()
    assert 5 <= counts["failed"] < 40
    place.muster(*words, "--keep-going", code=1)
    assert place.counts() == {"failed": 40}
