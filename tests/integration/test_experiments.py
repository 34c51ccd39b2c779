"""Experiments with phases: their order, what fails, what is killed, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli
from tests.json_schemas import check_printed
from tests.slurm_cluster import SlurmCluster

from muster.api.experiments.experiment import run_in
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.session import hold

HEAD = 'devices = "cpu:1"\nmonitor_interval = 0\n'
INLINE = f'{HEAD}on = "inline"\n'  # which starts no workers
WORK = """
import os, time
from pathlib import Path

def run(x: float, seed: int = 0, slow: float = 0.0) -> dict:
    time.sleep(slow)
    with open("calls.txt", "a") as calls:
        calls.write(f"{x} {seed}\\n")
    if Path("broken").exists():
        raise ValueError("it is broken")
    return {"score": -(x - 2) ** 2 + seed / 100}

def train(teacher: str) -> dict:
    return {"size": len(Path(teacher).read_text())}
"""
BEST = """
[phase.report]
command = "sweep"
program = ["sh", "-c", "cat ${five.dir}/results.csv > $0", "table.txt"]
produces.table = "table.txt"

[phase.search]
command = "sweep"
target = "work.py:run"
best = "maximize score"
grid.x = [1, 2, 3]
seeds = 2

[phase.five]
command = "sweep"
target = "work.py:run"
grid = { x = ["${search.best.x}"], slow = [0.2] }
seeds = 5
"""


slow = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


def states(place: Path, muster_main: MusterCli, name: str = "e") -> dict[str, str]:
    shown = json.loads(muster_main("status", f"runs/{name}", "--json").stdout)
    return {one["name"]: one["state"] for one in shown["phases"]}


def calls(place: Path) -> Counter[str]:
    return Counter((place / "calls.txt").read_text().splitlines())


def test_the_best_goes_into_the_next_phase_and_nothing_is_done_twice(
    place: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    (place / "e.toml").write_text(INLINE + BEST)
    before = json.loads(muster_main("start", "e.toml", "--dry-run", "--json").stdout)
    assert [one["name"] for one in before["phases"]] == ["search", "five", "report"]
    assert before["phases"][1]["waits_for"] == ["grid"]
    assert before["phases"][2]["after"] == ["five"]
    done = muster_cli("start", "e.toml", "--json")
    assert done.returncode == 0, done.stderr
    shown = check_printed("start", done.stdout)
    assert shown["state"] == "done" and len(shown["phases"]) == 3
    assert calls(place) == Counter(
        [f"{x} {seed}" for x in (1.0, 2.0, 3.0) for seed in (0, 1)]
        + [f"2.0 {seed}" for seed in range(5)]
    )
    assert (place / "table.txt").read_text().count("done") == 5
    again = muster_cli("start", "e.toml")
    assert again.returncode == 0 and sum(calls(place).values()) == 11
    assert states(place, muster_main) == dict.fromkeys(["search", "five", "report"], "done")
    # One more seed is one more task, and what comes after it sees the new table.
    more = muster_cli("start", "e.toml", "--set", "five.seeds=6")
    assert more.returncode == 0 and sum(calls(place).values()) == 12
    listed = json.loads(muster_main("list", "--json").stdout)
    assert [(one["name"], one["kind"], one["num_done"]) for one in listed] == [
        ("e", "experiment", 3)
    ]


@pytest.mark.parametrize(
    "when_s", [pytest.param(0.0, marks=slow), 0.6, pytest.param(1.4, marks=slow)]
)
def test_killed_at_any_time_it_goes_on(
    place: Path, muster_cli: MusterCli, muster_main: MusterCli, when_s: float
) -> None:
    """The start of the second phase is waited for, then it is killed some time after that."""
    (place / "e.toml").write_text(HEAD + BEST)
    process = subprocess.Popen(
        [sys.executable, "-m", "muster", "start", "e.toml", "--quiet"], cwd=place,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (place / "runs/e/five").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(when_s)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before, kept = calls(place), 6 + _num_done(place / "runs/e/five")
    done = muster_cli("resume", "e", "--quiet")
    assert done.returncode == 0, done.stderr
    assert set(states(place, muster_main).values()) == {"done"}
    # What was under way at the kill, or not yet written down, is done again; what was is not.
    again = sum(before.values()) - kept
    assert sum(calls(place).values()) <= 11 + again + 1 and before <= calls(place)
    assert (place / "table.txt").read_text().count("done") == 5


def test_what_depends_on_a_failure_does_not_begin(
    place: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    (place / "broken").touch()
    (place / "e.toml").write_text(
        f"""{INLINE}keep_going = true
[phase.bad]
command = "sweep"
target = "work.py:run"
grid.x = [1]
[phase.after_bad]
command = "sweep"
target = "work.py:train"
after = ["bad"]
grid.teacher = ["work.py"]
[phase.other]
command = "sweep"
target = "work.py:train"
grid.teacher = ["work.py"]
produces.model = "model.txt"
[phase.last]
command = "sweep"
target = "work.py:train"
grid.teacher = ["${{other.model}}"]
"""
    )
    done = muster_cli("start", "e.toml")
    assert done.returncode == 1
    assert "after_bad: not begun, because bad is not done" in done.stdout
    assert "other: it is done, but has not produced model: there is no model.txt" in done.stderr
    assert "last: not begun, because other is not done" in done.stdout
    assert states(place, muster_main) == {
        "bad": "failed", "after_bad": "waits", "other": "failed", "last": "waits",
    }  # fmt: skip
    told = json.loads(muster_main("why", "e", "--json").stdout)
    assert told["state"] == "failed" and "bad has failed" in told["sentence"]
    assert "it is broken" in told["causes"][0]["text"]
    assert "it is broken" in muster_main("errors", "e").stdout
    assert list(json.loads(muster_main("errors", "e", "--json").stdout)) == ["bad", "other"]
    refused = muster_main("logs", "e", "1")
    assert refused.returncode == 2 and "runs/e/bad" in refused.stderr
    made = json.loads(muster_main("report", "e", "--json").stdout)
    assert any("bad" in path for path in made)

    # The cause is removed: what failed is tried again, and the rest goes on.
    (place / "broken").unlink()
    (place / "model.txt").write_text("1234")
    assert muster_cli("retry", "runs/e/bad", "--quiet").returncode == 0
    assert muster_cli("start", "e.toml").returncode == 0
    assert set(states(place, muster_main).values()) == {"done"}

    # What a phase produced is removed: the advice, word for word, does the phase again.
    (place / "model.txt").unlink()
    done = muster_cli("start", "e.toml")
    assert done.returncode == 1
    advice = re.search(r"do other anew: (mv \S+ \S+), then start again", done.stderr)
    assert advice is not None, done.stderr
    subprocess.run(shlex.split(advice[1]), cwd=place, check=True)
    assert "other: muster sweep" in muster_cli("start", "e.toml").stdout
    (place / "model.txt").write_text("1234")
    assert muster_cli("start", "e.toml").returncode == 0


def test_a_phase_that_may_fail_and_one_that_is_refused(
    place: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    (place / "broken").touch()
    (place / "e.toml").write_text(
        f"""{INLINE}keep_going = true
[phase.bad]
command = "sweep"
target = "work.py:run"
may_fail = true
grid.x = [1]
[phase.refused]
command = "sweep"
target = "work.py:train"
after = ["bad"]
requires = ["nowhere.txt"]
grid.teacher = ["work.py"]
"""
    )
    done = muster_cli("start", "e.toml", "--quiet")
    assert done.returncode == 2 and "refused: it requires nowhere.txt" in done.stderr
    assert states(place, muster_main) == {"bad": "failed", "refused": "refused"}
    assert "nowhere.txt" in muster_main("why", "e").stdout
    assert muster_main("wait", "e").returncode == 2, "as the command that is waited for"
    with (place / "runs" / "e" / "phases.jsonl").open("a") as journal:
        journal.write('{"event": "begin", "phase": "refused"}\n')
    killed = muster_main("wait", "e")
    assert killed.returncode == 1 and "it was killed" in killed.stdout
    (place / "nowhere.txt").touch()
    done = muster_cli("resume", "e", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "done"
    assert states(place, muster_main) == {"bad": "failed", "refused": "done"}
    assert muster_main("wait", "e").returncode == 0

    # A refusal ends with what it was about, wherever that was repaired.
    with (place / "runs/e/phases.jsonl").open("a") as journal:
        journal.write('{"event": "end", "phase": "refused", "exit_code": 3, "why": "no GPU"}\n')
    assert states(place, muster_main)["refused"] == "done"

    # One that cannot be read is told, and hides nothing of the others.
    (place / "runs/e/refused/run.json").write_text("{")
    assert muster_main("start", "e.toml", "--dry-run").returncode == 0
    done = muster_cli("start", "e.toml")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert states(place, muster_main) == {"bad": "failed", "refused": "damaged"}


def test_a_file_in_another_folder(
    place: Path, muster_cli: MusterCli, muster_main: MusterCli
) -> None:
    """Its folder was looked for in itself by `muster resume`."""
    (place / "exp").mkdir()
    (place / "work.py").rename(place / "exp/work.py")
    (place / "exp/e.toml").write_text(
        f'{INLINE}[phase.a]\ncommand = "sweep"\ntarget = "work.py:run"\ngrid.x = [1]\n'
    )
    assert muster_cli("start", "exp/e.toml", "--quiet").returncode == 0
    done = muster_cli("resume", "exp/runs/e", "--quiet")
    assert done.returncode == 0, done.stderr
    with hold(RunFolder(place / "exp/runs/e")):
        refused = muster_main("cancel", "exp/runs/e")
    assert refused.returncode == 2 and f"process {os.getpid()} is" in refused.stderr
    (place / "exp/e.toml").write_text('command = "sweep"\ntarget = "work.py:run"\ngrid.x = [1]\n')
    refused = muster_main("start", "exp/e.toml")
    assert refused.returncode == 2 and "an experiment with phases" in refused.stderr


@slow
@pytest.mark.slurm
def test_what_is_handed_in_is_not_done(
    place: Path, slurm: SlurmCluster, muster_cli: MusterCli
) -> None:
    """The start ended with 0, and the second phase had never begun."""
    (place / "p.py").write_text("import time\ntime.sleep(20)\n")
    (place / "e.toml").write_text(
        """
[phase.a]
command = "run"
program = ["p.py"]
on = "slurm"
devices = "cpu:1"
no_wait = true
[phase.b]
command = "sweep"
target = "work.py:train"
on = "inline"
after = ["a"]
grid.teacher = ["work.py"]
"""
    )
    done = muster_cli("start", "e.toml")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "b: not begun, because a is not done" in done.stdout


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[phase.a]\ncommand="sweep"\ntarget="work.py:run"\nafter=["b"]', "Unknown phase"),
        ('[phase.a]\ncommand="sweep"\ntarget="work.py:run"\nafter=["a"]', "comes after itself"),
        (
            '[phase.a]\ncommand="sweep"\ntarget="work.py:run"\nafter=["b"]\n'
            '[phase.b]\ncommand="sweep"\ntarget="work.py:run"\nname="${a.dir}"',
            "wait for each other: a (after b), b (after a)",
        ),
        ('[phase.a]\ncommand="sweep"\ntarget="work.py:run"\nrun_dir="x"', "has its folder in"),
        ('[phase.a]\ncommand="sweeep"\ntarget="work.py:run"', "e.toml:2: command is 'sweeep'"),
        ('[phase.a]\ntarget="work.py:run"', "command"),
        ('[phase."a/b"]\ncommand="sweep"\ntarget="work.py:run"', "cannot be the name of a phase"),
        ('[phase]\na = 3', "phase a has to be a table"),
        ('phase = 3', "phase is 3"),
        ('command="sweep"\n[phase.a]\ncommand="sweep"\ntarget="work.py:run"', "which has phases"),
        (
            '[phase.a]\ncommand="sweep"\ntarget="work.py:run"\ngrid.x=[1]\n'
            '[phase.b]\ncommand="sweep"\ntarget="work.py:run"\nname="${a.model}"',
            "Unknown value ${a.model}",
        ),
        ('epocs=3\n[phase.a]\ncommand="sweep"\ntarget="work.py:run"', "no phase has epocs"),
    ],
)  # fmt: skip
def test_phases_that_cannot_be(place: Path, muster_main: MusterCli, text: str, says: str) -> None:
    (place / "e.toml").write_text(text)
    done = muster_main("start", "e.toml", "--dry-run")
    assert done.returncode == 2 and says in done.stderr, done.stderr


def _tasks(folder: Path) -> Any:
    with closing(sqlite3.connect(f"file:{folder}/ledger.sqlite?mode=ro", uri=True)) as ledger:
        return ledger.execute("SELECT key FROM tasks ORDER BY key").fetchall()


def _num_done(folder: Path) -> int:
    run = run_in(RunFolder(folder))
    return 0 if run is None else run.counts()[TaskState.DONE]


@slow  # tests/unit/cli/test_experiment_files.py compares the words
@pytest.mark.parametrize(
    "line",
    [
        "sweep work.py:run --grid x=1,2 --seeds 3",
        "sweep work.py:run --space x=uniform(0,4) --maximize score --trials 3",
        "sweep --seeds 2 -- echo {seed}",
        "map work.py:stage --input in.jsonl --output o.jsonl --no-ids",
    ],
)
def test_a_run_becomes_a_file_that_does_the_same_tasks(
    place: Path, muster_cli: MusterCli, line: str
) -> None:
    with (place / "work.py").open("a") as work:
        work.write("def stage(record):\n    return {**record, 'b': 1}\n")
    (place / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    head, dashes, tail = line.partition(" -- ")
    words = [*head.split(), "--devices", "cpu:1", "--monitor-interval", "0", "--run-dir", "runs/a"]
    words += ["--", *tail.split()] if dashes else []
    assert muster_cli(*words, "--quiet" if not dashes else "x").returncode == 0
    assert muster_cli("init", "b.toml", "--from", "a").returncode == 0
    (place / "o.jsonl").rename(place / "o1.jsonl") if "map" in line else None
    done = muster_cli("start", "b.toml", "--quiet")
    assert done.returncode == 0, done.stderr
    if "map" in line:
        assert (place / "o.jsonl").read_bytes() == (place / "o1.jsonl").read_bytes()
    else:
        assert _tasks(place / "runs/a") == _tasks(place / "runs/b") != []


@slow
def test_a_sweep_that_python_began_becomes_a_file(place: Path, muster_cli: MusterCli) -> None:
    (place / "call.py").write_text(
        "import muster\nif __name__ == '__main__':\n"
        "    muster.sweep('work.py:run', grid={'x': [1, 2]}, seeds=2, devices='cpu:1',\n"
        "                 run_dir='runs/a', retries=3)\n"
    )
    subprocess.run([sys.executable, "call.py"], cwd=place, check=True, capture_output=True)
    assert muster_cli("init", "b.toml", "--from", "a").returncode == 0
    assert "retries = 3" in (place / "b.toml").read_text()
    assert muster_cli("start", "b.toml", "--quiet").returncode == 0
    assert _tasks(place / "runs/a") == _tasks(place / "runs/b") != []
