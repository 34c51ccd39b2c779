"""A search whose ledger is away from its run folder: what it says comes home line by line."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.farm.test_decide import TARGETS, cpus
from tests.unit.farm.test_ledger import SLOT, new_tasks, record

from muster.farm import metrics
from muster.farm.decide import Scheduler
from muster.farm.decisions import Policy, Stopped
from muster.farm.events import Event, Logged
from muster.farm.ledger.away import AwayLedger
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.steering import Proposed, Steering
from muster.farm.task import Outcome, TaskState
from muster.farm.view import Picture
from muster.run.folder import RunFolder


def contents(path: Path) -> list[object]:
    """Everything that a search needs to go on, in the order in which it was recorded."""
    with LedgerReader(path) as reader:
        rows = [(row.key, row.state, row.attempts, row.value, row.has_files, row.outcome)
                for row in reader.tasks()]  # fmt: skip
        frames = [(row.task_id, row.token, row.body) for row in reader.metrics()]
        return [rows, frames, reader.search_rows()]


def search(ledger: Ledger, number: int) -> None:
    """A trial in a few turns: by its number it is done, paused, or stopped unseen."""
    [new] = new_tasks(1, number)
    ledger.begin()
    ledger.add_tasks([new])
    task_id, _, _ = ledger.standing(new.key)
    ledger.record_search([SearchRow("proposal", task_id, b'{"trial":%d}' % number)])
    if number % 3 == 2:
        ledger.stop_ready(task_id, b'{"y":0.1}', lambda task: True)
        ledger.record_search([SearchRow("ended", task_id, b'{"state":"stopped"}')])
        ledger.commit()
        return
    [task] = ledger.claim(1)
    ledger.commit()
    ledger.begin()
    ledger.record_metrics([(task_id, task.token, 1, metrics.encode([("y", 1, 0.0, 0.5)]))])
    rows = [SearchRow("heard", task_id, b"{}"), SearchRow("decision", None, b'{"kind":"pause"}')]
    ledger.record_search(rows)
    ledger.commit()
    ledger.begin()
    if number % 3:
        ended = record(task, Outcome.STOPPED, files=True, seconds=2.5)
        ledger.record_stopped([Stopped(task, ended)], [b'{"y":0.5}'])
        ledger.record_search([SearchRow("ended", task_id, b'{"state":"paused"}')])
    else:
        ledger.record_done([record(task)], [(b'{"y":1}', None)])
        ledger.record_search([SearchRow("ended", task_id, b'{"state":"done"}')])
    ledger.commit()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "ledger.sqlite"


def test_a_search_that_loses_its_host_goes_on_from_the_lines(home: Path, tmp_path: Path) -> None:
    away = tmp_path / "a" / "ledger.sqlite"
    ledger = AwayLedger(away, home)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.worker_started(1, SLOT, "host", "log")
    ledger.commit()
    copied = home.stat().st_ino
    for number in range(12):
        search(ledger, number)
    ledger.begin()
    ledger.record_search([SearchRow("decision", None, b'{"kind":"promote"}')])
    ledger.reopen_stopped([2, 8])
    ledger.commit()
    assert home.stat().st_ino == copied, "no turn has copied the ledger"
    here = contents(away)
    assert contents(home) == here
    ledger.roll_back()  # and no close: the host is gone
    shutil.rmtree(tmp_path / "a")
    other = AwayLedger(tmp_path / "b" / "ledger.sqlite", home)
    assert other.counts()[TaskState.STOPPED] == 6
    assert other.counts()[TaskState.READY] == 2, "those that were promoted"
    search(other, 12)
    other.close()
    assert contents(home)[2][: len(here[2])] == here[2]  # type: ignore[index, arg-type]
    with closing(sqlite3.connect(home)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_task_that_was_cancelled_stays_so_without_its_host(home: Path, tmp_path: Path) -> None:
    ledger = AwayLedger(tmp_path / "a" / "ledger.sqlite", home)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.add_tasks(new_tasks(4))
    ledger.worker_started(1, SLOT, "host", "log")
    ledger.commit()
    ledger.snapshot()
    ledger.begin()
    [ran, waited] = ledger.claim(2)
    ended = record(ran, Outcome.STOPPED, seconds=2.5)
    ledger.record_cancelled([Stopped(ran, ended), Stopped(waited, None)])
    assert ledger.cancel_one(3) is None
    ledger.commit()
    here = contents(tmp_path / "a" / "ledger.sqlite")
    assert contents(home) == here
    ledger.roll_back()  # and no close: the host is gone
    shutil.rmtree(tmp_path / "a")
    other = AwayLedger(tmp_path / "b" / "ledger.sqlite", home)
    counts = other.counts()
    assert (counts[TaskState.CANCELLED], counts[TaskState.READY]) == (3, 1)
    assert contents(home) == here
    other.close()


def test_the_tasks_of_a_grid_that_came_first_are_the_same_in_the_lines(
    home: Path, tmp_path: Path
) -> None:
    ledger = AwayLedger(tmp_path / "a" / "ledger.sqlite", home)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.add_tasks(new_tasks(3))
    ledger.record_search([SearchRow("proposal", 2, b'{"trial":0}')])  # given
    ledger.commit()
    with LedgerReader(home) as reader:
        assert reader.search_rows() == [SearchRow("proposal", 1, b'{"trial":0}')]
        [row] = reader.tasks()
        assert (row.key, row.target) == (new_tasks(3)[1].key, "f.py:f")
    ledger.close()


class Unwanting:
    """A driver whose only task was decided to end before it began."""

    num_expected, num_at_once, problem = 1, 1, None

    def __init__(self) -> None:
        self.proposed = [Proposed(new_tasks(1)[0], None, is_wanted=False)]
        self.rows: list[SearchRow] = []

    def begin(self, ledger: Ledger) -> list[Event]:
        return []

    def ask(self, count: int) -> list[Proposed]:
        proposed, self.proposed = self.proposed, []
        return proposed

    def added(self, what: object, task_id: int) -> None:
        self.rows.append(SearchRow("proposal", task_id, b"{}"))

    def heard(self, logged: Logged) -> list[Event]:
        return []

    def ended(self, task_id: int, state: TaskState, value: bytes) -> list[Event]:
        self.rows.append(SearchRow("ended", task_id, b"{}"))
        return []

    def last_of(self, task_id: int) -> bytes:
        return b"{}"

    def take_records(self) -> list[SearchRow]:
        rows, self.rows = self.rows, []
        return rows

    def is_over(self) -> bool:
        return not self.proposed


def test_a_task_that_nobody_wants_comes_home_before_its_end(home: Path, tmp_path: Path) -> None:
    away = tmp_path / "a" / "ledger.sqlite"
    ledger = AwayLedger(away, home)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.worker_started(1, SLOT, "host", "log")
    ledger.commit()
    steering = Steering(Unwanting(), ledger, RunFolder(tmp_path))
    scheduler = Scheduler(Policy(asks_ahead=False), cpus(1), TARGETS)
    ledger.begin()
    fetched = steering.choose(scheduler, Picture("it", 1, 0.0))
    ledger.commit()
    assert fetched.tasks == []
    assert contents(home) == contents(away)
    assert [row.kind for row in contents(home)[2]] == ["proposal", "ended"]  # type: ignore[attr-defined]
    ledger.close()


TRAIN = """
import time

def run(lr: float, ctx):
    state = ctx.restore() or {"epoch": 0}
    for epoch in range(state["epoch"], 9):
        time.sleep(0.01)
        ctx.log(epoch + 1, accuracy=1 - abs(lr - 0.3) - 1 / (epoch + 2))
        ctx.checkpoint({"epoch": epoch + 1})
    return {"accuracy": 1 - abs(lr - 0.3)}
"""


@pytest.mark.thorough
def test_a_search_goes_on_after_its_host_died_with_its_disk(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [
        sys.executable, "-m", "muster", "sweep", "train.py:run", "--space", "lr=uniform(0,1)",
        "--maximize", "accuracy", "--trials", "9", "--stop", "asha:min=1,max=9", "--devices",
        "cpu:1", "--quiet", "--monitor-interval", "0", "--run-dir", "it",
    ]  # fmt: skip
    environment = {**os.environ, "MUSTER_LEDGER_DIR": str(tmp_path / "local")}
    first = subprocess.Popen(command, cwd=tmp_path, env=environment)
    segment = tmp_path / "it" / "ledger.segment"
    while first.poll() is None and not (
        segment.exists() and segment.read_bytes().count(b'"decision"') >= 4
    ):
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with LedgerReader(tmp_path / "it" / "ledger.sqlite") as reader:
        before = reader.search_rows()
    assert len(before) > 8
    shutil.rmtree(tmp_path / "local")
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 0
    with LedgerReader(tmp_path / "it" / "ledger.sqlite") as reader:
        after = reader.search_rows()
        states = [row.state for row in reader.tasks()]
    assert after[: len(before)] == before
    assert len(states) == 9
    assert set(states) <= {TaskState.DONE, TaskState.STOPPED}
