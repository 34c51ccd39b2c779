"""Kill -9 of the coordinator and of workers of a search: it decides what it would have decided."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

_LIMIT_S = 300.0

TRAIN = """
import time

def run(lr: float, ctx):
    state = ctx.restore() or {"epoch": 0}
    for epoch in range(state["epoch"], 9):
        ctx.log(epoch + 1, accuracy=1 - abs(lr - 0.3) - 1 / (epoch + 2))
        ctx.checkpoint({"epoch": epoch + 1})
        time.sleep(0.03)
    return {"accuracy": 1 - abs(lr - 0.3)}
"""


class Hand:
    """Starts a search with one worker again and again, and kills what is at work."""

    def __init__(self, folder: Path, seed: int, trials: int, stop: str) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        self.folder = folder
        self.random = random.Random(seed)
        self.command = [
            sys.executable, "-m", "muster", "sweep", "train.py:run", "--space", "lr=uniform(0,1)",
            "--maximize", "accuracy", "--trials", str(trials), "--stop", stop,
            "--devices", "cpu:1", "--retries", "1000", "--quiet", "--monitor-interval", "0",
            "--run-dir", "runs/it",
        ]  # fmt: skip
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {**os.environ, "PYTHONPATH": source}

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command, cwd=self.folder, env=self.environment)

    def finish(self) -> None:
        process = self.start()
        assert process.wait(timeout=_LIMIT_S) == 0

    def num_rows(self) -> int:
        path = self.folder / "runs" / "it" / "ledger.sqlite"
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            return int(db.execute("SELECT count(*) FROM search").fetchone()[0])
        return 0

    def kill(self, kills: int) -> None:
        """Kill a coordinator or its worker after a few more rows of the search, ``kills`` times."""
        process = self.start()
        for _ in range(kills):
            goal = self.num_rows() + self.random.randrange(1, 8)
            deadline = time.monotonic() + _LIMIT_S
            while process.poll() is None and self.num_rows() < goal:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if process.poll() is not None:
                break
            time.sleep(self.random.uniform(0, 0.05))
            workers = psutil.Process(process.pid).children(recursive=True)
            if workers and self.random.random() < 0.5:
                with suppress(psutil.NoSuchProcess):
                    self.random.choice(workers).kill()
                continue
            process.send_signal(signal.SIGKILL)
            process.wait()
            _, alive = psutil.wait_procs(workers, timeout=_LIMIT_S)
            assert not alive, "they end with their coordinator"
            process = self.start()
        assert process.wait(timeout=_LIMIT_S) == 0

    def story(self) -> list[Any]:
        """What was proposed and decided, in order; ends with how every task ended."""
        with closing(sqlite3.connect(self.folder / "runs" / "it" / "ledger.sqlite")) as db:
            rows = db.execute(
                "SELECT kind, body FROM search WHERE kind IN ('proposal', 'decision') ORDER BY id"
            ).fetchall()
            tasks = db.execute("SELECT hex(key), state FROM tasks ORDER BY task_id").fetchall()
            [results] = db.execute("SELECT count(*) FROM results").fetchone()
        assert len({key for key, _ in tasks}) == len(tasks) == results
        story = [(kind, json.loads(body)) for kind, body in rows]
        for _, body in story:
            body.pop("spent_s", None)
            body.pop("time_s", None)
        return [story, tasks]


ASHA, POPULATION = "asha:min=1,max=9", "pbt:min=3,max=9"


@pytest.mark.parametrize(
    ("stop", "kills", "trials"),
    [
        (ASHA, 3, 6),
        pytest.param(ASHA, 200, 150, marks=pytest.mark.slow),
        (POPULATION, 3, 4),
        pytest.param(POPULATION, 200, 60, marks=pytest.mark.slow),
    ],
)
def test_kills_change_no_decision_and_lose_no_trial(
    stop: str, kills: int, trials: int, tmp_path: Path
) -> None:
    calm, killed = (
        Hand(tmp_path / name, seed, trials, stop) for seed, name in enumerate(("calm", "killed"))
    )
    calm.finish()
    killed.kill(kills)
    assert killed.story() == calm.story()
    story = killed.story()[0]
    asked = [body for kind, body in story if kind == "proposal" and body["by"] != "pbt"]
    assert len(asked) == trials
    kinds = {body["kind"] for kind, body in story if kind == "decision"}
    assert kinds == {"pause", "promote"} | ({"replace"} if stop == POPULATION else set())
