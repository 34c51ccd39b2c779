"""A search from the command line to its best trial, with trials that end early."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import muster
from muster.run.folder import RunFolder

Main = Callable[..., CompletedProcess[str]]

TRAIN = """
import time

def run(lr: float, seed: int = 0, ctx=None):
    state = ctx.restore() or {"epoch": 0}
    for epoch in range(state["epoch"], 9):
        time.sleep(0.02)
        ctx.log(epoch + 1, accuracy=1 - abs(lr - 0.3) - 1 / (epoch + 2))
        (ctx.folder / "seen.txt").write_text(str(epoch))
        ctx.checkpoint({"epoch": epoch + 1})
    return {"accuracy": 1 - abs(lr - 0.3)}

def fast(lr: float, ctx):
    for step in range(1, 28):
        ctx.log(step, accuracy=1 - abs(lr - 0.3) - 1 / (step + 2))
    return {"accuracy": 1 - abs(lr - 0.3)}

def coarse(lr: float, ctx):
    state = ctx.restore() or {"epoch": 0}
    for epoch in range(state["epoch"], 9):
        ctx.log(epoch + 1, accuracy=1 - abs(lr - 0.3))
        if epoch % 5 == 4:
            ctx.checkpoint({"epoch": epoch + 1})
    return {"accuracy": 1 - abs(lr - 0.3)}

def stubborn(lr: float, ctx):
    ctx.log(1, accuracy=-lr)
    ctx.log(2, accuracy=-lr)
    time.sleep(600 if lr > 0.05 else 0.5)
    return {"accuracy": -lr}
"""

PROGRAM = """
import json, os, sys, time
lr = float(sys.argv[1])
with open(os.environ["MUSTER_METRICS"], "a") as file:
    for step in range(1, 10):
        print(json.dumps({"step": step, "accuracy": -lr}), file=file, flush=True)
        time.sleep(30 if lr > 0.05 and step > 3 else 0.02)
with open(os.path.join(os.environ["MUSTER_TASK_DIR"], "result.json"), "w") as file:
    json.dump({"accuracy": -lr}, file)
"""

FLAGS = ("--devices", "cpu:2", "--quiet", "--monitor-interval", "0", "--run-dir", "runs/it")
ALONE = ("--devices", "cpu:1", *FLAGS[2:])
SEARCH = ("--space", "lr=uniform(0,1)", "--maximize", "accuracy")
ASHA = ("--stop", "asha:min=1,max=9")


def counts(run: Path) -> dict[str, int]:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
        return dict(database.execute("SELECT state, count(*) FROM tasks GROUP BY state"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("search")
    (place / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        muster.sweep(
            "train.py:run", space={"lr": muster.Space.uniform(0, 1)}, maximize="accuracy",
            trials=12, stop="asha:min=1,max=9", try_=[{"lr": 0.3}], devices="cpu:2",
            monitor_interval_s=0, run_dir="runs/it",
        )  # fmt: skip
    return place


@pytest.fixture
def run(searched: Path, tmp_path: Path) -> Path:
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / "it"


def test_every_command_knows_stopped_trials(run: Path, muster_main: Main) -> None:
    shown = muster_main("status", "runs/it").stdout
    assert "stopped of 12 tasks" in shown
    assert "best so far: accuracy 1  with lr=0.3" in shown
    assert "0 of 12 left" in shown
    status = json.loads(muster_main("status", "runs/it", "--json").stdout)
    num_stopped = status["counts"]["stopped"]
    assert status["counts"]["done"] + num_stopped == 12
    assert num_stopped >= 6
    assert status["state"] == "done"
    assert sum(status["search"]["stopped"].values()) == num_stopped
    [listed] = json.loads(muster_main("list", "--json").stdout)
    assert (listed["state"], listed["num_done"], listed["num_total"]) == ("done", 12, 12)
    assert muster_main("export", "runs/it", "--to", "t.jsonl").returncode == 0
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    stopped = [row for row in rows if row["state"] == "stopped"]
    assert len(stopped) == num_stopped
    assert all(row["accuracy"] is not None and row["error"] is None for row in stopped)
    assert all((run / row["folder"] / "seen.txt").exists() for row in stopped)
    assert muster_main("errors", "runs/it").stdout == "No attempt has failed.\n"
    assert "stopped" in muster_main("logs", "runs/it", stopped[0]["task"]).stdout
    assert "nothing to cancel" in muster_main("cancel", "runs/it").stdout
    assert "no task has failed" in muster_main("retry", "runs/it").stdout
    before = counts(run)
    assert muster_main("resume", "runs/it", "--quiet").returncode == 0
    assert counts(run) == before
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_best_is_run_again_by_its_command(run: Path, muster_main: Main) -> None:
    [best, second] = json.loads(muster_main("best", "runs/it", "-n", "2", "--json").stdout)
    assert best["values"]["accuracy"] == 1.0 >= second["values"]["accuracy"]
    assert best["command"] == "muster sweep train.py:run --grid lr=0.3"
    words = shlex.split(best["command"])[1:]
    assert muster_main(*words, "--devices", "cpu:1", "--run-dir", "runs/again").returncode == 0
    [row] = muster.Run("runs/again").results().to_pylist()
    assert row["accuracy"] == 1.0
    assert "trial 0: accuracy 1\n" in muster_main("best", "runs/it").stdout
    assert "is not a search" in muster_main("best", "runs/again").stderr
    done = muster_main("export", "runs/again", "--to", "study.db")
    assert done.returncode == 2 and "is not a search" in done.stderr


def test_the_report_of_a_search_shows_it(run: Path, muster_main: Main) -> None:
    assert muster_main("report", "runs/it", "--out", "page").returncode == 0
    page = Path("page/index.html").read_text()
    assert "A search of train.py:run: 12 trials, to maximize accuracy; sampler random" in page
    pictures = {path.stem for path in Path("page/figures").glob("*.png")}
    named = {"history-accuracy", "trials-accuracy", "rungs", "parallel", "slice-lr-accuracy"}
    assert pictures == named, "one parameter has no importance"
    assert all(f"{name}.png" in page for name in named)
    for said in ("The best trials", "Run trial 0 again", "Where trials are compared", "cutoff",
                 "muster sweep train.py:run --grid lr=0.3", "12 of 12, 0 left"):  # fmt: skip
        assert said in page, said


def test_a_search_becomes_a_study_of_optunas(run: Path, muster_main: Main) -> None:
    optuna = pytest.importorskip("optuna")
    target = Path("a study?#.db")  # no URL could name it
    done = muster_main("export", "runs/it", "--to", str(target))
    assert (done.returncode, done.stdout) == (0, "12 trials in a study?#.db\n")
    target.rename("study.db")
    study = optuna.load_study(study_name="it", storage="sqlite:///study.db")
    assert (len(study.trials), study.direction.name) == (12, "MAXIMIZE")
    assert study.best_trial.number == 0 and study.best_value == 1.0
    states = {trial.state.name for trial in study.trials}
    assert states == {"COMPLETE", "PRUNED"}
    with closing(sqlite3.connect("runs/it/ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT started_s, started_s + seconds FROM attempts").fetchall()
    assert min(trial.datetime_start.timestamp() for trial in study.trials) == pytest.approx(
        min(begin for begin, _ in rows)
    )
    assert max(trial.datetime_complete.timestamp() for trial in study.trials) == pytest.approx(
        max(end for _, end in rows)
    ), "the times are those of the work, not of the export"
    again = muster_main("export", "runs/it", "--to", "study.db")
    assert again.returncode == 2 and "already exists" in again.stderr
    assert muster_main("export", "runs/it", "--to", "none/study.db").returncode == 2
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


KILLED = """
import os, random, signal, sys, time
import optuna, sqlalchemy, sqlite3, pyarrow.csv, pyarrow.parquet
from muster.cli.main import main

words, target, kills = sys.argv[3:], sys.argv[2], int(sys.argv[1])
draw, least, most = random.Random(5), 0.0, None
for number in range(kills + 1):
    begun = time.monotonic()
    if not (child := os.fork()):
        os._exit(main(words))
    if most is not None:
        time.sleep(draw.uniform(0.0, most))
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    most = most or time.monotonic() - begun
    if os.path.exists(target):
        os.rename(target, f"{number}.{target}")
"""


@pytest.mark.parametrize(
    ("command", "target", "kills"),
    [
        pytest.param(command, target, kills, marks=[pytest.mark.slow] * (kills > 9))
        for kills in (2, 100)
        for command, target in (("export", "s.db"), ("metrics", "m.parquet"), ("metrics", "m.csv"))
        if kills > 9 or target == "s.db"
    ],
)
def test_a_killed_export_leaves_a_whole_file_or_none(
    command: str, target: str, kills: int, run: Path, muster_main: Main
) -> None:
    """The first is not killed, and says how long it takes."""
    program = [sys.executable, "-c", KILLED, str(kills), target, command, "runs/it", "--to", target]
    place = run.parents[1]
    subprocess.run(program, check=True, capture_output=True, timeout=600, cwd=place)
    assert muster_main(*program[5:]).returncode == 0
    found = [*Path().glob(f"*.{target}"), Path(target)]
    assert Path(f"0.{target}") in found

    def content(path: Path) -> object:
        if path.suffix != ".db":
            return path.read_bytes()
        with closing(sqlite3.connect(path)) as study:
            assert study.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            return study.execute("SELECT number, state FROM trials ORDER BY number").fetchall()

    assert len({repr(content(path)) for path in found}) == 1
    assert content(found[0])


def test_more_trials_go_on_and_another_search_is_refused(run: Path, muster_main: Main) -> None:
    same = ["sweep", "train.py:run", *SEARCH, *ASHA, "--try", "lr=0.3", *FLAGS]
    assert muster_main(*same, "--trials", "14").returncode == 0
    assert sum(counts(run).values()) == 14
    for other, what in (
        (["--sampler", "qmc"], 'sampler: "random" -> "qmc"'),
        (["--stop", "asha:min=2,max=9"], "stop min_step: 1.0 -> 2.0"),
        (["--seeds", "2"], "seeds: null -> [0, 1]"),
        (["--space", "q=int(1,2)"], "q"),
    ):
        done = muster_main(*same, "--trials", "14", *other)
        assert done.returncode == 2, other
        assert what in done.stderr
    assert sum(counts(run).values()) == 14


def test_a_goal_that_nobody_logs_ends_the_search_at_once(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("--space", "lr=uniform(0,1)", "--maximize", "acuracy", "--trials", "30")
    done = muster_main("sweep", "train.py:run", *words, *ASHA, *FLAGS)
    assert done.returncode == 2
    assert "The search asks for acuracy" in done.stderr
    assert "logged or returned accuracy" in done.stderr
    assert "did you mean 'accuracy'?" in done.stderr
    run = tmp_path / "runs" / "it"
    assert sum(counts(run).values()) <= 6, "not all thirty have begun"
    assert counts(run)[2] >= 1, "and what has finished is kept"
    again = [*words[:3], "accuracy", *words[4:], *ASHA, *FLAGS, "--restart", "--trials", "2"]
    assert muster_main("sweep", "train.py:run", *again).returncode == 0


LATE = """
import time
from pathlib import Path

def run(lr: float):
    try:
        Path(__file__).with_name("first").mkdir()
        return {}
    except FileExistsError:
        time.sleep(0.3)
        return {"y": lr}
"""


def test_a_trial_without_the_goal_ends_no_others(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "late.py").write_text(LATE)
    words = ("--space", "lr=uniform(0,1)", "--maximize", "y", "--trials", "4")
    done = muster_main("sweep", "late.py:run", *words, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert counts(tmp_path / "runs" / "it") == {2: 4}


def test_what_an_earlier_muster_kept_of_its_rules_changes_nothing(
    run: Path, muster_main: Main
) -> None:
    gone = {"population": 10}
    record = json.loads((run / "run.json").read_text())
    for part in (record["fixed"]["search"], record["spec"]["search"]):
        part["stopping"] |= gone
        del part["stopping"]["quantile"]  # which came later
    (run / "run.json").write_text(json.dumps(record))
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
        [text] = database.execute("SELECT value FROM meta WHERE name = 'search'").fetchone()
        known = json.loads(text)
        known["stopping"] |= gone
        database.execute("UPDATE meta SET value = ? WHERE name = 'search'", (json.dumps(known),))
        for number, body in database.execute("SELECT id, body FROM search").fetchall():
            old = {**json.loads(body), "parent": None, "source": None}
            database.execute(
                "UPDATE search SET body = ? WHERE id = ?", (json.dumps(old).encode(), number)
            )
        database.commit()
    same = ["sweep", "train.py:run", *SEARCH, *ASHA, "--try", "lr=0.3", *FLAGS]
    done = muster_main(*same, "--trials", "13")
    assert done.returncode == 0, done
    assert sum(counts(run).values()) == 13


def test_a_grid_finishes_what_a_search_has_stopped(run: Path, muster_main: Main) -> None:
    rows = muster.Run(run).results().to_pylist()
    stopped = [row for row in rows if row["state"] == "stopped"]
    lr, attempts = stopped[0]["lr"], stopped[0]["attempts"]
    before = counts(run)
    done = muster_main("sweep", "train.py:run", "--grid", f"lr={lr!r}", *FLAGS)
    assert done.returncode == 0, done
    [row] = [r for r in muster.Run(run).results().to_pylist() if r["lr"] == lr]
    assert (row["state"], row["attempts"]) == ("done", attempts + 1)
    assert counts(run) == {**before, 2: before[2] + 1, 5: before[5] - 1}
    steps = [p["step"] for p in muster.Run(run).metrics().to_pylist() if p["task"] == row["task"]]
    assert steps == list(range(1, 10)), "it went on from its checkpoint"
    same = ["sweep", "train.py:run", *SEARCH, *ASHA, "--try", "lr=0.3", *FLAGS]
    assert muster_main(*same, "--trials", "13").returncode == 0
    ranked = json.loads(muster_main("best", "runs/it", "-n", "20", "--json").stdout)
    assert [one["state"] for one in ranked if one["params"]["lr"] == lr] == ["done"]


def test_a_function_that_never_asks_loses_its_worker(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = muster_main(
        "sweep", "train.py:stubborn", *SEARCH, "--try", "lr=0.01", "--trials", "3",
        "--stop", "asha-stop:min=1,max=9", *ALONE,  # two at once might come in another order
    )  # fmt: skip
    assert done.returncode == 0, done
    rows = muster.Run("runs/it").results().to_pylist()
    assert {row["state"] for row in rows} == {"done", "stopped"}
    assert all(row["accuracy"] == pytest.approx(-row["lr"]) for row in rows)


def test_a_trial_ends_at_the_very_rung_however_fast_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = muster.sweep(
            "train.py:fast", space={"lr": muster.Space.uniform(0, 1)}, maximize="accuracy",
            trials=12, stop="asha-stop:min=1,max=27", devices="cpu:2", monitor_interval_s=0,
            run_dir="runs/it",
        )  # fmt: skip
        table = run.metrics()
    columns = zip(table.column("task").to_pylist(), table.column("step").to_pylist(), strict=True)
    last: dict[object, int] = {}
    for task, step in columns:
        last[task] = max(step, last.get(task, 0))
    assert len(last) == 12
    assert set(last.values()) <= {1, 3, 9, 27} and min(last.values()) < 27


def test_a_promoted_trial_that_is_beyond_its_next_rung_pauses_there(tmp_path: Path) -> None:
    """The best of three comes from rung 1, and has been at rung 3, where it is the first."""
    (tmp_path / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = muster.sweep(
            "train.py:coarse", space={"lr": muster.Space.uniform(0, 1)}, maximize="accuracy",
            trials=3, stop="asha:min=1,max=9", try_=[{"lr": 0.3}], devices="cpu:1",
            monitor_interval_s=0, run_dir="runs/it",
        )  # fmt: skip
        states = [row["state"] for row in run.results().to_pylist()]
        steps = run.metrics().column("step").to_pylist()
    assert states == ["stopped"] * 3
    assert max(steps) == 5, "it ended at its checkpoint"


def test_a_trial_that_was_told_to_end_when_its_coordinator_died_keeps_its_folder(
    run: Path, muster_main: Main
) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as database:
        sql = "SELECT task_id, lower(hex(key)), token FROM tasks WHERE state = 5 LIMIT 1"
        task_id, key, token = database.execute(sql).fetchone()
        database.execute("UPDATE tasks SET state = 1 WHERE task_id = ?", (task_id,))
        database.execute("DELETE FROM results WHERE task_id = ?", (task_id,))
        database.execute("DELETE FROM search WHERE kind = 'ended' AND task_id = ?", (task_id,))
        database.commit()
    (run / "attempts").mkdir(exist_ok=True)
    RunFolder(run).artifact(key).rename(RunFolder(run).attempt(key, token))
    assert muster_main("resume", "runs/it", "--quiet").returncode == 0
    [row] = [r for r in muster.Run("runs/it").results().to_pylist() if key.startswith(r["task"])]
    assert row["state"] == "stopped"
    assert (run / row["folder"] / "seen.txt").exists()


def test_programs_end_by_a_signal(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = muster_main(
        "sweep", *SEARCH, "--try", "lr=0.01", "--trials", "4", "--stop", "asha-stop:min=1,max=9",
        *ALONE, "--", "python", "program.py", "{lr}",  # two at once might come in another order
    )  # fmt: skip
    assert done.returncode == 0, done
    rows = muster.Run("runs/it").results().to_pylist()
    assert {row["state"] for row in rows} == {"done", "stopped"}


def test_a_grid_begins_a_search_and_a_search_a_grid(tmp_path: Path, muster_main: Main) -> None:
    (tmp_path / "f.py").write_text("def f(x: int):\n    return {'y': -x * x + 6 * x}\n")
    grid = ["sweep", "f.py:f", "--grid", "x=1,2,8", *FLAGS]
    assert muster_main(*grid).returncode == 0
    search = ["sweep", "f.py:f", "--space", "x=int(1,5)", "--maximize", "y", *FLAGS]
    assert muster_main(*search).returncode == 0
    assert sum(counts(tmp_path / "runs" / "it").values()) == 6, "two of five were there"
    [best] = json.loads(muster_main("best", "runs/it", "--json").stdout)
    assert (best["params"], best["values"]) == ({"x": 3}, {"y": 9.0})
    assert muster_main("sweep", "f.py:f", "--grid", "x=1,2,9", *FLAGS).returncode == 0
    assert sum(counts(tmp_path / "runs" / "it").values()) == 7
    assert muster_main(*search).returncode == 0
    assert sum(counts(tmp_path / "runs" / "it").values()) == 7


def test_a_search_goes_on_with_a_larger_budget_as_add_says(
    tmp_path: Path, muster_main: Main
) -> None:
    (tmp_path / "f.py").write_text(
        "import muster\ndef f(x: float):\n    return {'y': x}\n"
        "if __name__ == '__main__':\n"
        "    space = {'x': muster.Space.uniform(0, 1)}\n"
        "    muster.sweep(f, space=space, minimize='y', trials=2, try_={'x': 0.5},\n"
        "                 devices='cpu:1', run_dir='called')\n"
    )
    subprocess.run([sys.executable, "f.py"], cwd=tmp_path, check=True)
    typed = ("--space", "x=uniform(0,1)", "--minimize", "y", "--trials", "2", "--devices", "cpu:1")
    assert muster_main("sweep", "f.py:f", *typed, "--run-dir", "typed").returncode == 0
    for name in ("called", "typed"):
        refused = muster_main("add", name, "--grid", "x=1")
        line = f"muster resume {name} --trials "
        assert refused.returncode == 2 and line in refused.stderr
        done = muster_main(*line.split()[1:], "4")
        assert done.returncode == 0, done.stderr
        assert json.loads(muster_main("status", name, "--json").stdout)["num_done"] == 4
    assert muster_main("sweep", "f.py:f", "--grid", "x=1", "--run-dir", "plain").returncode == 0
    refused = muster_main("resume", "plain", "--trials", "4")
    assert refused.returncode == 2
    assert "plain is no search" in refused.stderr and "muster add" in refused.stderr
