"""Stopped tasks in the ledger: what is counted, read, reopened, and which format the file has."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.farm.test_ledger import fill, record

from muster.base.errors import LedgerError
from muster.farm.decisions import Stopped
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.plan import imbalance_of_tasks
from muster.farm.task import Outcome, TaskState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    ledger = Ledger(path)
    ledger.begin()
    ledger.target_id("f.py:f")
    ledger.commit()
    return ledger


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_a_stopped_task_has_a_row_and_can_be_opened_again(ledger: Ledger, path: Path) -> None:
    done, stopped, idle = fill(ledger, 3)
    assert version(path) == 1, "older musters read it until a task is stopped"
    ledger.begin()
    ledger.record_done([record(done)], [(b'{"y":1}', None)])
    ended = record(stopped, Outcome.STOPPED)
    ledger.record_stopped([Stopped(stopped, ended), Stopped(idle, None)], [b'{"y":0.5}', b"{}"])
    ledger.commit()
    assert version(path) == 2
    with LedgerReader(path) as reader:
        rows = {row.task_id: row for row in reader.tasks()}
        counts = reader.counts()
        assert reader.num_retried() == 0
        assert reader.failures() == []
    assert counts == ledger.counts()
    assert (counts[TaskState.DONE], counts[TaskState.STOPPED]) == (1, 2)
    assert imbalance_of_tasks(3, counts, ledger.num_results()) is None
    assert imbalance_of_tasks(3, counts, ledger.num_results() - 1) is not None
    assert rows[stopped.task_id].value == b'{"y":0.5}'
    assert rows[stopped.task_id].outcome == "stopped"
    ledger.begin()
    assert ledger.cancel_open() == 0
    assert ledger.reopen([TaskState.FAILED, TaskState.CANCELLED]) == 0, "no failure: not retried"
    assert ledger.take(stopped.key) is None
    ledger.reopen_stopped([stopped.task_id, done.task_id])
    [again] = ledger.claim(5)
    ledger.commit()
    assert (again.task_id, again.token) == (stopped.task_id, stopped.token + 1)
    counts = ledger.counts()
    assert imbalance_of_tasks(3, counts, ledger.num_results()) is None
    ledger.begin()
    ledger.record_done([record(again)], [(b'{"y":2}', None)])
    ledger.commit()
    assert ledger.counts()[TaskState.DONE] == 2
    ledger.close()


def test_a_stop_for_an_old_token_changes_nothing(ledger: Ledger, path: Path) -> None:
    [task] = fill(ledger, 1)
    ledger.begin()
    with pytest.raises(LedgerError, match="do not match the tokens"):
        ledger.record_stopped([Stopped(task._replace(token=9), None)], [b"{}"])
    ledger.roll_back()
    assert (ledger.num_results(), version(path)) == (0, 1)
    ledger.close()


def test_a_task_that_was_to_be_stopped_when_its_coordinator_died(
    ledger: Ledger, path: Path
) -> None:
    [task] = fill(ledger, 1)
    ledger.begin()
    assert ledger.stop_ready(task.task_id, b"{}", lambda _: True) is None
    assert ledger.counts()[TaskState.CLAIMED] == 1, "its worker goes on: it is told instead"
    ledger.recover()
    assert ledger.stop_ready(task.task_id, b'{"y":3}', lambda found: found == task) == task
    ledger.commit()
    assert ledger.counts()[TaskState.STOPPED] == 1
    assert ledger.accepted(task.key.hex()) == ("stopped", task.token)
    ledger.close()
