"""Jobs cancelled, nodes lost, coordinators killed: every task is recorded exactly once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

TARGET = """
import time
from pathlib import Path

def work(x: int, last: int):
    time.sleep(0.05)
    while x > last - 10 and not Path(__file__).with_name("go").exists():
        time.sleep(0.05)  # so that it is at work still when something goes wrong
    return {"y": x * x + 1}
"""
_LIMIT_S = 300.0


class Sweep:
    """A sweep on SLURM whose coordinator can be killed and started again."""

    def __init__(self, folder: Path, num_tasks: int) -> None:
        (folder / "target.py").write_text(TARGET)
        self.run = folder / "run"
        self.num_tasks = num_tasks
        self._words = [
            sys.executable, "-m", "muster", "sweep", "target.py:work", "--quiet",
            "--grid", "x=" + ",".join(map(str, range(num_tasks))),
            "--grid", f"last={num_tasks - 1}",
            "--on", "slurm", "--workers", "3", "--run-dir", "run",
        ]  # fmt: skip
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._words, cwd=self._folder, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.communicate()

    def interrupt(self) -> None:
        """As Ctrl-C does; it leaves nothing in the queue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self.let_go()
        self._process.communicate(timeout=_LIMIT_S)

    def let_go(self) -> None:
        (self._folder / "go").touch()

    def end(self) -> None:
        assert self._process is not None
        self.let_go()
        out, _ = self._process.communicate(timeout=_LIMIT_S)
        assert self._process.returncode == 0, out

    def num_done(self) -> int:
        try:
            [(count,)] = self.ask("SELECT count(*) FROM tasks WHERE state = 2")
        except sqlite3.Error:
            return 0
        return int(str(count))

    def await_done(self, count: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while self.num_done() < count:
            assert self._process is not None
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, f"only {self.num_done()} are done"
            time.sleep(0.05)

    def ask(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(f"file:{self.run}/ledger.sqlite?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def check(self) -> None:
        """Every task is done, once, with the result that it has without any trouble."""
        found = self.ask("SELECT json_extract(payload, '$.x'), json_extract(value, '$.y') "
                         "FROM tasks JOIN results USING (task_id) ORDER BY 1")  # fmt: skip
        assert found == [(x, x * x + 1) for x in range(self.num_tasks)]
        accepted = self.ask("SELECT task_id, count(*) FROM attempts WHERE outcome = 'ok' "
                            "GROUP BY task_id HAVING count(*) <> 1")  # fmt: skip
        assert accepted == []
        blamed = self.ask("SELECT count(*) FROM tasks WHERE tries > 0")
        assert blamed == [(0,)], "no task was at fault"


@contextmanager
def sweeping(folder: Path, num_tasks: int) -> Iterator[Sweep]:
    sweep = Sweep(folder, num_tasks)
    sweep.start()
    try:
        yield sweep
    finally:
        sweep.kill()


def cancel_one(slurm: SlurmCluster, sweep: Sweep, dice: random.Random) -> None:
    elements = [row["id"] for row in slurm.squeue() if row["state"] == "RUNNING"]
    slurm.scancel(dice.choice(elements))


def kill_coordinator(slurm: SlurmCluster, sweep: Sweep, dice: random.Random) -> None:
    sweep.kill()
    sweep.start()


def lose_everything(slurm: SlurmCluster, sweep: Sweep, dice: random.Random) -> None:
    sweep.kill()
    for row in slurm.squeue():
        slurm.scancel(row["id"])
    deadline = time.monotonic() + _LIMIT_S
    while slurm.squeue():
        assert time.monotonic() < deadline, "the jobs do not end"
        time.sleep(0.1)
    sweep.start()


def lose_node(slurm: SlurmCluster, sweep: Sweep, dice: random.Random) -> None:
    nodes = sorted({row["nodes"] for row in slurm.squeue() if row["state"] == "RUNNING"})
    node = dice.choice(nodes)
    slurm.node_down(node)
    slurm.node_up(node)


Trouble = Callable[[SlurmCluster, Sweep, random.Random], None]


@pytest.mark.parametrize(
    "trouble",
    [
        cancel_one,
        kill_coordinator,
        lose_everything,
        pytest.param(lose_node, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_or_doubled(slurm: SlurmCluster, tmp_path: Path, trouble: Trouble) -> None:
    with sweeping(tmp_path, 100) as sweep:
        sweep.await_done(10)
        trouble(slurm, sweep, random.Random(0))
        sweep.end()
        sweep.check()
    assert slurm.squeue() == []


def test_a_sweep_that_was_interrupted_hears_nothing_twice(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    with sweeping(tmp_path, 100) as sweep:
        sweep.await_done(10)
        sweep.interrupt()
        assert slurm.squeue() == []
        sweep.start()
        sweep.end()
        sweep.check()
        assert sweep.ask("SELECT count(*) FROM late_results") == [(0,)]
        ended = sweep.ask("SELECT count(*) FROM workers WHERE ending = 'its pilot ended'")
        assert ended == [(0,)], "nobody dies of what was said before"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_or_doubled_in_a_series_of_troubles(
    slurm: SlurmCluster, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    with sweeping(tmp_path, 1500) as sweep:
        for step in range(6):
            sweep.await_done(100 + 150 * step)
            dice.choice([cancel_one, kill_coordinator, lose_node])(slurm, sweep, dice)
        sweep.end()
        sweep.check()
    assert slurm.squeue() == []
